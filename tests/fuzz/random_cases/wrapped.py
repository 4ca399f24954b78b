"""A model and its unwrapped copy, trained side by side on one rank."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from fastsync import FastDDP, Group
from fastsync._torch import local_part, make_dtensor, spec_of
from fastsync.config.arguments import grouped
from fastsync.zero.gradient_proxies import ShardedGradient
from tests.fuzz.random_cases import drawing
from tests.fuzz.random_cases.tree import WIDTH, Fault, local, loss_of

__all__ = ["Forward", "Seat", "Twins", "Wrapped", "same", "seen"]


@dataclass(frozen=True)
class Seat:
    """This rank among those that average.

    Attributes:
        judges: the process group over which results are compared, which no model uses.
        second: one more group of all ranks, for a second model.
        apart: ways to divide the ranks, each with the group of this rank's part.
        first: the group that models have; None: that of all ranks of the team.
        mesh: the ranks that have other parts of the same DTensors, and do all that this one does.
        folded: seats among fewer ranks, where the others are in a mesh.
        device: the kind of device that everything is on.
    """

    rank: int
    world: int
    judges: object
    second: object
    apart: tuple = ()
    first: object = None
    mesh: object = None
    folded: tuple = ()
    device: str = "cpu"


def same(one, other):
    """Bit for bit equal; any NaN equals any NaN."""
    if one is None or other is None:
        return one is other
    one, other = (t.to_dense() if t.is_sparse else local(t) for t in (one, other))
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def seen(grad):
    """The elements of a gradient that may be spread over the ranks, and stays so. Collective."""
    if not is_shared(grad):
        return grad
    if isinstance(grad, DTensor):
        return make_dtensor(local_part(grad).share.collected(), spec_of(grad))
    return grad.share.collected()


def is_shared(grad):
    """Return whether ranks keep their own elements of a gradient, or of its local tensor."""
    return grad is not None and isinstance(local_part(grad), ShardedGradient)


def place(param):
    """Place the gradient of a DTensor as the DTensor is: where it is a sum to be, add it up."""
    if isinstance(param, DTensor) and param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)


def magnitudes(grad):
    grad = local(grad)
    grad = (grad.to_dense() if grad.is_sparse else grad).detach().resolve_conj()
    return (torch.view_as_real(grad) if grad.is_complex() else grad).abs()


def same_elements(one, other):
    return (one == other) | (one.isnan() & other.isnan())


def make_optimizer(params):
    """Return an optimizer whose steps round alike however parameters are cut."""
    return torch.optim.SGD(params, lr=2**-4, momentum=0.5)


class Exact:
    """Tensor that the copy's optimizer steps on: its parameter, or fp32 where
    that is rounded then.
    """

    def __init__(self, param):
        self.master = self.delivered = local(param.detach()).clone()
        self.moved = torch.zeros_like(self.master, dtype=torch.bool)  # elements, by the last step
        self.state = {}  # what the optimizer keeps of it

    def accepts(self, grad):
        """Return whether SGD can step: it adds no dense gradient to a sparse momentum."""
        momentum = self.state.get("momentum_buffer")
        return grad is None or grad.is_sparse or momentum is None or not momentum.is_sparse

    def step(self, param, rounding):
        """Follow what has been written since the last step, step, and round."""
        grad = None if param.grad is None else local(param.grad)
        param = local(param.detach())
        wide = param.dtype if rounding is None else torch.float32
        written = ~same_elements(param, self.delivered)
        before = self.master.to(wide).where(~written, param.to(wide))
        self.master = before.clone()
        stepped = torch.nn.Parameter(self.master)
        stepped.grad = None if grad is None else grad.to(wide)
        optimizer = make_optimizer([stepped])
        optimizer.state[stepped] = self.state
        optimizer.step()
        self.moved = ~same_elements(before, self.master)
        # Where a script has written to part of what a step had rounded, that is rounded again.
        again = rounding is not None and bool(written.any())
        if grad is not None or again:
            param.copy_(stepped.data if rounding is None else rounding(stepped))


def _reset(way, param):
    """Change a gradient; what is set is dense, for an embedding with sparse gradients too."""
    if way == "none":
        param.grad = None
    elif way == "set":
        param.grad = torch.ones_like(param)
    elif param.grad is not None and way == "zero":
        param.grad.detach_().zero_()
    elif param.grad is not None and way == "scale":
        param.grad = param.grad * 0.5


class Twins:
    """A tree, its copy, and the gradients that a user saved of it."""

    def __init__(self, tree, rng, mine):
        self.tree, self.twin = tree, copy.deepcopy(tree)
        self.params = list(zip(tree.parameters(), self.twin.parameters(), strict=True))
        ways = ("none", "none", "zero", "nothing", "some")
        # What is spread over the ranks is zeroed on all of them.
        self.zeroing = rng.choice(ways[:-1] if tree.zero else ways)
        self.mine = mine
        self.saved = []
        self.fired = set()
        self.sums = {}  # by position, magnitudes of what the copy's gradient was added up from
        self.parts = {}  # by position, of a mean: what the copy has a part of before it adds to it
        for index, (_, theirs) in enumerate(self.params):
            theirs.register_hook(lambda _, i=index: self.take_part(i))
            theirs.register_post_accumulate_grad_hook(lambda _, i=index: self.fired.add(i))
            theirs.register_post_accumulate_grad_hook(place)
            if not isinstance(theirs, DTensor):  # whose sums are not rounded on the way
                theirs.register_hook(lambda grad, i=index: self.add_to_sum(i, grad))

    def take_part(self, index):
        """Take this rank's part of the mean that the copy may hold."""
        part, (_, theirs) = self.parts.pop(index, None), self.params[index]
        if part is not None and theirs.grad is not None:
            theirs.grad.mul_(part)
            self.sums[index] = magnitudes(theirs.grad)

    def add_to_sum(self, index, grad):
        self.sums[index] = self.sums.get(index, 0) + magnitudes(grad)

    def begin_sums(self):
        self.sums = {
            index: magnitudes(theirs.grad)
            for index, (_, theirs) in enumerate(self.params)
            if theirs.grad is not None
        }

    def replace_tree(self):
        """Replace the tree as a restart does: other parameters of the same values, and no
        gradients.
        """
        self.tree = copy.deepcopy(self.tree)
        theirs = [theirs for _, theirs in self.params]
        self.params = list(zip(self.tree.parameters(), theirs, strict=True))
        self.zero("none")
        self.saved = []

    def take_fired(self):
        """Positions of the parameters whose copies got gradients since the last call."""
        fired, self.fired = self.fired, set()
        return fired

    def freeze(self, flips):
        """Turn the parameters at the positions `flips` from trained to frozen, or back."""
        for index in flips:
            ours, theirs = self.params[index]
            ours.requires_grad_(not ours.requires_grad)
            theirs.requires_grad_(ours.requires_grad)

    def zero(self, way=None):
        """In the way of this case; what the user saved must not notice."""
        for ours, theirs in self.params:
            how = way or self.zeroing
            if how == "some":
                how = self.mine.choice(("none", "zero", "nothing"))
            if how == "none":
                ours.grad = theirs.grad = None
            elif how == "zero" and ours.grad is not None:
                ours.grad.detach_().zero_()
                theirs.grad.zero_()
            if how != "none":  # autograd itself writes into the same memory
                self.forget(ours)

    def reset(self, rng):
        """Change the gradients of some parameters by hand, in one of the ways of scripts."""
        way = rng.choice(("none", "zero", "set", "scale", "module", "zeros of a module"))
        part = rng.choice(["", *(f"branches.{i}" for i in range(len(self.tree.branches)))])
        parts = [tree.get_submodule(part) for tree in (self.tree, self.twin)]
        if way in ("module", "zeros of a module"):
            inside = set(map(id, parts[0].parameters()))
            for module in parts:
                module.zero_grad(set_to_none=way == "module")
        else:
            inside = {id(ours) for ours, _ in self.params if rng.random() < 0.5}
        for index, (ours, theirs) in enumerate(self.params):
            if id(ours) not in inside:
                continue
            for param in (ours, theirs):
                _reset(way, param)
            self.forget(ours)
            if theirs.grad is None:
                self.sums.pop(index, None)
            else:
                self.sums[index] = magnitudes(theirs.grad)
        return way

    def forget(self, param):
        self.saved = [entry for entry in self.saved if entry[0] is not param]

    def keep(self):
        """Save gradients as users do, each with a copy of its values."""
        for ours, _ in self.params:
            if ours.grad is None or ours.grad.is_sparse or self.mine.random() < 0.7:
                continue
            if is_shared(ours.grad):  # which all ranks would have to look at
                continue
            way = self.mine.choice(("itself", "slice", "detached", "storage", "shared"))
            grad = local(ours.grad)
            held = {"slice": grad[:1] if grad.dim() else grad, "detached": grad.detach()}.get(way)
            if way == "storage":
                held = torch.empty(0, dtype=grad.dtype).set_(
                    grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()
                )
            if way == "shared":
                grad.share_memory_()
            held = grad if held is None else held
            self.saved.append((ours, held, held.detach().clone(), way))

    def check_saved(self):
        for _, held, values, way in self.saved:
            assert same(held, values), f"a saved gradient ({way}) was overwritten"


