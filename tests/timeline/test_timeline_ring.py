"""The C++ timeline: which marks a step leaves, in which order, and what the ring forgets."""

import time

import torch
import torch.distributed as dist
from torch import nn

from fastsync._build import extension
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.reducer.engine import Engine, NamedParam
from tests.helpers.teams import run_ranks

BUCKET_MARKS = ("ready", "packed", "launched", "done")
STEP_MARKS = ("forward_start", "forward_end", "backward_start", "backward_end", "step_end")
PARAMS = 4


def make_engine(numel=1024):
    params = [NamedParam(f"p{i}", nn.Parameter(torch.ones(numel))) for i in range(PARAMS)]
    return Engine(params, dist.group.WORLD, BucketPolicy((1,)), SyncPolicy())


def step(engine, used=PARAMS):
    params = [p.tensor for p in engine.params[:used]]
    engine.before_forward()
    loss = sum(p.sum() for p in params)
    engine.after_forward([loss])
    loss.backward()


def recorded_steps(rank, world, steps, capacity, used=PARAMS):
    engine = make_engine()
    step(engine)
    timeline = extension.load().Timeline(capacity, "cpu")
    engine.core.set_timeline(timeline)
    before = time.monotonic_ns()
    for _ in range(steps):
        step(engine, used)
    after = time.monotonic_ns()
    engine.core.set_timeline(None)
    step(engine)
    return timeline.events(), timeline.dropped(), (before, after)


def by_bucket(events, number):
    """{bucket: {mark: time}} of one step; every mark at most once."""
    found = {}
    for step_number, mark, index, _, at in events:
        if step_number == number and mark in BUCKET_MARKS:
            assert mark not in found.setdefault(index, {})
            found[index][mark] = at
    return found


def step_times(events, number):
    return {mark: at for s, mark, _, _, at in events if s == number and mark in STEP_MARKS}


def test_marks_are_complete_and_ordered():
    for events, dropped, (before, after) in run_ranks(recorded_steps, 2, 3, 4096):
        assert dropped == 0
        assert len(events) == 3 * (len(STEP_MARKS) + PARAMS * len(BUCKET_MARKS))
        assert {step_number for step_number, *_ in events} == {1, 2, 3}
        assert all(before <= at <= after for *_, at in events)
        for number in (1, 2, 3):
            times = step_times(events, number)
            assert [times[mark] for mark in STEP_MARKS] == sorted(times.values())
            buckets = by_bucket(events, number)
            assert sorted(buckets) == list(range(PARAMS))
            for marks in buckets.values():
                in_order = [marks[mark] for mark in BUCKET_MARKS]
                assert in_order == sorted(in_order)
                assert times["backward_start"] <= marks["ready"]
                assert marks["done"] <= times["step_end"]


def test_bytes_and_plans_are_told():
    for events, _, _ in run_ranks(recorded_steps, 2, 1, 4096):
        sizes = {size for _, mark, _, size, _ in events if mark == "launched"}
        assert sizes == {4 * (1024 + 16)}
        plans = {mark: index for _, mark, index, _, _ in events if mark in STEP_MARKS}
        assert set(plans.values()) == {2}  # the first step ended with the plan of the seen order


def test_buckets_that_lack_gradients_are_ready_when_backward_ends():
    for events, _, _ in run_ranks(recorded_steps, 2, 1, 4096, 1):
        times, buckets = step_times(events, 1), by_bucket(events, 1)
        late = [marks for marks in buckets.values() if marks["ready"] >= times["backward_end"]]
        assert (len(buckets), len(late)) == (PARAMS, PARAMS - 1)


def test_the_ring_keeps_the_latest_marks():
    per_step = len(STEP_MARKS) + PARAMS * len(BUCKET_MARKS)
    for events, dropped, _ in run_ranks(recorded_steps, 2, 5, 2 * per_step - 1):
        assert len(events) == 2 * per_step - 1
        assert dropped == 3 * per_step + 1
        assert {step_number for step_number, *_ in events} == {4, 5}
        assert len(by_bucket(events, 5)) == PARAMS


def test_one_rank_communicates_nothing():
    events, _, _ = run_ranks(recorded_steps, 1, 1, 4096)[0]
    assert {mark for _, mark, *_ in events} == {*STEP_MARKS, "ready"}


def done_while_backward_sleeps(rank, world):
    """Let the first bucket's collective complete during a long backward, without a wait."""
    engine = make_engine(numel=16)
    timeline = extension.load().Timeline(4096, "cpu")
    for _ in range(2):
        step(engine)
    engine.core.set_timeline(timeline)
    engine.before_forward()
    first, *rest = engine.core.ready_order()
    late = _SleepInBackward.apply(sum(engine.params[i].tensor.sum() for i in rest))
    loss = engine.params[first].tensor.sum() + late  # autograd takes the latest operation first
    engine.after_forward([loss])
    loss.backward()
    return timeline.events()


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        for _ in range(10):
            time.sleep(0.05)
        return grad


def test_done_is_when_the_collective_completed():
    """Not when the host came to wait for it, at the end of backward."""
    for events in run_ranks(done_while_backward_sleeps, 2):
        done = {index: at for _, mark, index, _, at in events if mark == "done"}
        times = step_times(events, 2)
        assert done[0] < times["backward_end"] <= times["step_end"]


def hook_marks(rank, world):
    engine = make_engine()
    timeline = extension.load().Timeline(4096, "cpu")
    engine.set_hook(None, _all_reduce)
    engine.core.set_timeline(timeline)
    for _ in range(2):
        step(engine)
    return timeline.events()


def _all_reduce(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def test_hooks_are_recorded_too():
    for events in run_ranks(hook_marks, 2):
        for marks in (by_bucket(events, 0), by_bucket(events, 1)):
            assert len(marks) == PARAMS
            assert all(list(m) == list(BUCKET_MARKS) for m in marks.values())


def test_a_timeline_needs_room():
    for capacity in (0, -1):
        try:
            extension.load().Timeline(capacity, "cpu")
        except ValueError as error:
            assert "at least one mark" in str(error)
        else:
            raise AssertionError("accepted")
