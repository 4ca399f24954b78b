"""Trains a small GPT with fastsync's FastDDP on two ranks and holds it against torch's DDP.

  1. trains a byte-level GPT on the Python standard library's source;
  2. trains the same steps with torch DDP and FastDDP and compares every bit of the weights;
  3. measures step time, exposed synchronisation, gradient memory and dispatched operators.

The ranks use NCCL where every one has a GPU, else Gloo on the CPU. Needs about a minute on two
cores, with --long two. Exits with 1 if the weights differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import data, gpt, plot, train  # noqa: E402
from examples.common.check import train as train_steps  # noqa: E402
from examples.common.costs import dispatched_ops, gradient_memory  # noqa: E402
from examples.common.machine import describe, write_json  # noqa: E402
from examples.common.ranks import CheckFailed, Group, UsageError, guarded, launch  # noqa: E402
from examples.common.rounds import Settings, Timing, document, measure, model_record  # noqa: E402
from examples.common.text import Progress, Spread, milliseconds, ratio, render  # noqa: E402
from examples.common.training import Workload  # noqa: E402
from examples.common.variants import BASELINE, FLOOR, OURS, VARIANTS, Selection, Variant, select  # noqa: E402  # noqa: E402

PARITY_STEPS = 20
MEASURED_SECONDS = 8.0  # that the rounds of part 3 may take, unless --long
PROMPT = b"def "
SAMPLE_BYTES = 300
TEMPERATURE = 0.6
BUSY = 0.2  # of the median between the quartiles of a step without any synchronisation


@dataclass(frozen=True)
class Plan:
    """How much the demo does."""

    steps: int
    settings: Settings

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        if args.quick:
            steps, settings = 60, Settings(rounds=3, steps=2, optimizer="adamw")
        elif args.long:
            steps, settings = 800, Settings(rounds=12, steps=3, optimizer="adamw")
        else:
            settings = Settings(rounds=12, steps=3, seconds=MEASURED_SECONDS, optimizer="adamw")
            steps = 240
        return cls(args.steps or steps, settings)


def duration(args: argparse.Namespace) -> str:
    """How long the three parts take on two quiet cores, in words."""
    if args.quick:
        return "half a minute on two cores"
    return "about two minutes on two cores" if args.long else "about a minute on two cores"


def gpt_workload(corpus: data.Corpus) -> Workload:
    """The demo's GPT as a workload for the bench harness."""
    length = gpt.Shape().length
    return Workload(
        "gpt",
        gpt.build,
        lambda rank, step: corpus.batch(rank, step, train.BATCH, length),
        lambda loss: loss,
    )


def say(group: Group, text: str = "") -> None:
    if group.is_main:
        print(text, flush=True)


def train_gpt(corpus: data.Corpus, plan: Plan, group: Group, out: Path) -> dict[str, Any]:
    """Part 1: trains with FastDDP, shows the curve and a sample of what was learned."""
    module = gpt.build().to(group.device)
    count = sum(p.numel() for p in module.parameters())
    length = module.shape.length
    say(group, f"\n1. Training a GPT of {count / 1e6:.2f} M parameters with FastDDP")
    say(group, f"   {train.BATCH} x {length} bytes per rank and step, AdamW\n")
    model = VARIANTS[OURS].wrap(module, group.device)
    history = train.train(model, corpus, length, plan.steps, group)
    if group.is_main:
        with torch.no_grad():
            held_out = module(corpus.validation_batch(64, length).to(group.device)).item()
        show_training(module, history, held_out, out)
    return asdict(history)


def show_training(module: gpt.GPT, history: train.History, held_out: float, out: Path) -> None:
    print(f"\n{plot.text_curve(history.losses, history.steps[-1])}")
    points = plot.smooth(history.losses, train.REPORTS)
    print(f"\n  loss {points[0]:.3f} (first tenth) -> {points[-1]:.3f}; held out {held_out:.3f}")
    if plot.save_picture(history.steps, history.losses, out / "demo_loss.png"):
        print(f"  picture: {out.name}/demo_loss.png")
    text = PROMPT + module.generate(PROMPT, SAMPLE_BYTES, TEMPERATURE)
    print(f"\n  It continues {PROMPT.decode()!r}, sampled at temperature {TEMPERATURE}:")
    for line in text.decode("ascii", errors="replace").splitlines():
        print(f"    | {line if line.isprintable() else ascii(line)}"[:100].rstrip())


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


@dataclass(frozen=True)
class Costs:
    """What one variant costs besides time; memory is None where it cannot be measured."""

    memory: float | None
    ops: int


def measure_costs(
    workload: Workload, variants: tuple[Variant, ...], group: Group
) -> dict[str, Costs]:
    progress, costs = Progress(group), {}
    for variant in variants:
        progress.show(f"  memory and operators of {variant.name}")
        memory = gradient_memory(workload, variant, group)
        costs[variant.name] = Costs(memory, dispatched_ops(workload, variant, group))
    progress.clear()
    return costs


