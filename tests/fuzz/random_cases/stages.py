"""Stages of a training besides plain steps: each is a function of a wrapped model.

`BEFORE` may happen at rest, before a step; `STEPS` are ways to make one, and end compared.
"""

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fastsync._torch import make_dtensor, spec_of
from tests.fuzz.random_cases import rule
from tests.fuzz.random_cases.wires import draw_wire
from tests.fuzz.random_cases.wrapped import same

__all__ = ["BEFORE", "STEPS", "applicable"]


@dataclass(frozen=True)
class Stage:
    """One of them; `suits` tells which wrapped models it is for, by facts that all ranks share."""

    run: Callable
    suits: Callable = lambda wrapped: True
    weight: int = 1


def applicable(stages, wrapped):
    """Names, each as often as it weighs."""
    return [name for name, s in stages.items() if s.suits(wrapped) for _ in range(s.weight)]


def takes_part(wrapped):
    """Return whether this rank takes part: all ranks do, or each as it likes.

    But not once there has been a join(), as in DDP, nor where a forward meets the other ranks
    because parameters were unfrozen.
    """
    meets = wrapped.joined or wrapped.drawn.alike or wrapped.regrouped
    alone = wrapped.rng.random() < 0.6 and not meets
    return not alone or wrapped.mine.random() < 0.5


# Before a step.


def skip_forward(wrapped):
    """A loss that was not finite, say: no backward follows."""
    if takes_part(wrapped):
        wrapped.forward()
    wrapped.pending = True


def fail_in_forward(wrapped):
    if takes_part(wrapped):
        wrapped.fail("forward")


def fail_early(wrapped):
    """On all ranks, before any gradient."""
    wrapped.fail("early")
    wrapped.pending = True


def fail_late(wrapped):
    """On all ranks, when buckets have been sent, the same ones; the user begins anew."""
    used = list(wrapped.order)
    wrapped.rng.shuffle(used)
    wrapped.fail("late", used)
    wrapped.twins.zero("none")
    refused = False
    try:
        wrapped.model(wrapped.input(), used)
    except RuntimeError as error:
        refused = True
        assert "stopped half-way" in str(error), error
    refusals = rule.gathered(wrapped, torch.tensor([float(refused)]))
    assert len(refusals.unique()) == 1, f"ranks differ in what they say: {refusals}"
    wrapped.used, wrapped.touched, wrapped.pending = set(), set(), True
    rule.recall(wrapped)


def work_on_the_module(wrapped):
    """Backwards of the module itself, on some ranks: they only accumulate."""
    for _ in range(wrapped.mine.choice((0, 1, 1, 2))):
        wrapped.backward(wrapped.forward(bare=True).losses(), bare=True)
    if wrapped.mine.random() < 0.3:
        wrapped.backward(penalty(wrapped), bare=True)


def evaluate(wrapped):
    if takes_part(wrapped):
        wrapped.model.eval()
        with torch.no_grad():
            wrapped.model(wrapped.input(), wrapped.choose())
        wrapped.model.train()


