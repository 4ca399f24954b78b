"""Whether options go together; what does not is an error that names the option."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from dataclasses import replace

from fastsync.planner.strategy import named

__all__ = ["check_ranks", "wants_own_step", "wants_time"]

_NEEDS_BATCH = "--model needs --batch, the sizes of one rank's input: --batch 8x1024"
_OF_STEPS = ("model", "batch", "loss", "dtype", "optimizer")
_BY_FORMULA = ("adam", "adamw")
_OF_TIME = (
    *("device", "memory", "efficiency", "intra", "inter", "latency", "backend", "profile"),
    *("jitter", "straggler", "accumulate", "wires", "bucket_cap_mb", "no_checkpointing"),
)
_OF_MODELS = (
    *("batch", "loss", "dtype", "optimizer", "master_weights", "accumulate", "strategies"),
    *("wires", "bucket_cap_mb", "no_checkpointing", "memory", "efficiency"),
    *("jitter", "straggler"),
)


def wants_own_step(args: argparse.Namespace, given: Collection[str]) -> bool:
    """Whether --measure is to measure a step of a model, too.

    Raises:
        ValueError: it is not said of which batch, or something is asked for that nothing measures.
    """
    every = {*given} - {"measure", "quiet", *_OF_STEPS}
    _refuse(sorted(every), given, "with --measure")
    if args.model and not args.batch:
        raise ValueError(_NEEDS_BATCH)
    if not args.model:
        _refuse(_OF_STEPS, given, "with --measure alone; add --model")
    return args.model is not None


def wants_time(args: argparse.Namespace, given: Collection[str]) -> bool:
    """Whether there is enough for more than the formulas.

    Args:
        given: options that are not as they are by default.

    Raises:
        ValueError: it is not said what is trained, too much is said about it, or something that
            changes nothing.
    """
    asked = [n for n in ("model", "params", "run") if getattr(args, n) is not None]
    if len(asked) != 1 and asked != ["model", "run"]:
        raise ValueError(
            "say what is trained: exactly one of --model, --params and --from, or --model and the "
            "--from of its run"
        )
    if args.model and not args.batch:
        raise ValueError(_NEEDS_BATCH)
    if args.run and not args.model:
        _refuse(_OF_MODELS, given, "with --from alone; add --model")
    if args.params:
        _check_params(args, given)
    return not args.params or args.batch is not None


def _check_params(args: argparse.Namespace, given: Collection[str]) -> None:
    if args.batch and len(args.batch) != 2:
        raise ValueError("--batch with --params is samples x tokens: --batch 8x1024")
    _refuse(("loss",), given, "with --params; plan your own model with --model")
    if args.optimizer.lower() not in _BY_FORMULA:
        raise ValueError(
            f"--optimizer {args.optimizer} says nothing with --params, where states are Adam's by "
            "formula; plan your own model with --model"
        )
    if args.batch:
        return
    if args.html:
        raise ValueError("--html shows times, too: add --batch SAMPLESxTOKENS to --params")
    _refuse(_OF_TIME, given, "with --params alone; add --batch SAMPLESxTOKENS")


def _refuse(options: Iterable[str], given: Collection[str], why: str) -> None:
    for name in options:
        if name in given:
            option = "from" if name == "run" else name.replace("_", "-")
            raise ValueError(f"--{option} says nothing {why}")


def check_ranks(args: argparse.Namespace, timed: bool) -> None:
    """Whether ranks fill nodes, and strategies have enough of them.

    Raises:
        ValueError: they do not, or no strategy can have one of the wires.
    """
    several = (n for n in args.gpus if n > args.per_node and n % args.per_node)
    wrong = next(several, None) if timed else None
    if wrong:
        raise ValueError(
            f"--gpus: {wrong} do not fill nodes of {args.per_node}; choose a multiple of --per-node"
        )
    for wire in args.wires:
        tried = (replace(named(kind, 1, 1), wire=wire) for kind in args.strategies)
        if not any(strategy.possible for strategy in tried):
            stages = ", ".join(args.strategies)
            raise ValueError(f"--wires: {wire!r} goes with none of --strategies {stages}; add 0")
    compared = args.gpus[:1] if timed else args.gpus
    if set(args.strategies) == {"hsdp"} and min(compared) <= args.per_node:
        raise ValueError(
            f"--strategies hsdp shares inside a node and repeats between nodes, but --gpus "
            f"{min(compared)} with --per-node {args.per_node} make one node"
        )
