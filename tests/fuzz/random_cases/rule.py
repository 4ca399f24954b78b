"""The rule that every synchronised backward is held against.

Every gradient is the sum over ranks of (what this rank had + what it computed) / world size, and
stays untouched where no rank used the parameter. The copies beside the models tell what each rank
had and computed. Where the arithmetic is exact the averages are equal bit for bit; else they are
within the bound of what they travelled as. With error feedback, the averages and what all ranks
keep back together lack nothing.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.fuzz.random_cases.tree import local
from tests.fuzz.random_cases.wires import tolerance
from tests.fuzz.random_cases.wrapped import same, seen

__all__ = [
    "check",
    "gathered",
    "gradients_are_alike",
    "recall",
    "snapshot",
    "verify",
    "width",
]

UNUSED, TOUCHED, USED = 0.0, 1.0, 2.0


def _real(tensor):
    """fp64, flat; complex numbers as pairs."""
    tensor = local(tensor.detach())
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.double().reshape(-1)


def _numel(param):
    param = local(param)
    return param.numel() * (2 if param.is_complex() else 1)


def _or_zeros(tensor, param):
    return torch.zeros(_numel(param), dtype=torch.float64) if tensor is None else _real(tensor)


def residuals_of(wrapped):
    """By position; empty where the wire has no error feedback."""
    if wrapped.wire.plain:
        return {}
    by_name = wrapped.model.sync_state_dict()["residuals"]
    names = [param.name for param in wrapped.model._engine.params]
    assert len(names) == len(wrapped.twins.params)
    kept = {i: _real(by_name[name]) for i, name in enumerate(names) if name in by_name}
    # Where nothing has been kept back yet, there are zeros on the CPU.
    return {i: residual.to(wrapped.seat.device) for i, residual in kept.items()}


def _untouched(wrapped, index, found):
    """Return whether a gradient is what its copy has, which may round elsewhere."""
    ours, theirs = wrapped.twins.params[index]
    if same(found, theirs.grad) or not wrapped.drawn.rounds_sums or found is None:
        return same(found, theirs.grad)
    off = (_or_zeros(found, ours) - _or_zeros(theirs.grad, ours)).abs()
    bound = _sum_bound(wrapped, ours) * _or_zeros(wrapped.twins.sums.get(index), ours)
    return bool((off <= bound).all())


def _sum_bound(wrapped, param):
    """Return the bound, relative to the magnitudes of what was added up, which may cancel out."""
    real = param.dtype.to_real() if param.is_complex() else param.dtype
    mixed = wrapped.drawn.mixed
    return 8 * max(torch.finfo(mixed.param_dtype if mixed else real).eps, torch.finfo(real).eps)


def snapshot(wrapped, residuals=None):
    """Return what this rank has after a backward, as one fp64 tensor; forget what it used."""
    residuals = residuals_of(wrapped) if residuals is None else residuals
    parts = []
    for index, (ours, theirs) in enumerate(wrapped.twins.params):
        state = TOUCHED if index in wrapped.touched else UNUSED
        state = USED if index in wrapped.used else state
        found = seen(ours.grad)
        facts = (
            state,
            found is not None,
            theirs.grad is not None,
            _untouched(wrapped, index, found),
        )
        parts.append(torch.tensor(facts, dtype=torch.float64))
        parts += [_or_zeros(found, ours), _or_zeros(theirs.grad, ours)]
        if wrapped.drawn.rounds_sums:
            parts.append(_or_zeros(wrapped.twins.sums.get(index), ours))
        if index in residuals:
            parts.append(residuals[index])
    wrapped.used, wrapped.touched, wrapped.cleared = set(), set(), set()
    wrapped.pending = False
    return torch.cat(parts)


def width(wrapped):
    """Elements of a snapshot without what is kept back."""
    return sum(4 + 2 * _numel(param) for param, _ in wrapped.twins.params)


def total_norm(wrapped):
    """Return the norm of the copy's gradients, which are those of the model after `adopt`.

    Those that ranks average apart count once for each part of the ranks. Collective with these, and
    over the ranks that have other parts of DTensors.
    """
    squares = torch.zeros(len(wrapped.twins.params), dtype=torch.float64)
    for index, (_, theirs) in enumerate(wrapped.twins.params):
        if theirs.grad is not None:
            grad = theirs.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            squares[index] = _real(grad).square().sum()
    if wrapped.parts:
        rows = gathered(wrapped, squares)
        for index, parts in wrapped.parts.items():
            squares[index] = sum(rows[part[0], index] for part in parts)
    return math.sqrt(squares.sum().item())


def adopt(wrapped):
    """Let the copies continue from what the engine computed."""
    for ours, theirs in wrapped.twins.params:
        theirs.grad = None if ours.grad is None else seen(ours.grad).detach().clone()
    wrapped.twins.begin_sums()
    wrapped.begin_means()


def gathered(wrapped, mine):
    """Return `mine` of all ranks, [world, numel], on the CPU."""
    mine = mine.cpu()
    everyones = [torch.empty_like(mine) for _ in range(wrapped.seat.world)]
    dist.all_gather(everyones, mine, group=wrapped.seat.judges)
    return torch.stack(everyones)


def all_say(wrapped, mine):
    """Return whether `mine` is true on all ranks, those with other parts of DTensors, too."""
    found = gathered(wrapped, torch.tensor([float(mine)])).amin().reshape(1)
    if wrapped.seat.mesh is not None:
        dist.all_reduce(found, dist.ReduceOp.MIN, wrapped.seat.mesh.get_group())
    return bool(found)


def check(wrapped, divisor=None):
    """Check the averages after a synchronised backward. Collective."""
    residuals = residuals_of(wrapped)
    wrapped.take_parts()
    rows = gathered(wrapped, snapshot(wrapped, residuals))
    verify(wrapped, rows, divisor or wrapped.seat.world, residuals.keys(), divisor is not None)
    adopt(wrapped)
    if divisor is not None:
        wrapped.twins.parts = {}  # with weights gradients go on otherwise
    wrapped.regrouped = False


def gradients_are_alike(wrapped):
    """Return whether all ranks that average a gradient together have the same. Collective."""
    everyone = [range(wrapped.seat.world)]
    mine = [_or_zeros(seen(ours.grad), ours) for ours, _ in wrapped.twins.params]
    there = [torch.tensor([float(ours.grad is not None)]) for ours, _ in wrapped.twins.params]
    facts = [torch.cat(both) for both in zip(mine, there, strict=True)]
    rows = gathered(wrapped, torch.cat(facts)).split([fact.numel() for fact in facts], dim=1)
    alike = all(
        same(found[rank], found[part[0]])
        for index, found in enumerate(rows)
        for part in wrapped.parts.get(index, everyone)
        for rank in part
    )
    return all_say(wrapped, alike)


def recall(wrapped):
    """Take what ranks keep back as it is: after a change that the rule says nothing of."""
    residuals = residuals_of(wrapped)
    wrapped.owed = {}
    if residuals:
        rows = gathered(wrapped, torch.cat(list(residuals.values())))
        sizes = [r.numel() for r in residuals.values()]
        wrapped.owed = dict(zip(residuals, rows.split(sizes, dim=1), strict=True))


def verify(wrapped, rows, divisor, kept=(), weighted=False):
    """Compare the snapshots of the ranks that took part, [ranks, numel], with the rule.

    Args:
        divisor: that of the sums; what is averaged apart has others, unless `weighted`.
    """
    place = 0
    for index, (param, _) in enumerate(wrapped.twins.params):
        size = _numel(param)
        sizes = [4, size, size] + [size] * (wrapped.drawn.rounds_sums + (index in kept))
        facts, ours, theirs, *rest = rows[:, place : place + sum(sizes)].split(sizes, dim=1)
        place += sum(sizes)
        where = f"parameter {index} ({param.dtype}, {tuple(param.shape)})"
        # Of a parameter that other ranks average apart, these check the average.
        ranks, own = wrapped.apart.get(index, (slice(None), divisor))
        own = divisor if weighted else own
        one = _Parameter(wrapped, index, param, own, where)
        if wrapped.drawn.rounds_sums:
            # What was added up in a backward that failed may be NaN, which bounds nothing.
            one.added = rest.pop(0)[ranks].nan_to_num(0.0, 0.0, 0.0) / own
        before = wrapped.owed.get(index)
        owed = rest[0] if rest else None
        if owed is not None:
            before = torch.zeros_like(owed) if before is None else before
            wrapped.owed[index] = owed
            owed, before = owed[ranks], before[ranks]
        one.compare(facts[ranks], ours[ranks], theirs[ranks], owed, before)


class _Parameter:
    """Check of what arrived for one parameter."""

    def __init__(self, wrapped, index, param, divisor, where):
        self.wrapped, self.index, self.param, self.where = wrapped, index, param, where
        self.scale = 1 / divisor
        self.bucket = wrapped.plan_of(index)
        self.real = param.dtype.to_real() if param.is_complex() else param.dtype

    def compare(self, facts, ours, theirs, owed, before):
        untouched = bool(facts[:, 3].all())
        state = facts[:, 0].max()
        may_rest = state != USED or _numel(self.param) == 0
        if untouched and may_rest and (owed is None or torch.equal(before, owed)):
            return
        if state == UNUSED:
            assert untouched, f"{self.where} was used by no rank, yet changed"
            self._nothing_lost(sum(owed - before), theirs, owed, before)
            return
        assert bool(facts[:, 1].all()), f"{self.where} has no gradient"
        assert bool((ours == ours[0]).logical_or(ours.isnan()).all()), f"{self.where}: ranks differ"
        if owed is not None:  # a rank without a gradient keeps back what it has kept back
            rests = (before == owed).all(1, keepdim=True)
            if not self._is_hierarchical():  # there a rank owes what its node's ranks computed
                rests |= facts[:, 2:3] == 0
            self.sent = before.where(~rests, 0.0)
        self._average(ours[0], theirs, owed, before)

    def _average(self, got, grads, owed, before):
        parts = list(grads.to(self.real).mul(self._scale()).unbind())
        values = parts = [part.double() for part in parts]
        if before is not None:
            values = list((torch.stack(parts) + self.sent).unbind())
        bound = self._bound(parts, values)
        if bound is None:
            wanted = parts[0].to(self.real) + parts[1].to(self.real)
            assert torch.equal(got, wanted.double()), f"{self.where}: wrong average"
            return
        finite = self._finite(got, values)
        # Gradients and the average are rounded to what they are stored in, whatever cancels out.
        bound = bound + 2 * self._eps() * (got.abs() + sum(part.abs() for part in parts))
        error = (got - sum(values)).abs().where(finite, 0.0)
        bound = bound.where(finite, 0.0)
        assert bool((error <= bound).all()), (
            f"{self.where}: off by {float(error.max())}, {self._travelled()}"
        )
        if owed is not None:
            missing = got - sum(parts) + sum(owed) - sum(before)
            self._nothing_lost(missing.where(finite, 0.0), grads, owed, before)

    def _finite(self, got, values):
        """Check that the average is finite where the sum is, and its format can hold it."""
        finite = sum(values).isfinite()
        assert not bool(got[~finite].isfinite().any()), (
            f"{self.where}: infinite, yet arrived finite"
        )
        fits = sum(value.abs() for value in values) < self._largest()
        assert bool(got[finite & fits].isfinite().all()), (
            f"{self.where}: finite, yet arrived infinite, {self._travelled()}"
        )
        return finite & got.isfinite()

    def _largest(self):
        """Sums below it must not overflow."""
        drawn, bucket = self.wrapped.drawn, self.bucket
        dtypes = [self.real]
        if drawn.mixed is not None:
            dtypes += [drawn.mixed.param_dtype, drawn.mixed.reduce_dtype]
        if bucket is not None and bucket.format_name == "halves":
            dtypes.append(torch.float16)
        bounds = [torch.finfo(dtype).max for dtype in dtypes if dtype is not None]
        if drawn.hook_dtype is not None:  # torch's hooks make gradients narrow, and then divide
            bounds.append(torch.finfo(drawn.hook_dtype).max / self.wrapped.seat.world)
        return min(bounds) / 2

    def _scale(self):
        """1 / N in the arithmetic of the kernels."""
        wide = torch.float64 if self.real is torch.float64 else torch.float32
        return torch.tensor(self.scale, dtype=wide, device="cpu")

    def _eps(self):
        return torch.finfo(self.real).eps

    def _travelled(self):
        bucket = self.bucket
        return "unplanned" if bucket is None else f"travelled as {bucket.format_name}"

    def _nothing_lost(self, missing, grads, owed, before):
        size = grads.abs().sum(0) * self.scale + owed.abs().sum(0) + before.abs().sum(0)
        allowed = (2**-19 + 2 * self._eps()) * size
        if self.wrapped.drawn.rounds_sums:
            allowed = allowed + _sum_bound(self.wrapped, self.param) * self.added.sum(0)
        # What is infinite has been left out, but makes the bound meaningless.
        assert bool(((missing.abs() <= allowed + 1e-37) | (missing == 0)).all()), (
            f"{self.where}: {float(missing.abs().max())} was lost or came twice, "
            f"{self._travelled()}"
        )

    def _is_sparse(self):
        return self.bucket is not None and self.bucket.sparse

    def _is_hierarchical(self):
        coded = self.bucket.coded if self.bucket else None
        return coded is not None and coded.node_ranks > 1

    def _bound(self, parts, values):
        """None: exact."""
        drawn, bucket = self.wrapped.drawn, self.bucket
        size = sum(part.abs() for part in parts)
        rounding = 8 * self._eps() * size + 1e-37
        if drawn.hook_dtype is not None:
            return rounding + 4 * torch.finfo(drawn.hook_dtype).eps * size + 2**-22
        if drawn.rounds_sums:
            rounding = rounding + _sum_bound(self.wrapped, self.param) * self.added.sum(0)
        if drawn.zero:  # a gradient travels without the average that it is added to
            values = [v.abs() + more for v, more in zip(values, self.added, strict=True)]
        coded = bucket.coded if bucket is not None else None
        if coded is not None and coded.codec.name != "fp32":
            return rounding + tolerance(coded, self.wrapped.wire, self.param, values)
        wire = self.real if bucket is None or coded is not None else bucket.dtype
        if wire is not self.real:
            narrow = torch.finfo(wire)
            return rounding + 4 * narrow.eps * size + 4 * narrow.smallest_normal * narrow.eps
        if self._is_sparse():  # rows that occur twice may cancel out
            return rounding + 8 * self._eps() * size.max()
        rounded = drawn.mixed is not None and self.real is not torch.float32
        apart, _ = self.wrapped.apart.get(self.index, (range(self.wrapped.seat.world), None))
        alone = len(parts) < 2 or len(apart) > 2
        exact = not rounded and not alone and not drawn.zero
        return None if exact else rounding
