"""One case: a tree cut into units, its copy, and a training in stages, drawn from its number."""

import copy
import os
import random
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fastsync import fully_shard
from fastsync.fsdp.module_hooks import state_of
from tests.fuzz.random_cases.endings import LAYERS_CHANGE, layers_change, refused
from tests.fuzz.random_cases.tree import WIDTH, Fault
from tests.fuzz.random_units.tree import Leaf, Uses, build, modules_of
from tests.fuzz.random_units.whole_tensors import AS_WHOLE
from tests.fuzz.random_units.wires import draw_wires

__all__ = ["UnitCase"]

LOW = torch.bfloat16
ADDED = "parameter '.*' was added to the model, or took the place of another.*change layers before"
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 2**-5, momentum=0.5, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 2**-8),
    "one by one": lambda p: torch.optim.AdamW(p, 2**-8, foreach=False),
}


def members_of(module):
    unit = state_of(module).unit
    return () if unit is None else unit.params


def half(grad):
    """Halve a gradient, in a hook of the script."""
    return grad * 0.5


def whole(tensor):
    """Return all of a DTensor. Collective where ranks share it."""
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


class UnitCase:
    """The same on every rank, but for what each rank draws for itself.

    Args:
        note: called with the name of each kind that is drawn.

    Attributes:
        before: by name, the gradients that ranks have together: fp64, None where there is none.
        sums: by name, the magnitudes of all that this rank has computed since.
    """

    def __init__(self, seed, seat, note):
        self.seat, self.note, self.layers_change = seat, note, layers_change(seed)
        self.rng, self.mine = random.Random(seed), random.Random(1000 * seed + seat.rank + 1)
        torch.default_generator.manual_seed(seed)
        self.apart = random.Random(f"whole tensors {seed}")  # leaves what else is drawn as it is
        self.inputs = torch.Generator().manual_seed(self.mine.randrange(1 << 40))
        self.low = self.rng.random() < 0.25
        # Units of a weighted model have no divisor of their own, and send to all replicas at once.
        weighs = random.Random(f"weights {seed}").random() < 0.4
        self.steps = {**STEPS, **(WEIGHTED if weighs else DIVIDED_STEPS)}
        self.between = BETWEEN if weighs else {**BETWEEN, **DIVIDED}
        self.wires = draw_wires(seed, LOW if self.low else None, note)
        dtypes = (torch.float32, torch.float32, LOW)  # nothing turns fp64 into 16 bits
        self.model = build(self.rng, note, dtypes if self.low else (torch.float64, *dtypes))
        self.twin = copy.deepcopy(self.model)
        self.checkpoints = any(self.model.all_ways())
        self.sums, self.divisor = {}, seat.world
        self.cut()
        self.params = dict(self.model.named_parameters())
        self.copies = dict(self.twin.named_parameters())
        assert self.params.keys() == self.copies.keys()
        for name, param in self.copies.items():
            self._watch(name, param)
        self.before, self.hooked = dict.fromkeys(self.params), {}
        self.set_low()
        make = self.rng.choice(tuple(OPTIMIZERS))
        self.optimizer = OPTIMIZERS[make](self.model.parameters())
        self.other = OPTIMIZERS[make](self.twin.parameters())
        self.note(f"optimizer: {make}")

    def _watch(self, name, param):
        if param.requires_grad:
            param.register_hook(lambda grad: self._add(name, grad))

    def _add(self, name, grad):
        size = grad.detach().double().abs()
        self.sums[name] = self.sums[name] + size if name in self.sums else size

    # --- units

    def cut(self):
        """Some modules become units, alone or with their neighbours, the lowest first."""
        world, rows = self.seat.world, self.seat.world == 4 and self.rng.random() < 0.5
        self.mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            if rows
            else init_device_mesh("cpu", (world,))
        )
        self.note("mesh: replicas" if rows else "mesh: plain")
        mixed = MixedPrecisionPolicy()
        if self.low:
            mixed = MixedPrecisionPolicy(LOW, torch.float32)
            self.note("mixed")
        self.options = {"mesh": self.mesh, "mp_policy": mixed, **self.wires.options}
        through = self.rng.choice(("memory", "group"))
        os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[through]
        self.note(f"through: {through}")
        for module in reversed(modules_of(self.model)[1:]):
            if not isinstance(module, Leaf):
                self._cut_neighbours(module)
            if self.rng.random() < 0.5:
                self._shard(module)
        self._shard(self.model)

    def _cut_neighbours(self, node):
        # One forward of all: a checkpoint around one of them would compute that one again alone.
        ways = zip(node.parts, node.ways, strict=True)
        free = [part for part, way in ways if way is None and not hasattr(part, "unshard")]
        if len(free) > 1 and self.rng.random() < 0.2:
            self.note("neighbours")
            begin = self.rng.randrange(len(free) - 1)
            self._shard(free[begin : begin + 2])

    def _shard(self, module):
        if hasattr(module, "unshard"):
            return
        sharers = self.mesh.size(self.mesh.ndim - 1)

        def place(param):
            fits = [d for d in range(param.ndim) if d == 0 or param.shape[d] % sharers == 0]
            return Shard(self.rng.choice(fits))

        chosen = place if self.rng.random() < 0.3 else None
        reshard = self.rng.choice((None, None, True, False, *[2] * (sharers == 4)))
        self.note(f"reshard: {reshard}")
        fully_shard(
            module, shard_placement_fn=chosen, reshard_after_forward=reshard, **self.options
        )

    def set_low(self):
        """The copy computes in the dtypes of our units."""
        if not self.low:
            return
        for ours, theirs in zip(modules_of(self.model), modules_of(self.twin), strict=True):
            theirs.low = LOW if hasattr(ours, "unshard") else None
            if isinstance(theirs, Leaf):
                theirs.weights_low = LOW

    @property
    def units(self):
        return [part for part in modules_of(self.model) if hasattr(part, "unshard")]

    # --- the training

    def run(self):
        for _ in range(self.rng.randint(2, 6)):
            for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
                name = self.rng.choice(tuple(self.between))
                self.note(name)
                self.between[name](self)
            if self.apart.random() < 0.3:
                self.apart.choice(AS_WHOLE)(self)
            self.step()
        self.compare_weights()
        if self.layers_change:
            self.note(LAYERS_CHANGE)
            self.change_layers()

    def change_layers(self):
        """Add a weight to a module, or a module in the place of another, after they were cut."""
        part = self.rng.choice(modules_of(self.model))
        if isinstance(part, Leaf) or self.rng.random() < 0.5:
            part.register_parameter("extra", nn.Parameter(torch.ones(3)))
        else:
            leaf = Leaf([nn.Parameter(torch.ones(3))])
            leaf.number = part.parts[0].number
            part.parts[0] = leaf
        uses = Uses(self.rng, self.rng, [part.number for part in modules_of(self.model)])
        x = torch.ones(WIDTH, dtype=torch.float64)
        refused(lambda: self.loss(self.model, x, uses), ADDED, self.shares())

    def shares(self):
        return [param.to_local() for param in self.params.values()]

    def step(self):
        name = self.rng.choice(tuple(self.steps))
        self.note(name)
        with self.computing():
            self.steps[name](self)
        self.check()
        for _ in range(self.rng.choice((0, 1, 1))):
            self.rng.choice((UnitCase.clip, UnitCase.scale))(self)
        if self.rng.random() < 0.8:
            self.optimizer.step()
            self.other.step()
            self.compare_weights()
        if name in WEIGHTED:  # what comes next may have no weights
            self.divisor = self.seat.world
            self.zero(True)
        elif self.rng.random() < 0.8:
            self.zero(self.rng.random() < 0.7)

    @contextmanager
    def computing(self):
        """The copy has the weights that modules see here; in between it has the exact ones."""
        world = self.mesh.size(self.mesh.ndim - 1)
        exact = {name: param.data for name, param in self.copies.items()}
        for name, param in self.copies.items():
            dim = self.params[name].placements[-1].dim
            seen = self.wires.seen(exact[name], world, dim)
            if seen is not None:
                param.data = seen
        try:
            yield
        finally:
            for name, param in self.copies.items():
                param.data = exact[name]

    def zero(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)
        self.other.zero_grad(set_to_none=to_none)
        for name, grad in self.before.items():
            self.before[name] = None if grad is None or to_none else torch.zeros_like(grad)

    def losses(self, fault=None):
        """Return the losses of the model and of its copy, which sits a fault out."""
        numbers = [part.number for part in modules_of(self.model)]
        # What is computed again gathers when the first of its weights is needed, in an order that
        # ranks have in common if they need the same ones.
        own = self.rng if self.checkpoints else self.mine
        uses = Uses(self.rng, own, numbers, fault)
        x = torch.randn(WIDTH, dtype=torch.float64, generator=self.inputs)
        if any(uses.views.values()):
            self.note("in place")
        ours = self.loss(self.model, x, uses)
        theirs = self.loss(self.twin, x, uses) if not fault else None
        if theirs is not None:
            assert torch.allclose(ours, theirs, rtol=1e-12 if not self.low else 1e-2), "outputs"
        return ours, theirs

    @staticmethod
    def loss(model, x, uses):
        output = model(x.clone().requires_grad_(), uses)
        if uses.views[model.number]:
            output.add_(0.25).mul_(2.0)
        return output.double().sum()

    def reset_between(self):
        """A script resets gradients, at an optimizer's parameters, the model's, or a module's."""
        losses = self.losses()
        if self.rng.random() < 0.3:
            self.reset_module()
            for loss in losses:
                loss.backward()
            return
        shown = dict(self.model.named_parameters()) if self.rng.random() < 0.5 else self.params
        for name, param in shown.items():
            if self.rng.random() < 0.7:
                param.grad = self.copies[name].grad = self.before[name] = None
        for loss in losses:
            loss.backward()

    def reset_module(self):
        part, to_none = self.rng.choice(modules_of(self.model)), self.rng.random() < 0.5
        twin = next(t for t in modules_of(self.twin) if t.number == part.number)
        part.zero_grad(set_to_none=to_none)
        inside = set(map(id, twin.parameters()))
        for name, theirs in self.copies.items():
            if id(theirs) in inside and self.before[name] is not None:
                self.before[name] = None if to_none else torch.zeros_like(self.before[name])
        twin.zero_grad(set_to_none=to_none)

    def backward(self):
        for loss in self.losses():
            loss.backward()

    def accumulate(self):
        """Backwards without communication, then one with it."""
        self.model.set_requires_gradient_sync(False)
        keep = self.rng.random() < 0.3
        self.model.set_reshard_after_backward(not keep)
        for _ in range(self.rng.randint(1, 2)):
            self.backward()
        self.model.set_requires_gradient_sync(True)
        self.model.set_reshard_after_backward(True)
        self.backward()

    def accumulate_sums(self):
        """Replicas add theirs up at the end alone."""
        self.model.set_requires_all_reduce(False)
        for _ in range(self.rng.randint(1, 2)):
            self.backward()
        self.model.set_requires_all_reduce(True)
        self.backward()

    def weigh(self):
        """Weights divide the sum of a few micro-batches of each rank, some of them zero."""
        self.zero(True)
        totals = [self.rng.choice((1, 2, 5, 8)) for _ in range(self.rng.randint(1, 3))]
        local, counted = self.rng.random() < 0.5, 0
        for left, total in zip(reversed(range(len(totals))), totals, strict=True):
            self.model.set_requires_gradient_sync(not local or left == 0)
            owners = [self.rng.randrange(self.seat.world) for _ in range(total)]
            mine = owners.count(self.seat.rank)
            self.model.add_weight(torch.tensor(mine) if self.mine.random() < 0.5 else mine)
            self.backward()
            unused = not local and all(param.grad is None for param in self.params.values())
            counted = 0 if unused else counted + total  # no gradient holds a mean: begins anew
        self.divisor = float(max(1, counted))

    def two_forwards(self):
        pairs = [self.losses() for _ in range(2)]
        if self.rng.random() < 0.5:
            for loss in map(sum, zip(*pairs, strict=True)):
                loss.backward()
        else:
            for pair in pairs if self.rng.random() < 0.5 else reversed(pairs):
                for loss in pair:
                    loss.backward()

    def abandoned_forward(self):
        self.losses()
        self.backward()

    def check(self):
        """All gradients, on all ranks; the copy goes on from them."""
        for name, param in self.params.items():
            theirs = self.copies[name]
            fresh = None if theirs.grad is None else theirs.grad.double()
            if fresh is not None and self.before[name] is not None:
                fresh = fresh - self.before[name].to(theirs.dtype).double()
            self._check_one(name, param, fresh)
        self.sums.clear()

    def _check_one(self, name, param, fresh):
        size = self.sums.get(name)
        mine = torch.zeros(param.shape, dtype=torch.float64)
        parts = [mine if fresh is None else fresh, mine if size is None else size]
        facts = torch.tensor([float(size is not None), float(param.grad is not None)])
        rows = self.gathered(torch.cat([facts.double(), *(part.flatten() for part in parts)]))
        used, there = rows[:, 0].bool(), rows[:, 1].bool()
        assert bool((there == there[0]).all()), f"{name}: some ranks alone have a gradient"
        before = self.before[name]
        if not bool(used.any()):
            assert bool(there[0]) == (before is not None), f"{name}: used by nobody, yet changed"
        elif param.requires_grad:
            assert bool(there[0]), f"{name} has no gradient"
        if not bool(there[0]):
            return
        found = whole(param.grad)
        assert found.dtype == param.dtype, f"{name}: a gradient of {found.dtype}"
        self.compare(name, found.double(), rows[:, 2:], before)
        self._adopt(name, found)

    def compare(self, name, found, rows, before):
        sums, sizes = rows[:, : found.numel()], rows[:, found.numel() :]
        wanted, size = (part.sum(0).view(found.shape) / self.divisor for part in (sums, sizes))
        lost = self.wires.loss(self.params[name].dtype, sizes).view(found.shape) / self.divisor
        if before is not None:
            wanted, size = wanted + before, size + before.abs()
        dtypes = [self.params[name].dtype, *([LOW] if self.low else [])]
        bound = 16 * max(torch.finfo(dtype).eps for dtype in dtypes) * (size + wanted.abs())
        # Memory lies elsewhere in the copy, and with it the order of sums inside a product.
        bound = lost + bound + (2**-6 if self.low else 2**-44) * (1 + size.sum())
        off = (found - wanted).abs()
        assert bool((off <= bound).all()), (
            f"{name} {tuple(found.shape)} is off by {float((off - bound).max()):.3g} more than "
            f"{float(bound.max()):.3g}"
        )

    def gathered(self, mine):
        everyones = [torch.empty_like(mine) for _ in range(self.seat.world)]
        dist.all_gather(everyones, mine, group=self.seat.judges)
        return torch.stack(everyones)

    def compare_weights(self):
        for name, param in self.params.items():
            found, wanted = whole(param).double(), self.copies[name].detach().double()
            bound = 8 * torch.finfo(param.dtype).eps * (1 + wanted.abs())
            assert bool(((found - wanted).abs() <= bound).all()), f"weight {name} is another one"
            with torch.no_grad():
                self.copies[name].copy_(found.to(param.dtype))

    # --- what else scripts do

    def clip(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        norm = whole(norm)
        wanted = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5)
        narrow = any(param.dtype is LOW for param in self.params.values())
        off = 0.1 if self.low else 2e-2 if narrow else 1e-5
        assert torch.allclose(norm.double(), wanted.double(), rtol=off), (norm, wanted)
        self._adopt_all()

    def scale(self):
        for name, param in self.params.items():
            if param.grad is not None:
                param.grad.mul_(0.5)
                self.copies[name].grad.mul_(0.5)
        self._adopt_all()

    def _adopt_all(self):
        for name, param in self.params.items():
            if param.grad is not None:
                self._adopt(name, whole(param.grad))

    def _adopt(self, name, found):
        """The copy goes on with a gradient that ranks have together."""
        self.before[name] = found.double().clone()
        self.copies[name].grad = found

    def evaluate(self):
        with torch.no_grad(), self.computing():
            self.losses()

    def raise_in_forward(self):
        try:
            self.losses("forward")
        except Fault:
            return
        raise AssertionError("an exception in forward was lost")

    def raise_in_backward(self):
        self._fail_in_backward()
        self.model.reset_iter_state()

    def _fail_in_backward(self):
        try:
            self.losses("backward")[0].backward()
        except Fault:
            self.zero(True)  # some units have their gradients by then
            return
        raise AssertionError("an exception in backward was lost")

    def after_a_failure(self):
        """No forward parts the backward from one that has failed."""
        pair = self.losses()
        self._fail_in_backward()
        for loss in pair:
            loss.backward()

    def switch(self):
        for unit in self.units:
            if self.rng.random() < 0.5:
                unit.set_reshard_after_forward(self.rng.random() < 0.5, recurse=False)

    def prefetch(self):
        for unit in self.units:
            others = [other for other in self.units if other is not unit]
            chosen = self.rng.sample(others, min(len(others), self.rng.randint(0, 2)))
            self.rng.choice(
                (unit.set_modules_to_forward_prefetch, unit.set_modules_to_backward_prefetch)
            )(chosen)

    def freeze(self):
        for name, param in self.params.items():
            if self.rng.random() < 0.3:
                param.requires_grad_(not param.requires_grad)
                theirs = self.copies[name].requires_grad_(param.requires_grad)
                if theirs.requires_grad:
                    theirs._backward_hooks = None
                    self._watch(name, theirs)
                    if name in self.hooked:
                        theirs.register_hook(half)

    def hook(self):
        """Gradients are halved on each rank from now on, or no more."""
        for name, param in self.params.items():
            if name in self.hooked and self.rng.random() < 0.5:
                self.hooked.pop(name).remove()
                theirs = self.copies[name]
                theirs._backward_hooks = None
                if theirs.requires_grad:
                    self._watch(name, theirs)
            elif param.requires_grad and name not in self.hooked and self.rng.random() < 0.3:
                self.hooked[name] = param.register_hook(half)
                self.copies[name].register_hook(half)

    def write(self):
        """To the weights, past the optimizer."""
        kept = any(member.is_gathered() for unit in self.units for member in members_of(unit))
        way = "no_grad" if kept else self.rng.choice(("no_grad", "data"))
        self.note(f"write: {way}")
        with torch.no_grad():
            for name, param in self.params.items():
                if self.rng.random() < 0.5:
                    (param if way == "no_grad" else param.data).mul_(0.75)
                    self.copies[name].mul_(0.75)

    def unshard(self):
        unit = self.rng.choice(self.units)
        handle = unit.unshard(async_op=self.rng.random() < 0.5)
        if handle is not None and self.rng.random() < 0.5:
            handle.wait()
        if self.rng.random() < 0.5:
            unit.reshard()

    def divide(self):
        """Sum, or average over as many as there are."""
        self.divisor = self.rng.choice((1.0, float(self.seat.world)))
        for unit in self.units:
            unit.set_gradient_divide_factor(self.divisor)

    def reload(self):
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        assert {name.partition(".")[0] for name in state} <= {"parts", "w0", "w1", "w2", "w3"}
        with torch.no_grad():
            for param in self.params.values():
                param.mul_(3)
        self.model.load_state_dict(state)
        self.compare_weights()


BETWEEN = {
    "evaluate": UnitCase.evaluate,
    "raise in forward": UnitCase.raise_in_forward,
    "raise in backward": UnitCase.raise_in_backward,
    "switch resharding": UnitCase.switch,
    "prefetch": UnitCase.prefetch,
    "freeze": UnitCase.freeze,
    "hook": UnitCase.hook,
    "write": UnitCase.write,
    "unshard": UnitCase.unshard,
    "reload": UnitCase.reload,
}
DIVIDED = {"divide": UnitCase.divide}
STEPS = {
    "backward": UnitCase.backward,
    "accumulate": UnitCase.accumulate,
    "after a failure": UnitCase.after_a_failure,
    "two forwards": UnitCase.two_forwards,
    "abandoned forward": UnitCase.abandoned_forward,
    "reset between": UnitCase.reset_between,
}
WEIGHTED = {"weights": UnitCase.weigh}
DIVIDED_STEPS = {"accumulate sums": UnitCase.accumulate_sums}