def cost_table(timings: list[Timing], costs: dict[str, Costs]) -> str:
    headers = ("variant", "step ms", "±", "ratio", "±", "exposed ms", "±", "memory", "ops")
    rows = []
    for timing in timings:
        cost = costs[timing.variant]
        memory = "n/a" if cost.memory is None else f"{cost.memory:.2f}x"
        cells = (*milliseconds(timing.step), *ratio(timing.ratio), *milliseconds(timing.exposed))
        rows.append((timing.variant, *cells, memory, str(cost.ops), timing.check))
    return render((*headers, "weights"), rows)


def compare_rounds(ours: Timing, theirs: Timing) -> str:
    """In words, how `ours` did against `theirs`, with the middle half of the rounds."""
    spread = Spread.of([a / b for a, b in zip(ours.rounds, theirs.rounds, strict=True)])
    verdict = "no difference beyond noise"
    if spread.q3 < 1:
        verdict = "faster"
    elif spread.q1 > 1:
        verdict = "SLOWER"
    return (
        f"{spread.median:.2f} of {theirs.variant}'s step "
        f"(middle half of rounds {spread.q1:.2f} to {spread.q3:.2f}): {verdict}"
    )


def reading(timings: list[Timing]) -> list[str]:
    """The table in words, computed from its numbers."""
    by_name = {timing.variant: timing for timing in timings}
    lossless = [
        timing
        for timing in timings
        if timing.variant not in (FLOOR, OURS) and not VARIANTS[timing.variant].lossy
    ]
    best = min(lossless, key=lambda timing: timing.ratio.median)
    rivals = [by_name[BASELINE]] + ([best] if best.variant != BASELINE else [])
    lines = [f"FastDDP takes {compare_rounds(by_name[OURS], rival)}" for rival in rivals]
    floor = by_name[FLOOR].step
    if floor.width > BUSY * floor.median:
        share = floor.width / floor.median
        lines.append(f"This machine was busy: no_sync itself spread by {share:.0%}; measure again")
    return lines


def measure_gpt(
    workload: Workload, selection: Selection, plan: Plan, group: Group
) -> tuple[list[Timing], dict[str, Costs]]:
    """Part 3: the table."""
    say(group, "\n3. What synchronisation costs on this GPT, AdamW's step included\n")
    timings = measure(workload, selection.variants, group, plan.settings)
    costs = measure_costs(workload, selection.variants, group)
    say(group, cost_table(timings, costs))
    for name, reason in selection.skipped.items():
        say(group, f"  skipped {name}: {reason}")
    say(group, "\n  ratio: to default DDP; exposed: step less no_sync's in the same round;")
    say(group, "  memory: of gradients and buckets, per byte of gradients; ops: dispatched on the")
    say(group, "  CPU per step; ±: half the range between the quartiles of the rounds\n")
    for line in reading(timings):
        say(group, f"  {line}")
    return timings, costs


def run(args: argparse.Namespace, group: Group) -> int:
    reason = VARIANTS[OURS].unavailable()
    if reason is not None:
        raise UsageError(reason)
    plan, selection, corpus = Plan.of(args), select("all"), data.load()
    result = document(group, plan.settings, selection.skipped)
    if group.is_main:
        args.out.mkdir(parents=True, exist_ok=True)
    say(group, "fastsync demo: data-parallel training with FastDDP, next to torch's DDP")
    say(group, f"  {describe(result['environment'])}")
    say(group, f"  {duration(args)}: 1. training, 2. the same bits as DDP, 3. what it costs")
    size = (len(corpus.train) + len(corpus.validation)) / 1e6
    say(group, f"  data: {corpus.files} files of Python's standard library, {size:.1f} MB")
    workload = gpt_workload(corpus)
    result["training"] = train_gpt(corpus, plan, group, args.out)
    result["parity"] = check_parity(workload, group)
    timings, costs = measure_gpt(workload, selection, plan, group)
    result["models"]["gpt"] = model_record(workload, timings)
    result["costs"] = {name: asdict(cost) for name, cost in costs.items()}
    if group.is_main:
        write_json(result, args.out / "demo.json")
        print(f"\nAll numbers: {args.out.name}/demo.json")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--steps",
        type=int,
        help="training steps of part 1 (default: 240; 60 with --quick, 800 with --long)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="less training, fewer rounds")
    length.add_argument("--long", action="store_true", help="more training, more rounds")
    add("--ranks", type=int, default=2, help="processes to start; torchrun's wins (default: 2)")
    add("--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)")
    add("--out", type=Path, default=ROOT / "out", help="folder for results (default: out)")
    args = parser.parse_args()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for terminals without ± in their encoding
    return guarded(lambda: launch(lambda group: run(args, group), args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
