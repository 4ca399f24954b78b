"""What the planner takes a mode to cost, beside what real ranks have sent."""

import pytest
import torch

from fastsync import ChunkedTopK, Delayed, DiLoCo, FastDDP, LocalSGD, TopK
from fastsync.planner.hardware import sent_bytes
from fastsync.planner.scenario import StepCost, choose, step_cost
from tests.helpers.teams import run_ranks
from tests.sync.test_modes import loop, net

MODES = {
    "local": LocalSGD(4),
    "diloco": DiLoCo(4, fragments=2),
    "int8": DiLoCo(4, wire="int8"),
    "int4": DiLoCo(2, wire="int4"),
    "topk": DiLoCo(4, wire=TopK(0.1)),
    "chunked topk": DiLoCo(4, wire=ChunkedTopK(0.1)),
    "delayed": Delayed(2),
}
SIZES = [p.numel() for p in net().parameters()]


def sent(rank, world, mode):
    model = FastDDP(net(), sync=mode)
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(4):
        step()
    return model.sync_stats().round_bytes


@pytest.mark.parametrize("name", MODES)
def test_bytes_are_those_that_ranks_send(name):
    def collective(kind, nbytes):
        return 0.0, sent_bytes(kind, nbytes, 3)

    cost = step_cost(MODES[name], SIZES, 3, 1.0, collective)
    for real in run_ranks(sent, 3, MODES[name]):
        # Codes are filled up to 16 bytes, and a division rounds.
        assert abs(4 * cost.sent - real) <= 4 * 16 * 2, (cost.sent, real)


def cost_of(mode, seconds):
    """The cost of a step whose computation takes a second; `seconds` are of a whole average."""
    return step_cost(mode, [100], 2, 1.0, lambda kind, nbytes: (seconds * nbytes / 400, 0.0))


def test_what_runs_while_steps_do_is_not_waited_for():
    assert cost_of(LocalSGD(4), 6.0).exposed == pytest.approx(1.5)
    assert cost_of(DiLoCo(4, fragments=2), 6.0).exposed == pytest.approx(1.5)
    assert cost_of(DiLoCo(4, overlap=3), 6.0).exposed == pytest.approx(0.75)
    assert cost_of(DiLoCo(4, overlap=3), 2.0).exposed == 0
    # Two fragments are on their way at once: six seconds of sending in four of a round.
    assert cost_of(DiLoCo(4, fragments=4, overlap=3), 6.0).exposed == pytest.approx(0.5)
    assert cost_of(Delayed(1), 0.9).exposed == 0
    assert cost_of(Delayed(1), 3.0).mean == pytest.approx(3.0)


def test_the_mode_that_averages_most_often_is_chosen_of_those_that_are_alike():
    costs = {
        None: StepCost(2.0, 1.0, 100.0),
        LocalSGD(8): StepCost(1.01, 0.01, 12.0),
        DiLoCo(8, wire="int4"): StepCost(1.0, 0.0, 2.0),
        DiLoCo(64): StepCost(1.0, 0.0, 2.0),
    }
    assert choose(costs) == LocalSGD(8)
    assert choose({**costs, None: StepCost(1.02, 0.02, 100.0)}) is None
    assert choose({**costs, LocalSGD(8): StepCost(1.2, 0.2, 12.0)}) == DiLoCo(8, wire="int4")