def copied(state):
    """Return the state as a file would return it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(wrapped):
    wrapped.model.load_sync_state_dict(copied(wrapped.model.sync_state_dict()))
    kept_as_before(wrapped)


def restart(wrapped):
    """Another model, with the weights and the state of the one before."""
    thaw(wrapped)
    state = copied(wrapped.model.sync_state_dict())
    wrapped.twins.replace_tree()
    wrapped.used.clear()  # of a backward that failed
    wrapped.wrap()
    wrapped.model.load_sync_state_dict(state)
    kept_as_before(wrapped)


def rewrap(wrapped):
    """A second wrapper over the same parameters, which the first one leaves alone."""
    thaw(wrapped)
    state = copied(wrapped.model.sync_state_dict())
    if wrapped.drawn.divides:  # the new one does not know of means, and the old one does
        wrapped.zero("none")
        wrapped.used.clear()  # of a backward that failed
    else:
        wrapped.old = wrapped.model
    wrapped.wrap()
    wrapped.model.load_sync_state_dict(state)
    kept_as_before(wrapped)


def kept_as_before(wrapped):
    """Check that ranks keep back the same as before, where they still keep it."""
    before = wrapped.owed
    rule.recall(wrapped)
    for index in before.keys() & wrapped.owed.keys():
        same = torch.equal(before[index], wrapped.owed[index])
        assert same, f"what is kept back of parameter {index} changed"


def reset_by_hand(wrapped):
    """Change gradients by hand: on all ranks, where gradients are spread over them or ranks promise
    to leave out the same ones."""
    together = wrapped.drawn.zero or wrapped.drawn.theme == "skip"
    draws = wrapped.rng if together else wrapped.mine
    wrapped.note(f"reset: {wrapped.twins.reset(draws)}")
    gone = {i for i, (_, theirs) in enumerate(wrapped.twins.params) if theirs.grad is None}
    for each in (wrapped, *wrapped.siblings):
        again = each.cleared - gone  # the script has set another gradient, which counts
        each.cleared |= gone & (each.used | each.touched)
        each.used, each.touched = each.used - gone, (each.touched - gone) | again


def load_weights(wrapped):
    for module in (wrapped.tree, wrapped.twins.twin):
        state = {name: 0.75 * value for name, value in module.state_dict().items()}
        module.load_state_dict(state)


def change_wire(wrapped):
    wrapped.wire = draw_wire(wrapped.rng, wrapped.seat.world)
    while wrapped.drawn.grouped and wrapped.wire.form == "hierarchical":
        wrapped.wire = draw_wire(wrapped.rng, wrapped.seat.world)
    wrapped.model.set_wire(wrapped.wire)
    kept_as_before(wrapped)


def turn(wrapped):
    """Another order of use, on all ranks or on each its own."""
    alike = wrapped.drawn.alike or wrapped.rng.random() < 0.7
    draws = wrapped.rng if alike else wrapped.mine
    order = list(wrapped.order)
    draws.shuffle(order)
    wrapped.order = order


LONER = 1  # the rank that freezes parameters alone


def freeze(wrapped):
    """Freeze half of the parameters on all ranks before the same forward, the others on one rank.

    A parameter that one rank has frozen alone stays in the plan, so that this rank may unfreeze it
    alone. It is the same rank each time: a parameter that every rank has frozen leaves the plan.
    """
    flips = []
    for index in range(len(wrapped.twins.params)):
        if wrapped.rng.random() > 0.3:
            continue
        alone = index % 2 == 1 and not wrapped.drawn.alike
        if alone and (wrapped.tree.shape == "opaque" or wrapped.seat.rank != LONER):
            continue
        flips.append(index)
    for each in (wrapped, *wrapped.siblings):
        each.frozen_alone = each.regrouped = True
    wrapped.twins.freeze(flips)


def thaw(wrapped):
    frozen = [i for i, (ours, _) in enumerate(wrapped.twins.params) if not ours.requires_grad]
    wrapped.twins.freeze(frozen)
    for each in (wrapped, *wrapped.siblings):
        each.frozen_alone, each.regrouped = False, True


def outputs_are_seen(wrapped):
    """Return whether backwards can be told apart, where one of several is left out."""
    return wrapped.tree.shape != "opaque"


def free_use(wrapped):
    return not wrapped.drawn.fixed


def may_change_wire(wrapped):
    return wrapped.drawn.theme == "wire" and not wrapped.frozen_alone


def may_stop(wrapped):
    """Without a backward: the next one through another wrapper would then be taken for it."""
    return free_use(wrapped) and outputs_are_seen(wrapped) and not wrapped.siblings


def some(rng, params):
    """Positions that all ranks draw alike, which a hook may be asked for again."""
    return [i for i in range(len(params)) if rng.random() < 0.4]


def reset_state(wrapped):
    """Change what the optimizer keeps of some parameters, in one of the ways that scripts have."""
    state = wrapped.optimizer.state
    way = wrapped.rng.choice(("pop", "delete", "assign", "zero", "scale", "copy", "all"))
    for i in some(wrapped.rng, wrapped.twins.params) if way != "all" else ():
        param, exact = wrapped.twins.params[i][0], wrapped.exact[i]
        has = exact.state.get("momentum_buffer") is not None
        assert has == (param in state and state[param].get("momentum_buffer") is not None), i
        if way in ("pop", "delete", "assign"):
            exact.state = {}
            if way == "assign":
                state[param] = {}
            elif way == "pop":
                state.pop(param, None)
            elif param in state:
                del state[param]
        elif has:
            reset_values(way, state[param]["momentum_buffer"], exact.state["momentum_buffer"])
    if way == "all":
        state.clear()
        for exact in wrapped.exact:
            exact.state = {}


def reset_values(way, ours, theirs):
    if theirs.is_sparse:
        return
    if way == "zero":
        ours.zero_()
        theirs.zero_()
    elif way == "scale":
        ours.mul_(0.5)
        theirs.mul_(0.5)
    else:
        ones = torch.ones_like(theirs)
        ours.copy_(make_dtensor(ones, spec_of(ours)) if isinstance(ours, DTensor) else ones)
        theirs.fill_(1)


def assign(param, value):
    """Give a parameter other memory; a DTensor, which keeps its own, other values."""
    if isinstance(param, DTensor):
        param.data.copy_(value)
    else:
        param.data = value


def assign_data(wrapped):
    """Other memory, and other values, for some parameters, on all ranks."""
    for i in some(wrapped.rng, wrapped.twins.params):
        ours, theirs = wrapped.twins.params[i]
        assign(ours, ours.data * 0.5)
        theirs.data.mul_(0.5)


BEFORE = {
    "skipped forward": Stage(skip_forward, may_stop),
    "exception in forward": Stage(fail_in_forward),
    "exception early in backward": Stage(fail_early, may_stop),
    "exception late in backward": Stage(fail_late, lambda w: may_stop(w) and not w.frozen_alone),
    "work on the module": Stage(
        work_on_the_module,
        lambda w: not w.pending and w.drawn.theme != "skip",
        weight=3,
    ),
    "evaluation": Stage(evaluate),
    "resume": Stage(resume, weight=2),
    "restart": Stage(restart, lambda w: not w.siblings),
    "wrapped again": Stage(rewrap, lambda w: not (w.siblings or w.pending)),
    "load weights": Stage(load_weights),
    "reset by hand": Stage(reset_by_hand),
    "wire": Stage(change_wire, may_change_wire, weight=2),
    "thaw": Stage(thaw, free_use, weight=2),
    "order": Stage(turn, free_use, weight=2),
    "freeze": Stage(freeze, free_use, weight=4),
    "reset state": Stage(reset_state, lambda w: w.drawn.zero and free_use(w), weight=3),
    "data": Stage(assign_data, lambda w: w.drawn.zero and free_use(w)),
}


# Steps.


def step(wrapped):
    forward = wrapped.forward()
    look(wrapped, forward)
    wrapped.backward(forward.losses())
    rule.check(wrapped)


def step_after_a_failure(wrapped):
    """Gradients that micro-steps have left belong to the step, and perhaps no forward begins it."""
    forward = wrapped.forward() if wrapped.rng.random() < 0.5 else None
    wrapped.fail("early")
    wrapped.backward((forward or wrapped.forward()).losses())
    rule.check(wrapped)


def look(wrapped, forward):
    """Take gradients of the outputs by a script; they are accumulated nowhere."""
    if wrapped.mine.random() < 0.2:
        loss, _ = forward.losses()
        torch.autograd.grad(loss, forward.inputs[0], retain_graph=True)


def accumulate(wrapped):
    """Make micro-steps that do not synchronise, each rank as many as it likes."""
    if wrapped.drawn.zero == 2:  # there they do
        return
    draws = wrapped.rng if wrapped.joined else wrapped.own
    for _ in range(draws.choice((0, 0, 0, 1, 2))):
        with wrapped.model.no_sync():
            forward = wrapped.forward()
            if inside := wrapped.own.random() < 0.7:
                wrapped.backward(forward.losses())
        if not inside:
            wrapped.backward(forward.losses())


def all_may_step(wrapped):
    """Return whether the copies of all ranks take their gradients. Collective."""
    return rule.all_say(wrapped, wrapped.may_step())


def optimizer_step(wrapped):
    """Unless a rank has a gradient of its own, which would give it weights of its own, too."""
    step(wrapped)
    if rule.gradients_are_alike(wrapped) and all_may_step(wrapped):
        if wrapped.rng.random() < 0.5:
            clip(wrapped)
        wrapped.step(draw_before(wrapped.rng), draw_after(wrapped.rng))


def saved_on_some_ranks(wrapped):
    """Save on some ranks alone, mostly on rank 0, in the middle of accumulation, too.

    The others wait in a barrier, or in the backward, which needs the gradients of those that save.
    A rank that has nothing to train waits for nobody there.
    """
    forward = wrapped.forward()
    all_train = rule.all_say(wrapped, wrapped.trainable)
    savers = wrapped.rng.choice(([0], [0], [wrapped.seat.world - 1], range(wrapped.seat.world)))
    by_name, waits = wrapped.rng.random() < 0.4, wrapped.rng.random() < 0.3
    if wrapped.seat.rank in savers:
        check_saved_state(wrapped, by_name)
    if waits or not all_train:
        rule.gathered(wrapped, torch.zeros(1))
    wrapped.backward(forward.losses())
    rule.check(wrapped)
    if rule.gradients_are_alike(wrapped) and all_may_step(wrapped):
        wrapped.step()


def check_saved_state(wrapped, by_name):
    """Compare what this rank saves of the optimizer with the state of the copy's."""
    names = [name for name, _ in wrapped.tree.named_parameters()]
    # By name it is collective before there is a shared state, and beside another wrapper.
    shared = [exact for i, exact in enumerate(wrapped.exact) if i not in wrapped.apart]
    alone = any(exact.state for exact in shared) and not hasattr(wrapped, "old")
    if by_name and alone:
        saved = copied(wrapped.model.optimizer_state_dict(wrapped.optimizer))["state"]
    else:
        saved = copied(wrapped.optimizer.state_dict())["state"]
    for index, name in enumerate(names):
        state = saved.get(name, {}) or saved.get(index, {})
        found, right = (s.get("momentum_buffer") for s in (state, wrapped.exact[index].state))
        assert same(found, right), f"of parameter {index} is saved {found}, not {right}"


