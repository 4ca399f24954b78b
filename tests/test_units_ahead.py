"""Units that are gathered further ahead than one: what the ranks agree on, and that bits stay."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastsync import FastDDP, TimelinePolicy, fully_shard
from fastsync.testing import run_ranks
from fastsync.timeline.data import by_step, load
from fastsync.units import context
from fastsync.units.lookahead import AGREED_AFTER, Course, Lookahead
from fastsync.units.state import state_of
from fastsync.units.unit import Unit
from tests.unit_models import OPTIMIZERS, Block, apply, loss_of, mesh_of, net, train, words

MARK = "FASTSYNC_UNIT_MEMORY_MB"

# --- any depth, the same bits


def made(how, world):
    if how == "zero=3":
        return FastDDP(net(6), zero=3, units=[Block])
    options = {
        "replicas": {"mesh": mesh_of(world, 2) if how == "replicas" else None},
        "lower": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        "kept parts": {"reshard_after_forward": 2},
        "coded": {"wire": "int8", "parameter_wire": "int8"},
    }
    return apply(fully_shard, net(6, 40), **options.get(how, {}))


def at_depth(rank, world, how, depth):
    """Weights and norms; every unit is gathered so many ahead."""
    Course.depth = lambda self, place: depth
    model = made(how, world)
    return train(model, rank, OPTIMIZERS["adamw"](model.parameters()), steps=3)


def twins(rank, world, how, memory):
    os.environ["FASTSYNC_SHM"] = memory
    wanted, norms = at_depth(rank, world, how, 1)
    for depth in (2, 4, 99):
        found, again = at_depth(rank, world, how, depth)
        assert norms == again
        assert all(map(torch.equal, found, wanted))


HOW = {"plain": 2, "three": 3, "replicas": 4, "lower": 2, "kept parts": 4, "coded": 2, "zero=3": 2}


@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("how", HOW)
def test_any_depth_gives_the_same_bits(how, memory):
    run_ranks(twins, HOW[how], how, memory)


# --- small units after a long one, by a clock of the test's own


class Clock:
    """Seconds of this rank. Modules and gathers take them; nothing else does."""

    def __init__(self, pace=1.0):
        self.now, self.pace = 0.0, pace

    def __call__(self):
        return self.now


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds * clock.pace
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds * ctx.clock.pace
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, width, seconds, clock):
        super().__init__()
        self.linear = nn.Linear(16, width, bias=False)
        self.seconds, self.clock = seconds, clock

    def forward(self, x):
        return _Takes.apply(x + self.linear(x).mean(1, keepdim=True), self.clock, self.seconds)


class Uneven(nn.Module):
    """A long layer, four small ones, and the same again."""

    def __init__(self, clock):
        super().__init__()
        torch.manual_seed(0)
        kinds = [(4096, 10.0), *[(512, 0.1)] * 4] * 2
        self.layers = nn.Sequential(*(Layer(width, s, clock) for width, s in kinds))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layers(x))


def uneven(clock):
    """Shard the layers and the root, whose unit is kept and comes first."""
    model = Uneven(clock)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    state_of(model).context.lookahead = Lookahead(clock)
    return model


def steps_of(model, rank, count):
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(count):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(3, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


def planned(rank, world, pace=None, mark=None, path=None):
    """Depths of forward and backward, weights, and those of one ahead."""
    os.environ["FASTSYNC_SHM"] = "0"
    os.environ.pop(MARK, None)
    if mark is not None:
        os.environ[MARK] = str(mark)
    alone = steps_of(uneven(Clock()), rank, AGREED_AFTER)
    context.take_gather_seconds = lambda strands: 1.0
    model = uneven(Clock(1.0 if pace is None else pace[rank]))
    if path is not None:
        model.record_timeline(TimelinePolicy(path, skip=AGREED_AFTER, steps=2))
    course = state_of(model).context.lookahead
    first = steps_of(model, rank, AGREED_AFTER)
    assert all(map(torch.equal, first, alone))
    depths = course.forward.depths, course.backward.depths
    return depths, steps_of(model, rank, 4), model.sync_stats()


def measured(course, clock, turns):
    """A course of `turns`: a unit, seconds that it was gathered for, computes, and waits after."""
    course.begin(looks=True)
    for number, gathered, computes, waits in turns:
        course.there(number, gathered)
        clock.now += computes
        for _ in range(2):  # who waits for several says so more than once
            course.wants()
            clock.now += waits
    course.end()
    return course.seconds(3)


def test_what_counts_is_work_without_waits_and_the_least_of_courses_alike():
    """The longest turn counts for a unit that runs twice in one course."""
    clock = Clock()
    course = Course(clock)
    first = measured(course, clock, [(0, 2.0, 3.0, 5.0), (1, 4.0, 1.0, 0.0), (0, 1.0, 2.0, 1.0)])
    assert first == ([3.0, 1.0, 0.0], [2.0, 4.0, 0.0]) and not course.settled
    again = measured(course, clock, [(0, 1.0, 4.0, 0.0), (1, 5.0, 0.5, 3.0), (0, 0.5, 1.0, 0.0)])
    assert again == ([3.0, 0.5, 0.0], [1.0, 4.0, 0.0]) and course.settled
    other = measured(course, clock, [(1, 9.0, 8.0, 0.0), (0, 7.0, 6.0, 0.0)])
    assert other == ([6.0, 8.0, 0.0], [7.0, 9.0, 0.0]) and not course.settled


def test_small_units_are_gathered_while_a_long_one_computes():
    (ahead, back), _, _ = run_ranks(planned, 2)[0]
    assert ahead[1] >= 4 and ahead[6] == 4, "small ones, during long ones"
    # A long one's gradients and the next unit are the most that one ahead takes.
    assert set(back[:-1]) == {1}


def test_backward_goes_deeper_where_memory_allows():
    (ahead, back), _, _ = run_ranks(planned, 2, None, 100.0)[0]
    assert ahead[1] >= 4
    assert max(back) >= 4
    (ahead, back), _, _ = run_ranks(planned, 2, None, 0.01)[0]
    assert set(ahead[:-1]) == set(back[:-1]) == {1}


def test_ranks_of_different_pace_agree():
    outcomes = run_ranks(planned, 3, (1.0, 0.001, 2.0))
    assert all(depths == outcomes[0][0] for depths, _, _ in outcomes)
    assert max(outcomes[0][0][0]) >= 4
    for _, weights, _ in outcomes[1:]:
        assert all(map(torch.equal, weights, outcomes[0][1]))


def test_their_gathers_begin_before_the_first_of_them_is_wanted(tmp_path):
    run_ranks(planned, 2, None, None, str(tmp_path / "run.json"))
    run = load(tmp_path / "run.json")
    assert [info.name for info in run.units][1:3] == ["layers.0", "layers.1"]
    for ranks in by_step(run).values():
        for step in ranks:
            ahead = {m.unit: m for m in step.moves if m.kind == "gather" and m.turn == 0}
            for long, small in ((1, range(2, 6)), (6, range(7, 11))):
                for unit in small:
                    assert ahead[long].started <= ahead[unit].started <= ahead[small[0]].wanted
                order = sorted(small, key=lambda unit: ahead[unit].started)
                assert order == list(small)


def reckoned(rank, world, mark):
    """Return what both directions are planned with, and the units in the order of backward."""
    os.environ["FASTSYNC_SHM"] = "0"
    os.environ.pop(MARK, None)
    if mark is not None:
        os.environ[MARK] = str(mark)
    found, plan = [], Course.plan

    def noted(course, units, stops, limit):
        found.append((limit, [stop.besides for stop in stops]))
        lengths.append((max(s.compute for s in stops), [s.nbytes for s in stops].count(0)))
        plan(course, units, stops, limit)

    Course.plan = noted
    clock, lengths = Clock(), []
    model = uneven(clock)
    for _ in range(AGREED_AFTER):
        clock.pace = 1.0
        loss = model(torch.ones(3, 16)).square().mean()
        clock.pace = 2.0
        loss.backward()
    assert lengths == [(10.0, 1), (20.0, 1)], "of either direction; the root's needs no gather"
    ran = state_of(model).context
    units = [ran.units()[number] for number in ran.lookahead.backward.order]
    kept = sum(u.bytes_to_gather() for u in units if not u.switches.reshard_after_forward)
    own = [4 * sum(m.sharded.numel() for m in unit.members) for unit in units]
    return found, kept, own, [unit.bytes_to_reduce() for unit in units]


def test_plans_count_what_is_kept_and_gradients_that_travel():
    """Below a mark, the largest; without one, those of the unit before."""
    (ahead, back), kept, own, reduced = run_ranks(reckoned, 2, 8.0)[0]
    assert kept > 0 and ahead[0] == back[0] == 8 * 2**20 - kept
    assert set(ahead[1]) == {0} and set(back[1]) == {max(reduced)}
    (ahead, back), _, own, reduced = run_ranks(reckoned, 2, None)[0]
    before = [0, *map(sum, zip(own, reduced, strict=True))]
    assert back[1] == [mine + last for mine, last in zip(own, before, strict=False)]
    assert ahead[0] == back[0] > max(back[1])


# --- after what a module waits for


def in_order(rank, world, memory):
    """Gathers of a step, as they begin (+) and end (-)."""
    os.environ["FASTSYNC_SHM"] = memory
    model = apply(fully_shard, net(3))
    begun, seen = set(), []
    start, finish = Unit.start_gather, Unit.finish_gather

    def starts(unit):
        if not unit.is_whole and id(unit) not in begun:
            begun.add(id(unit))
            seen.append(f"+{unit.name or 'root'}")
        start(unit)

    def finishes(unit):
        was_whole = unit.is_whole
        finish(unit)
        if not was_whole:
            begun.discard(id(unit))
            seen.append(f"-{unit.name or 'root'}")

    Unit.start_gather, Unit.finish_gather = starts, finishes
    for step in range(2):
        seen.clear()
        loss_of(model, words(rank, step)).backward()
    return " ".join(seen).replace("blocks.", "")


AT_ONCE = "+root +0 -root +1 -0 +2 -1 -2 +2 +1 -2 +0 -1 -0"
LATER = "+root -root +0 -0 +1 -1 +2 -2 +2 -2 +1 -1 +0 -0"


@pytest.mark.parametrize(("memory", "wanted"), [("0", AT_ONCE), ("1", LATER)])
def test_the_next_gather_travels_after_the_one_that_is_waited_for(memory, wanted):
    """In shared memory nothing travels, and each costs memory of its own."""
    assert run_ranks(in_order, 3, memory) == [wanted] * 3


# --- where nothing is planned


def in_memory(rank, world):
    os.environ["FASTSYNC_SHM"] = "1"
    model = uneven(Clock())
    context.take_gather_seconds = lambda strands: 1.0
    steps_of(model, rank, AGREED_AFTER + 1)
    found = state_of(model).context.lookahead
    return found.over, found.forward.depths, found.backward.depths


def test_ranks_of_one_machine_gather_one_ahead():
    assert run_ranks(in_memory, 2) == [(True, (), ())] * 2


class Either(nn.Module):
    """Frozen parts, of which each rank may use its own; a head that is trained."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).requires_grad_(False)
        self.head = nn.Linear(8, 8)
        self.chosen = (0, 1, 2)

    def forward(self, x):
        for number in self.chosen:
            x = self.parts[number](x)
        return self.head(x)


