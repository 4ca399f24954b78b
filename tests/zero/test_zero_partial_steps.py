"""zero=1 and 2: an optimizer steps on one buffer after the other, and scripts see one step."""

import pytest
from torch import optim

from fastsync import FastDDP, Zero
from fastsync.testing import run_ranks
from tests.zero.zero_loops import OPTIMIZERS, STEPS, batch, close, net

SMALL = 1e-4  # MiB: a bucket for each gradient


class Counting(optim.SGD):
    """Optimizer of a class that fastsync does not know."""

    made = 0

    def step(self, closure=None):
        self.made += 1
        return super().step(closure)


def in_turns(rank, world, make, zero):
    """Return weights, losses, how often each hook was called, steps that were
    counted, and buckets.
    """
    module = net()
    model = FastDDP(
        module,
        zero=Zero(zero, shard_by="element"),
        bucket_cap_mb=SMALL,
        find_unused_parameters=True,
    )
    known = make != "counting"
    optimizer = OPTIMIZERS[make](model.parameters()) if known else Counting(model.parameters(), 0.1)
    calls = {"before": 0, "after": 0}
    for when, register in (
        ("before", optimizer.register_step_pre_hook),
        ("after", optimizer.register_step_post_hook),
    ):
        register(lambda *_, when=when: calls.update({when: calls[when] + 1}))
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(batch(rank, step)).mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure).detach() if step % 2 else closure().detach())
        if step % 2 == 0:
            optimizer.step(closure=None)
        schedule.step()
    weights = [p.detach().clone() for p in module.parameters()]
    buckets = len(model._engine.plan.buckets)
    return [*weights, *losses], calls, getattr(optimizer, "made", 0), buckets


@pytest.mark.slow(but=("adamw", "counting"))
@pytest.mark.parametrize("make", ["sgd", "adamw", "adamw fused", "rprop", "counting"])
def test_steps_in_turns_are_one_step(make):
    wanted = run_ranks(in_turns, 2, make, 0)
    for zero in (1, 2):
        found = run_ranks(in_turns, 2, make, zero)
        for (right, calls, made, _), (values, own_calls, own_made, buckets) in zip(
            wanted, found, strict=True
        ):
            assert close(values, right) and buckets > 2
            assert own_calls == calls == {"before": STEPS, "after": STEPS}
            assert own_made == made == (STEPS if make == "counting" else 0)


def fail_on_the_way(rank, world):
    """A step that raises when some buffers are on their way: the next one goes on."""
    module = net()
    model = FastDDP(module, zero=1, bucket_cap_mb=SMALL, find_unused_parameters=True)
    optimizer = optim.SGD(
        [{"params": [p], "momentum": 0.5} for p in module.parameters() if p.numel()], 0.05
    )
    groups = optimizer.param_groups
    cut = next(group for group in groups if group["params"][0] is module.conv.weight)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).mean().backward()
        if step == 2:
            cut["momentum"] = "broken"  # where both ranks own something
            with pytest.raises(TypeError):
                optimizer.step()
            cut["momentum"] = 0.5
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def test_after_a_step_that_raised_ranks_hold_the_same():
    first, second = run_ranks(fail_on_the_way, 2)
    assert close(first, second)
