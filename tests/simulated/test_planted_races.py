"""Planted mistakes, each of which the race detector finds by name; and their right twins.

A program is given `right`: with it nothing is to be found. The second half leaves out, one after
the other, every wait of one stream for another in a training step of fastsync.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import fastsync
from fastsync import FastDDP
from fastsync._build import extension
from tests.fsdp.fsdp_models import loss_of, net, words
from tests.simulated.ranks import run_simulated

DEVICE = "sim"
HERE = r"simulated/test_planted_races.py:\d+"
PLANTED = {}


def planted(name, *sides):
    """Register a program; `sides` are the two operators that a report names."""

    def register(program):
        PLANTED[name] = program, sides
        return program

    return register


def side_streams(count=1):
    streams = [torch.sim.Stream() for _ in range(count)]
    return streams[0] if count == 1 else streams


def here():
    return torch.sim.current_stream()


def ones(*sizes):
    return torch.ones(*(sizes or (64,)), device=DEVICE)


@planted("no wait before a side stream reads", "fill", "mul")
def reads_early(right):
    x, side = ones(), side_streams()
    if right:
        side.wait_stream(here())
    with torch.sim.stream(side):
        y = x * 2
    here().wait_stream(side)
    return x, y


@planted("no wait for what a side stream writes", "mul", "add")
def reads_late(right):
    x, side = ones(), side_streams()
    side.wait_stream(here())
    with torch.sim.stream(side):
        y = x * 2
    if right:
        here().wait_stream(side)
    return x, y + 1


@planted("an event before what it stands for", "add", "mul")
def early_event(right):
    x, side, event = ones(), side_streams(), torch.sim.Event()
    if not right:
        event.record()
    x.add_(1)
    if right:
        event.record()
    side.wait_event(event)
    with torch.sim.stream(side):
        y = x * 2
    here().wait_stream(side)
    return x, y


@planted("a wait of another stream", "add", "mul")
def waits_elsewhere(right):
    x, (one, other) = ones(), side_streams(2)
    one.wait_stream(here())
    with torch.sim.stream(one):
        x.add_(1)
    (here() if right else other).wait_stream(one)
    return x, x * 2


@planted("no record_stream", "mul", "reuse of memory")
def no_record(right):
    x, side = ones(), side_streams()
    side.wait_stream(here())
    with torch.sim.stream(side):
        y = x * 2
    if right:
        x.record_stream(side)
    del x
    again = ones()
    here().wait_stream(side)
    return y, again


@planted("memory of a side stream that is freed while it is read", "add", "reuse of memory")
def side_memory(right):
    side = side_streams()
    with torch.sim.stream(side):
        x = ones()
    here().wait_stream(side)
    y = x + 1
    if right:
        x.record_stream(here())
    del x
    with torch.sim.stream(side):
        again = ones()
    return y, again


@planted("overwritten while it is read", "mul", "add")
def overwritten(right):
    x, side = ones(), side_streams()
    side.wait_stream(here())
    with torch.sim.stream(side):
        y = x * 2
    if right:
        here().wait_stream(side)
    x.add_(1)
    here().wait_stream(side)
    return x, y


@planted("slices of one bucket that overlap", "add", "mul")
def slices(right):
    bucket, side = ones(), side_streams()
    side.wait_stream(here())
    with torch.sim.stream(side):
        bucket[:32].add_(1)
    bucket[32 if right else 31 :].mul_(2)
    here().wait_stream(side)
    return (bucket,)


@planted("an optimizer that does not wait for backward", "gradient of weight", "add")
def early_step(right):
    model, side = nn.Linear(8, 8, device=DEVICE), side_streams()
    x = ones(4, 8)
    side.wait_stream(here())
    model.weight.grad, model.bias.grad = torch.zeros_like(model.weight), None
    torch.sim.current_stream().synchronize()
    from tests.simulated.device import _name_parameters

    _name_parameters(model)
    model(x).sum().backward()
    if right:
        side.wait_stream(here())
    with torch.sim.stream(side), torch.no_grad():
        model.weight.add_(model.weight.grad, alpha=-0.1)
    here().wait_stream(side)
    return tuple(model.parameters())


@planted("a kernel on another device's stream", "fill", "mul")
def wrong_device(right):
    x = ones()
    with torch.sim.device(0 if right else 1):
        y = torch.empty_like(x, device=f"{DEVICE}:{torch.sim.current_device()}")
        stream = here()
    with torch.sim.stream(side_streams() if not right else stream):
        torch.mul(x, 2, out=y if right else torch.empty_like(x))
    torch.sim.synchronize()
    return x, y


def enqueued(tensor):
    return dist.all_reduce(tensor, async_op=True)


@planted("no wait for a collective", "all_reduce", "mul")
def no_work_wait(right):
    x = ones()
    work = enqueued(x)
    if right:
        work.wait()
    y = x * 2
    work.wait()
    return x, y


@planted("a collective's input changed under way", "all_gather", "add")
def input_changed(right):
    x, out = ones(), ones(128)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    if right:
        work.wait()
    x.add_(1)
    work.wait()
    return x, out


@planted("a collective of what a side stream writes", "add", "all_reduce")
def collective_early(right):
    x, side = ones(), side_streams()
    side.wait_stream(here())
    with torch.sim.stream(side):
        x.add_(1)
    if right:
        here().wait_stream(side)
    enqueued(x).wait()
    here().wait_stream(side)
    return (x,)


@planted("memory let go where another stream has waited", "all_reduce", "reuse of memory")
def let_go(right):
    x, side = ones(), side_streams()
    work = enqueued(x)
    with torch.sim.stream(here() if right else side):
        work.wait()
    del x, work
    again = ones()
    return (again,)


@planted("one buffer, two communicators", "all_reduce", "all_reduce")
def two_groups(right):
    other = dist.new_group([0, 1])
    x = ones()
    first = enqueued(x)
    if right:
        first.wait()
    second = dist.all_reduce(x, group=other, async_op=True)
    first.wait()
    second.wait()
    return (x,)


@planted("kernels that use the same elements of a tensor", "kernel", "kernel")
def shared_elements(right):
    """The right ones use elements of one page: the reader's first 64, the writer's last 64."""
    engine = extension.load()
    x, flats, side = ones(128), (ones(), ones()), side_streams()
    side.wait_stream(here())
    engine.pack([x[:64]], [x[:64]], [0], flats[0], 1.0)
    first = 64 if right else 63
    with torch.sim.stream(side):
        engine.unpack([x[first : first + 64]], [0], flats[1], 1.0, False)
    here().wait_stream(side)
    return x, flats


def run_planted(rank, world, names):
    from tests.simulated.device import detecting

    found = {}
    for name in names:
        for right in (True, False):
            races = []
            with detecting(races):
                kept = PLANTED[name][0](right)
                torch.sim.synchronize()
            del kept
            found[name, right] = races
    return found


@pytest.fixture(scope="module")
def found():
    return run_simulated(run_planted, 2, list(PLANTED))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(found, name):
    for rank in found:
        assert not rank[name, True], "\n".join(rank[name, True])
        sides = PLANTED[name][1]
        matching = [race for race in rank[name, False] if all(side in race for side in sides)]
        assert matching, "\n".join(rank[name, False]) or "nothing was found"
        assert len(re.findall(HERE, matching[0])) >= 2 and "on stream" in matching[0], matching


# --- The engine's own edges ---


# Waits for what a step does not read. Coded buckets' used flags are summed by themselves, and read
# only after a gradient has been missed.
UNREAD = {"int8": 1}


def by_block(model):
    for block in model.blocks:
        fastsync.fully_shard(block)
    return fastsync.fully_shard(model)


ENGINES = {
    "zero0": lambda model: FastDDP(model, bucket_cap_mb=0.02),
    "int8": lambda model: FastDDP(model, bucket_cap_mb=0.02, wire="int8"),
    "zero2": lambda model: FastDDP(model, bucket_cap_mb=0.02, zero=2),
    "fully_shard": by_block,
}


def steps_without(engine, edge):
    """Races of a step of which a wait is left out, that wait, and how many there are."""
    from tests.simulated.device import detecting, low, placed

    model = ENGINES[engine](placed(net()))
    opt = optim.SGD(model.parameters(), 0.1)
    # Made before: what a mistake overwrites should be no index, which would end the training.
    batches = [words(dist.get_rank(), number).to(DEVICE) for number in range(5)]

    def step(number):
        opt.zero_grad()
        loss_of(model, batches[number]).backward()
        opt.step()

    for number in range(3):
        step(number)
    races = []
    with detecting(races):
        low.drop(edge=edge)
        step(3)
        edges = low.report().edges
        step(4)  # which uses what the last one has left
        torch.sim.synchronize()
        dropped = low.report().dropped
        low.drop()
    return races, dropped, edges


def each_edge(rank, world, engine):
    races, _, edges = steps_without(engine, 0)
    assert not races, races
    found = []
    for edge in range(1, edges + 1):
        races, dropped, _ = steps_without(engine, edge)
        if dropped:  # what the host happens to know by then may have made a wait superfluous
            found.append((dropped, races))
    return found


def missed(found):
    """Return waits of which no race tells, and no later wait of the same streams covers."""
    pairs = [re.match(r"wait of stream \d+ for stream \d+", wait)[0] for wait, _ in found]
    return [
        wait
        for i, (wait, races) in enumerate(found)
        if not races and pairs[i] not in pairs[i + 1 :]
    ]


# With zero=2 a training without one of its waits sometimes does not end.
# Those of zero2 are found in some runs and not in others, for a reason that is not known yet.
EACH = [engine for engine in ENGINES if engine != "zero2"]


@pytest.mark.slow(but=("zero0",))
@pytest.mark.parametrize("engine", EACH)
def test_a_wait_that_is_left_out_is_found(engine):
    """Every wait in which one stream learns something, on each rank, one at a time."""
    for found in run_simulated(each_edge, 2, engine, timeout=300.0):
        assert sum(bool(races) for _, races in found) >= 2
        assert len(missed(found)) <= UNREAD.get(engine, 0), missed(found)
