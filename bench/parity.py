"""Whether whole trainings end in the same weights as under default DDP.

    python -m bench.parity --steps 50

Every model is trained with every optimizer, once under default DDP and once under each variant, on
the same data. Exit code 1 where a variant breaks its promise: the same bits for fp32 on two ranks,
rounding on more, and a stated distance for narrower wires.
"""

from __future__ import annotations

import argparse

from bench import cli
from bench.check import judge, train
from bench.launch import Group, launch
from bench.record import add_json_argument, publish
from bench.training import OPTIMIZERS
from bench.wrappers import BASELINE, VARIANTS, select


def verdicts(model: str, optimizer: str, args: argparse.Namespace, group: Group) -> list[str]:
    """What became of each variant on one model."""
    workload = cli.workload(model, args)
    expected = train(workload, VARIANTS[BASELINE], group, optimizer, args.steps)
    found = []
    for variant in select(args.wrappers).variants:
        if group.is_main:
            print(f"{model}, {optimizer}: {args.steps} steps under {variant.name} ...", flush=True)
        trained = train(workload, variant, group, optimizer, args.steps)
        found.append(judge(variant, trained, expected, group))
    return found


def run(args: argparse.Namespace, group: Group) -> int:
    optimizers = args.optimizers.split(",")
    columns = {
        (model, optimizer): verdicts(model, optimizer, args, group)
        for model in cli.models(args.models)
        for optimizer in optimizers
    }
    names = [variant.name for variant in select(args.wrappers).variants]
    rows = [(n, *(found[i] for found in columns.values())) for i, n in enumerate(names)]
    headers = ("variant", *(f"{model}, {optimizer}" for model, optimizer in columns))
    title = f"weights after {args.steps} steps on {group.world} ranks, against default DDP"
    publish(title, headers, rows, group, args)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_arguments(parser, models="small,transformer,wide,conv")
    parser.set_defaults(wrappers="fastsync")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: 50)")
    known = ",".join(OPTIMIZERS)
    parser.add_argument("--optimizers", default=known, help=f"of {known} (default: all)")
    add_json_argument(parser)
    args = parser.parse_args()
    return cli.guarded(lambda: launch(lambda group: run(args, group), args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
