"""Plain training steps, and that the comparison notices a wrong result."""

import pytest
import torch

from tests.conformance.stages import STAGES, batch, check, full, loss_of, net, train


def trains(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(4))
    return full(model)


def trains_on_other_data(wrap, rank):
    """Train on one set of data under DDP and on another under the stage."""
    model = wrap(net())
    other = not type(model).__module__.startswith("torch.nn.parallel")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step + 10 * other))).backward()
        optimizer.step()
    return full(model)


@pytest.mark.slow(but=("zero1-small", "zero3", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_trains(stage):
    check(trains, stage)


def test_the_comparison_notices_other_weights():
    with pytest.raises(AssertionError, match="differ from DDP's"):
        check(trains_on_other_data, "zero0")
