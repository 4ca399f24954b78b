"""Trains a small GPT with fastsync's FastDDP on two ranks and holds it against torch's DDP.

  1. trains a byte-level GPT on the Python standard library's source;
  2. trains the same steps with torch DDP and FastDDP and compares every bit of the weights;
  3. measures step time, exposed synchronisation, gradient memory and dispatched operators.

The ranks use NCCL where every one has a GPU, else Gloo on the CPU. Needs about a minute on two
cores, with --quick half of it. Exits with 1 if the weights differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import data, gpt
from examples.common.check import train as train_steps
from examples.common.costs import dispatched_ops, gradient_memory
from examples.common.machine import describe, environment
from examples.common.ranks import CheckFailed, Group, argument, run_example
from examples.common.rounds import Settings, Timing, measure, table
from examples.common.text import Progress, times
from examples.common.training import Workload, rate_share
from examples.common.variants import BASELINE, OURS, VARIANTS, Variant, select

BATCH, STEPS, QUICK_STEPS = 12, 120, 60
PEAK_RATE, WARMUP_STEPS = 4e-3, 20
PARITY_STEPS = 20
MEASURED = Settings(rounds=12, steps=3, seconds=8.0, optimizer="adamw")
QUICKLY = Settings(rounds=3, steps=2, optimizer="adamw")
SHOWN = "no_sync,ddp,ddp_view,ddp_static_view,fastsync,fastsync_bf16,fastsync_int8"
REPORTS = 10
WIDTH, BARS = 64, "▁▂▃▄▅▆▇█"  # of the curve
PROMPT = b"def "
SAMPLE_BYTES, TEMPERATURE = 300, 0.6


def say(group: Group, text: str = "") -> None:
    if group.is_main:
        print(text, flush=True)


def gpt_workload(corpus: data.Corpus) -> Workload:
    """Return the demo's GPT as rounds take it."""
    length = gpt.Shape().length
    return Workload(
        "gpt",
        gpt.build,
        lambda rank, step: corpus.batch(rank, step, BATCH, length),
        lambda loss: loss,
    )


