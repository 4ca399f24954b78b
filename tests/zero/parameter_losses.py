"""Whether models learn as well where parameters travel in fewer bits.

    python -m tests.zero.parameter_losses
    python -m tests.zero.parameter_losses --zero 3

The trainings of `bench curves`, with zero=1 and each format of `parameter_wire`; or with zero=3,
and gradients in fewer bits too. The loss is that of held-out data, with the rounded weights that
every rank computes with. Prints the tables of docs/zero.md and docs/zero3.md;
tests/zero/test_zero_parameters.py trains one of their rows again.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist

from bench.commands import curves
from examples.common.training import rate_share
from fastsync import FastDDP
from fastsync.config.arguments import PARAMETER_WIRES, grouped
from fastsync.testing import run_ranks

NUDGED = "None, nudged"


def rows_of(zero):
    """Options of FastDDP by the name of the row."""
    if zero == 1:
        return {wire: {"parameter_wire": wire} for wire in PARAMETER_WIRES}
    pairs = [("int8", None), (None, "int8"), ("fp8_e4m3", "fp8_e4m3"), ("int8", "int8")]
    return {
        f"{wire}, {other}": {"wire": wire or "fp32", "parameter_wire": other}
        for wire, other in pairs
    }


def train(rank, world, task, wire, zero=1):
    """The loss in the end. Other weights to begin with tell what differences mean."""
    task = curves.TASKS[task]()
    task = curves.nudged(task) if wire == NUDGED else task
    module = task.build()
    options = rows_of(zero).get(wire, {})
    model = FastDDP(module, bucket_cap_mb=curves.BUCKET_MIB, **grouped({"zero": zero, **options}))
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


def loss_of(task, wire, zero=1):
    return run_ranks(train, 2, task, wire, zero, timeout=300)[0]


def main():
    parser = argparse.ArgumentParser(description="trains models with codes, and prints a table")
    parser.add_argument("--zero", type=int, choices=(1, 3), default=1, help="the stage")
    zero = parser.parse_args().zero
    named = "`parameter_wire`" if zero == 1 else "`wire`, `parameter_wire`"
    print(f"| {named} | gpt: loss | against `None` | conv: loss | against `None` |")
    print("|---|---|---|---|---|")
    exact = {task: loss_of(task, "None", zero) for task in curves.TASKS}
    for wire in ("None", NUDGED, *rows_of(zero)):
        cells = [f"`{wire}`"]
        for task, reference in exact.items():
            loss = reference if wire == "None" else loss_of(task, wire, zero)
            cells += [f"{loss:.4f}", f"{loss / reference - 1:+.2%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