def draw_before(rng):
    """Draw what a hook does before a step: the same with the model and with its copy."""
    way, seed = rng.choice(("nothing", "scale", "replace", "drop", "write")), rng.random()

    def before(params):
        for i in some(random.Random(seed), params):
            param = params[i]
            if way == "write":
                param.data.mul_(0.5)
            elif way == "drop":
                param.grad = None
            elif param.grad is None or param.grad.is_sparse:
                continue
            elif way == "scale":
                param.grad.mul_(2.0)
            elif way == "replace":
                param.grad = param.grad * 0.5

    return before


def draw_after(rng):
    """Draw what a hook does with parameters after a step."""
    way, seed = rng.choice(("nothing", "nothing", "halve", "assign")), rng.random()

    def after(params):
        for i in some(random.Random(seed), params):
            if way == "halve":
                params[i].mul_(0.5)
            elif way == "assign":
                assign(params[i], params[i].data * 0.5)

    return after


def clip(wrapped):
    """To the norm that the copy's gradients have, or half of it; the copy takes what comes out."""
    before = rule.total_norm(wrapped)
    if not math.isfinite(before):
        return
    share = wrapped.rng.choice((0.5, 1.0, 2.0))
    norm = wrapped.model.clip_grad_norm_(share * before).item()
    rule.adopt(wrapped)
    wanted = min(share, 1.0) * before
    roundings = 2.0**-6  # of 16-bit gradients
    for found, right in ((norm, before), (rule.total_norm(wrapped), wanted)):
        assert abs(found - right) <= roundings * right, f"a norm of {found} should be {right}"