def train(model: nn.Module, workload: Workload, steps: int, group: Group) -> list[float]:
    """Train as a user's script would; return every step's mean loss over ranks, in nats per
    byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95))
    losses: list[float] = []
    started = time.monotonic()
    for step in range(steps):
        for options in optimizer.param_groups:
            options["lr"] = PEAK_RATE * rate_share(step, steps, WARMUP_STEPS, 0.1)
        windows = workload.batch(group.rank, step).to(group.device)
        optimizer.zero_grad()
        loss = model(windows)
        loss.backward()
        optimizer.step()
        losses.append(group.mean(loss))
        if (step + 1) % max(1, steps // REPORTS) == 0:
            seconds = time.monotonic() - started
            speed = (step + 1) * windows[:, 1:].numel() * group.world / seconds
            recent = losses[-max(1, steps // REPORTS) :]
            mean = sum(recent) / len(recent)
            say(group, f"  step {step + 1:>5}/{steps}   loss {mean:.3f}   {speed:>9,.0f} tokens/s")
    return losses


def curve(values: list[float]) -> str:
    """Return a line of bars, each the mean of as many values."""
    cuts = [i * len(values) // WIDTH for i in range(WIDTH + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts) if a < b]
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / (high - low or 1.0) * 7)] for mean in means)


def train_gpt(corpus: data.Corpus, steps: int, group: Group) -> list[float]:
    """Part 1: trains with FastDDP, and shows a sample of what was learned."""
    module, workload = gpt.build().to(group.device), gpt_workload(corpus)
    count, length = sum(p.numel() for p in module.parameters()), module.shape.length
    say(group, f"\n1. Training a GPT of {count / 1e6:.2f} M parameters with FastDDP")
    say(group, f"   {BATCH} x {length} bytes per rank and step, AdamW\n")
    losses = train(VARIANTS[OURS].wrap(module, group.device), workload, steps, group)
    if group.is_main:
        with torch.no_grad():
            held_out = module(corpus.validation_batch(64, length).to(group.device)).item()
        print(f"\n  loss {losses[0]:.3f} {curve(losses)} {losses[-1]:.3f}; held out {held_out:.3f}")
        print(f"\n  It continues {PROMPT.decode()!r}, sampled at temperature {TEMPERATURE}:")
        text = PROMPT + module.generate(PROMPT, SAMPLE_BYTES, TEMPERATURE)
        for line in text.decode("ascii", errors="replace").splitlines():
            print(f"    | {line if line.isprintable() else ascii(line)}"[:100].rstrip())
    return losses


def check_parity(workload: Workload, group: Group) -> dict[str, dict[str, str]]:
    """Part 2: the hashes of the weights that torch DDP and FastDDP train.

    Raises:
        CheckFailed: they differ on some rank, where two or fewer ranks leave no room for it.
    """
    say(group, f"\n2. The weights after {PARITY_STEPS} steps, all bits: SHA-256 of each\n")
    hashes = {}
    for optimizer, title in (("adamw", "AdamW"), ("sgd", "SGD, momentum 0.9")):
        runs = [
            train_steps(workload, VARIANTS[name], group, optimizer, PARITY_STEPS)
            for name in (BASELINE, OURS)
        ]
        theirs, ours = (run.digest() for run in runs)
        same = group.all_agree(theirs == ours)
        say(group, f"  {title:<18} torch DDP {theirs[:32]}")
        say(group, f"  {'':<18} FastDDP   {ours[:32]}  {'identical' if same else 'DIFFERENT'}")
        hashes[optimizer] = {BASELINE: theirs, OURS: ours}
        if not same and group.world <= 2:
            apart = runs[1].distance(runs[0])
            raise CheckFailed(f"{OURS} with {title}: weights {apart:.1e} of the way from DDP's")
    return hashes


def measure_gpt(
    workload: Workload, variants: tuple[Variant, ...], settings: Settings, group: Group
) -> tuple[list[Timing], dict[str, tuple[float | None, int]]]:
    """Part 3: the table."""
    say(group, "\n3. What synchronisation costs on this GPT, AdamW's step included\n")
    timings, costs, shown = measure(workload, variants, group, settings), {}, []
    for variant in variants:
        Progress(group).show(f"  memory and operators of {variant.name}")
        memory = gradient_memory(workload, variant, group)
        costs[variant.name] = memory, dispatched_ops(workload, variant, group)
        shown.append(times(memory))
    Progress(group).clear()
    say(group, table(timings, {"memory": shown, "ops": [str(ops) for _, ops in costs.values()]}))
    say(group, "\n  exposed: step less no_sync's in the same round;")
    say(group, "  memory: of gradients and buckets, per byte of gradients; ops: dispatched on the")
    say(group, "  CPU per step; ±: half the range between the quartiles of the rounds")
    return timings, costs


def run(args: argparse.Namespace, group: Group) -> int:
    corpus, variants = data.load(), select(SHOWN).variants
    say(group, "fastsync demo: data-parallel training with FastDDP, next to torch's DDP")
    say(group, f"  {describe(environment(group))}")
    size = (len(corpus.train) + len(corpus.validation)) / 1e6
    say(group, f"  data: {corpus.files} files of Python's standard library, {size:.1f} MB")
    train_gpt(corpus, QUICK_STEPS if args.quick else STEPS, group)
    workload = gpt_workload(corpus)
    check_parity(workload, group)
    measure_gpt(workload, variants, QUICKLY if args.quick else MEASURED, group)
    return 0


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for terminals without ± in their encoding
    quick = argument("--quick", "less training, fewer rounds", action="store_true")
    raise SystemExit(run_example("demo", __doc__, run, quick))