@dataclass
class Forward:
    """Inputs and outputs of the model and of its copy."""

    inputs: tuple
    output: object
    twin: object

    def losses(self):
        return loss_of(self.output), loss_of(self.twin)


@dataclass
class Wrapped:
    """One wrapper over `twins`.

    Attributes:
        rng: the same on every rank; mine: this rank's own.
        note: called with the name of each kind that is drawn.
        used: positions of parameters that got gradients through the wrapper since the last step.
        touched: positions of those that got some without it, or after the end of a step.
        cleared: positions of those whose gradients the script has set to None since then.
        pending: a forward's backward never came.
        siblings: other wrappers over the same parameters.
        joined: there has been a join(), after which each forward tells the other ranks.
        frozen_alone: one rank may have frozen parameters that others train.
        regrouped: parameters were frozen or unfrozen since the last step.
        owed: by position, what each rank's error feedback keeps back: fp64 [world, numel].
        apart: by position, ranks that average a parameter apart, and their divisor.
        parts: by position, all ranks in those that do so together.
    """

    seat: Seat
    drawn: drawing.Drawn
    twins: Twins
    rng: random.Random
    mine: random.Random
    note: Callable
    group: object = None
    used: set = field(default_factory=set)
    touched: set = field(default_factory=set)
    cleared: set = field(default_factory=set)
    pending: bool = False
    siblings: list = field(default_factory=list)
    joined: bool = False
    frozen_alone: bool = False
    regrouped: bool = False
    owed: dict = field(default_factory=dict)
    apart: dict = field(default_factory=dict)
    parts: dict = field(default_factory=dict)

    def __post_init__(self):
        self.inputs = torch.Generator().manual_seed(self.mine.randrange(1 << 40))
        self.order = list(range(len(self.twins.tree.kinds)))
        self.wire = self.drawn.wire
        self.fixed_use = [i for i in self.order if self.rng.random() < 0.7]
        self.wrap()

    def wrap(self):
        options = {**self.drawn.options, "process_group": self.group or self.seat.first}
        if "wire" in options:
            options["wire"] = self.wire
        trained = [p.dtype for p in self.tree.parameters() if p.requires_grad]
        if not any(map(self.drawn.rounding, trained)):
            options.pop("parameter_wire", None)  # which would be refused
        self.twins.parts = {}
        if self.drawn.grouped:
            options["groups"] = self.groups()
        self.model = FastDDP(self.twins.tree, **grouped(options))
        drawing.register(self.model, self.drawn)
        if self.drawn.zero:
            self.spread()
        self.note_plan()

    def groups(self):
        """Return groups for some parameters, and note who is in this rank's, and their divisors."""
        params = list(self.tree.parameters())
        by_place = {int(each.place * len(params)): each for each in self.drawn.grouped}
        found = {}
        for index, each in sorted(by_place.items()):
            parts, group = self.seat.apart[int(each.way * len(self.seat.apart))]
            part = next(part for part in parts if self.seat.rank in part)
            self.apart[index] = part, each.divisor or len(part)
            self.parts[index] = parts
            found[params[index]] = Group(group, each.divisor) if each.divisor else group
            self.note(f"group of {len(part)} of {self.seat.world}")
        return found

    def spread(self):
        """The first step of an optimizer, which changes nothing: gradients are shared after it."""
        self.zero("none")
        self.optimizer = make_optimizer(self.tree.parameters())
        self.optimizer.step()
        self.exact = [Exact(theirs) for _, theirs in self.twins.params]

    def may_step(self):
        """Return whether the optimizer of the copy takes its gradients."""
        pairs = zip(self.exact, self.twins.params, strict=True)
        return all(exact.accepts(theirs.grad) for exact, (_, theirs) in pairs)

    def step(self, before=lambda params: None, after=lambda params: None):
        """Make a step of the optimizer; the copy's is an ordinary one, on exact weights.

        Args:
            before: what a hook does with parameters, and their gradients, before the step.
            after: what one does after it.
        """
        params = [ours for ours, _ in self.twins.params]
        seen = []  # by a hook after the step

        def look(*_):
            seen.extend(local(p.detach()).clone() for p in params)
            with torch.no_grad():
                after(params)

        handles = [
            self.optimizer.register_step_pre_hook(lambda *_: before(params)),
            self.optimizer.register_step_post_hook(look),
        ]
        with torch.no_grad():
            before([theirs for _, theirs in self.twins.params])
        self.optimizer.step()
        for handle in handles:
            handle.remove()
        for index, (ours, theirs) in enumerate(self.twins.params):
            exact, found = self.exact[index], seen[index]
            exact.step(theirs, self.drawn.rounding(theirs.dtype))
            # A piece that no step has changed stays exact.
            still = same_elements(found, exact.master.to(found.dtype)) & ~exact.moved
            right = same_elements(found, local(theirs.detach())) | still
            assert bool(right.all()), f"parameter {index} is another one after a step"
            exact.delivered = found
            theirs.data.copy_(ours.data)
            theirs.grad = None if ours.grad is None else theirs.grad

    @property
    def tree(self):
        return self.twins.tree

    @property
    def own(self):
        """Return the random numbers for this rank's actions: its own, where ranks may differ."""
        return self.rng if self.drawn.alike else self.mine

    def choose(self):
        """Choose weights for a forward, in the order of their use."""
        if self.drawn.complete:
            return list(self.order)
        if self.drawn.fixed:
            used = [i for i in self.order if i in self.fixed_use]
        else:
            used = [i for i in self.order if self.own.random() < 0.6]
        # A backward that bypasses the outputs and the parameters cannot be seen.
        weights = self.tree.weights
        if self.tree.shape == "opaque" and not any(weights[i].requires_grad for i in used):
            used = [i for i in self.order if weights[i].requires_grad]
        return used

    def input(self):
        return torch.randn(WIDTH, dtype=torch.float64, generator=self.inputs)

    def zero(self, way=None):
        """Gradients: in the given way, or in that of the case."""
        self.twins.zero(way)

    def forward(self, bare=False, used=None):
        used = self.choose() if used is None else used
        x = self.input().requires_grad_()
        inputs = (x, x.detach().clone().requires_grad_())
        view = self.mine.random() < 0.2
        ours = (self.tree if bare else self.model)(inputs[0], used, view=view)
        mixed = self.drawn.mixed
        self.twins.twin.low = None if bare or mixed is None else mixed.param_dtype
        made = Forward(inputs, ours, self.twins.twin(inputs[1], used, view=view))
        if self.mine.random() < 0.2:
            self.note("in place on a view" if view else "in place")
            for loss in made.losses():
                loss.div_(torch.full((), 2.0)).add_(1.0)
        return made

    def begin_means(self):
        """Gradients have become means, of which the next backward leaves each rank a part."""
        for index, (ranks, divisor) in self.apart.items():
            _, theirs = self.twins.params[index]
            if index in self.plan.params and theirs.grad is not None and divisor != len(ranks):
                self.twins.parts[index] = divisor / len(ranks)

    def take_parts(self):
        """Take this rank's part of each mean that the running step averages, used or not."""
        if self.drawn.theme in ("strict", "skip"):  # then none is averaged without use
            return
        for index in self.twins.parts.keys() & self.plan.params:
            self.twins.take_part(index)
            if self.twins.params[index][1].grad is not None:
                self.used.add(index)

    def fail(self, where, used=None):
        """A forward or backward that raises; the copy sits it out."""
        try:
            x = self.input().requires_grad_()
            used = self.choose() if used is None else used
            loss = loss_of(self.model(x, used, fault=where))
            if self.tree.shape != "opaque":  # whose step begins with the first gradient
                self.note_plan()
                self.take_parts()
            loss.backward()
        except Fault:
            return
        raise AssertionError(f"an exception in the {where} part was lost")

    def backward(self, *losses, retain=False, bare=False):
        """One backward of the sum of `losses`, which are pairs: of the model and of the copy."""
        self.note_plan()
        for loss in map(sum, zip(*losses, strict=True)):
            loss.backward(retain_graph=retain)
        fired = self.twins.take_fired()
        if bare:
            self.touched |= fired
        else:
            self.used |= fired
        for other in self.siblings:
            other.touched |= fired

    @property
    def trainable(self):
        """Return whether a backward of this model can do anything at all."""
        return any(p.requires_grad for p in self.tree.parameters())

    def note_plan(self):
        """The end of a step may bring another one."""
        self.plan = self.model._engine.plan

    def plan_of(self, index):
        """The bucket that parameter `index` travelled in; None: it was in no bucket."""
        buckets = self.plan.buckets
        return next((bucket for bucket in buckets if index in bucket.params), None)