def of_their_own(rank, world):
    os.environ["FASTSYNC_SHM"] = "0"
    torch.manual_seed(0)
    model = Either()
    for part in model.parts:
        fully_shard(part, reshard_after_forward=False)
        part.set_reshard_after_backward(False)
    fully_shard(model)
    for _ in range(AGREED_AFTER + 2):
        model(torch.ones(2, 8)).sum().backward()
        model.chosen = (0, 2) if rank == 0 else (1,)  # kept for good by then
    found = state_of(model).context.lookahead
    return found.over, found.forward.depths


def test_ranks_whose_orders_differ_gather_one_ahead():
    assert run_ranks(of_their_own, 2) == [(True, ())] * 2


def changing(rank, world):
    """Another order than the planned one, and that one again."""
    context.take_gather_seconds = lambda strands: 1.0
    os.environ["FASTSYNC_SHM"] = "0"
    model = uneven(Clock())
    steps_of(model, rank, AGREED_AFTER)
    forward = state_of(model).context.lookahead.forward
    layers = list(model.layers)
    seen = []
    for order in (layers, layers[::-1], layers[::-1], layers, layers):
        model.layers._modules = {str(n): layer for n, layer in enumerate(order)}
        steps_of(model, rank, 1)
        seen.append(max(forward.depth(place) for place in range(5)))
    return seen


def test_another_order_than_the_planned_one_is_followed_one_ahead():
    for seen in run_ranks(changing, 2):
        # What a forward follows is the one before it.
        assert [depth > 1 for depth in seen] == [True, True, False, False, True]


def by_hand(rank, world):
    os.environ["FASTSYNC_SHM"] = "0"
    Course.depth = lambda self, place: 9
    model = apply(fully_shard, net(5))
    blocks = list(model.blocks)
    begun = []
    start = Unit.start_gather

    def noted(unit):
        if not unit.is_whole:
            begun.append(unit.name)
        start(unit)

    Unit.start_gather = noted
    rows = []
    for hand in (False, True):
        if hand:
            blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        for step in range(2):
            begun.clear()
            blocks[3].register_forward_pre_hook(lambda *_: rows.append(list(begun)), prepend=True)
            with torch.no_grad():
                loss_of(model, words(rank, step))
    return rows


def test_what_a_script_names_wins():
    for rows in run_ranks(by_hand, 2):
        assert "blocks.4" in rows[1], "nine ahead"
        assert "blocks.4" not in rows[-1], "only what was named, and else one"