def clipped(wrapped):
    """Clip what a step leaves, unless ranks have gradients of their own."""
    step(wrapped)
    if rule.gradients_are_alike(wrapped):
        clip(wrapped)


def two_forwards(wrapped):
    forwards = [wrapped.forward() for _ in range(2)]
    for forward in forwards:
        wrapped.backward(forward.losses())
        rule.check(wrapped)


def sum_of_forwards(wrapped):
    first = wrapped.forward()
    wrapped.backward(first.losses(), wrapped.forward().losses())
    rule.check(wrapped)


def one_graph_twice(wrapped):
    """The second time only accumulates."""
    forward = wrapped.forward()
    wrapped.backward(forward.losses(), retain=True)
    rule.check(wrapped)
    wrapped.backward(forward.losses(), bare=True)


def accumulate_in_between(wrapped):
    """A forward that asks for a step, one that does not and its backward, then the step."""
    forward = wrapped.forward()
    with wrapped.model.no_sync():
        wrapped.backward(wrapped.forward().losses())
    wrapped.backward(forward.losses())
    rule.check(wrapped)


def weighted(wrapped):
    """Weights divide what one or two micro-batches of each rank have added up, after a step."""
    wrapped.backward(wrapped.forward().losses())
    rule.check(wrapped)
    total = wrapped.rng.choice((1, 2, 4, 8))
    owners = [wrapped.rng.randrange(wrapped.seat.world) for _ in range(total)]
    mine = owners.count(wrapped.seat.rank)
    wrapped.zero("none")
    if wrapped.drawn.zero != 2 and wrapped.rng.random() < 0.5:
        first = wrapped.mine.randint(0, mine)
        wrapped.model.add_weight(first)
        with wrapped.model.no_sync():
            wrapped.backward(wrapped.forward().losses())
        mine -= first
    wrapped.model.add_weight(torch.tensor(mine))
    wrapped.backward(wrapped.forward().losses())
    rule.check(wrapped, total)
    wrapped.zero("none")  # what comes next may have no weights


