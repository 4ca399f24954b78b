"""Whether models learn as well where updated parameters travel in fewer bits.

    python -m tests.parameter_losses

The trainings of `bench curves`, with zero=1 and each format of `parameter_wire`. The loss is that
of held-out data, with the rounded weights that every rank computes with. Prints the table of
docs/zero.md; tests/test_zero_parameters.py trains one of its rows again.
"""

from functools import partial

import torch
import torch.distributed as dist

from bench.commands import curves
from examples.common.training import rate_share
from fastsync import FastDDP
from fastsync.plan.policy import PARAMETER_WIRES
from fastsync.testing import run_ranks

NUDGED = "None, nudged"


def train(rank, world, task, wire):
    """The loss in the end. Other weights to begin with tell what differences mean."""
    task = curves.TASKS[task]()
    task = curves.nudged(task) if wire == NUDGED else task
    module = task.build()
    chosen = wire if wire in PARAMETER_WIRES else None
    model = FastDDP(module, zero=1, parameter_wire=chosen, bucket_cap_mb=curves.BUCKET_MIB)
    optimizer = task.optimizer(module)
    rate = partial(rate_share, steps=curves.STEPS, warmup=curves.WARMUP_STEPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(curves.STEPS):
        optimizer.zero_grad()
        task.loss(model, task.batch(rank, step)).backward()
        optimizer.step()
        schedule.step()
    module.eval()
    with torch.no_grad():
        loss = torch.stack([task.loss(module, batch) for batch in task.held_out()]).mean()
    dist.all_reduce(loss)
    return loss.item() / world


def loss_of(task, wire):
    return run_ranks(train, 2, task, wire, timeout=300)[0]


def main():
    print("| `parameter_wire` | gpt: loss | against `None` | conv: loss | against `None` |")
    print("|---|---|---|---|---|")
    exact = {task: loss_of(task, "None") for task in curves.TASKS}
    for wire in ("None", NUDGED, *PARAMETER_WIRES):
        cells = [f"`{wire}`"]
        for task, reference in exact.items():
            loss = reference if wire == "None" else loss_of(task, wire)
            cells += [f"{loss:.4f}", f"{loss / reference - 1:+.2%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