def may_weigh(wrapped):
    drawn = wrapped.drawn
    divided_alike = all(each.divisor == wrapped.seat.world for each in drawn.grouped)
    return outputs_are_seen(wrapped) and free_use(wrapped) and divided_alike


def reset_in_between(wrapped):
    """Between forward and backward gradients are changed by hand."""
    forward = wrapped.forward()
    reset_by_hand(wrapped)
    wrapped.backward(forward.losses())
    rule.check(wrapped)


def penalised(wrapped):
    """A gradient penalty on the module itself, in the loss of the wrapper's outputs."""
    forward = wrapped.forward()
    wrapped.backward(forward.losses(), penalty(wrapped))
    rule.check(wrapped)


def penalty(wrapped):
    forward = wrapped.forward(bare=True)
    if wrapped.drawn.cuts is not None:  # torch differentiates what ranks exchange once
        return forward.losses()
    found = []
    for loss, x in zip(forward.losses(), forward.inputs, strict=True):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(grad.square().sum() + 0 * x.sum())
    return tuple(found)


def uneven(wrapped):
    """Under join(): a rank that ran out of inputs takes part in the others' steps."""
    counts = [wrapped.rng.randint(0, 3) for _ in range(wrapped.seat.world)]
    by_initial = wrapped.drawn.hook is not None or wrapped.rng.random() < 0.5
    wrapped.joined = True
    rests = not wrapped.pending or min(counts) > 0  # on every rank
    mine = []
    with wrapped.model.join(divide_by_initial_world_size=by_initial):
        for _ in range(counts[wrapped.seat.rank]):
            wrapped.zero("none")
            wrapped.backward(wrapped.forward().losses())
            mine.append(rule.snapshot(wrapped, {}))
            rule.adopt(wrapped)
    nothing = torch.zeros(rule.width(wrapped), dtype=torch.float64)
    mine += [nothing] * (max(counts) - len(mine))
    rows = rule.gathered(wrapped, torch.stack(mine)) if mine else []
    for number in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if count > number]
        divisor = wrapped.seat.world if by_initial else len(present)
        rule.verify(wrapped, rows[present, number], divisor)
    wrapped.pending = not rests
    for index, (ours, theirs) in enumerate(wrapped.twins.params):
        unchanged = rule.same(ours.grad, theirs.grad)
        assert unchanged, f"parameter {index} changed on a rank that had joined"


def may_join(wrapped):
    drawn = wrapped.drawn
    refused = drawn.looks or drawn.compares or drawn.grouped or drawn.cuts
    return drawn.theme in ("plain", "hook") and not refused


def poisoned(wrapped):
    """One rank gives NaN for one weight: all know of it, and the user drops the gradients."""
    weights = [w for w in wrapped.tree.weights if w.requires_grad and w.numel()]
    if not weights:
        return
    weight, guilty = wrapped.rng.choice(weights), wrapped.rng.randrange(wrapped.seat.world)
    mine = wrapped.seat.rank == guilty
    hook = weight.register_hook(lambda grad: grad * math.nan) if mine else None
    wrapped.zero("none")
    wrapped.backward(wrapped.forward(used=list(wrapped.order)).losses())
    if hook is not None:
        hook.remove()
    index = next(i for i, (ours, _) in enumerate(wrapped.twins.params) if ours is weight)
    found = wrapped.model._engine.core.nonfinite()
    knows = wrapped.seat.rank in shares_average(wrapped, index, guilty)
    known = [(index, mine)] if knows else []
    assert found == known, f"rank {guilty} gave NaN for {index}, but {found} is known"
    wrapped.begin_means()
    wrapped.zero("none")
    wrapped.used, wrapped.touched, wrapped.pending = set(), set(), False
    rule.recall(wrapped)
    wrapped.regrouped = False


def shares_average(wrapped, index, rank):
    """Return the ranks that average a parameter together with `rank`."""
    part, _ = wrapped.apart.get(index, (range(wrapped.seat.world), None))
    everyones = rule.gathered(wrapped, torch.tensor([float(min(part))]))
    return [other for other, first in enumerate(everyones) if first == everyones[rank]]


def may_poison(wrapped):
    """Return whether all ranks train the same, in the dtype of the parameters."""
    return wrapped.drawn.looks and not (wrapped.frozen_alone or wrapped.drawn.mixed)


STEPS = {
    "one": Stage(step, weight=6),
    "after a failure": Stage(step_after_a_failure, may_stop),
    "clipped": Stage(clipped, weight=2),
    "two forwards": Stage(two_forwards, weight=2),
    # In mixed precision two forwards' gradients are added up in the low one, unlike the copy's.
    "sum of forwards": Stage(sum_of_forwards, lambda w: outputs_are_seen(w) and not w.drawn.mixed),
    "one graph twice": Stage(one_graph_twice, lambda w: w.drawn.theme != "skip"),
    "accumulating in between": Stage(
        accumulate_in_between,
        lambda w: outputs_are_seen(w) and free_use(w) and w.drawn.zero != 2,
    ),
    "weights": Stage(weighted, may_weigh, weight=2),
    "optimizer step": Stage(optimizer_step, lambda w: w.drawn.zero and free_use(w), weight=3),
    "saved on some ranks": Stage(
        saved_on_some_ranks, lambda w: w.drawn.zero and free_use(w), weight=3
    ),
    "reset in between": Stage(reset_in_between, weight=2),
    "gradient penalty": Stage(
        penalised, lambda w: outputs_are_seen(w) and not w.drawn.mixed and not w.drawn.alike
    ),
    "join": Stage(uneven, may_join),
    "not finite": Stage(poisoned, lambda w: may_poison(w) and free_use(w), weight=2),
}
