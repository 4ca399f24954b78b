"""Whether models learn as well if updated parameters travel in fewer bits: losses of whole trainings.

    python -m bench parameters --json out/parameters.json

The trainings of `bench curves`, with zero=1 and each format of `parameter_wire`. The loss that
counts is that of the rounded weights, which every rank computes with. Exit code 1 where it is more
than 1 % above that of exact parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.commands.curves import NUDGED, REFERENCE, STEPS, TASKS, Curve, check, nudged, train
from bench.measure import benchmark as b
from examples.common.ranks import Group, argument, whole
from fastsync.plan.policy import PARAMETER_WIRES
from fastsync.wire.formats import FORMATS

_NUMEL = 1 << 20  # of which the table shows the bytes


def trained(task: str, steps: int, group: Group) -> dict[str, Curve]:
    """The trainings by name of a format; REFERENCE has exact parameters, NUDGED other ones."""
    learned = TASKS[task]()
    found = {}
    for name in (REFERENCE, NUDGED, *PARAMETER_WIRES):
        begun = nudged(learned) if name == NUDGED else learned
        wire = name if name in PARAMETER_WIRES else None
        found[name] = train(begun, {"zero": 1, "parameter_wire": wire}, steps, group)
        if group.is_main:
            print(f"{task} in {name}: loss {found[name].final:.4f} after {steps} steps", flush=True)
    return found


@b.benchmark(
    argument("--tasks", "to learn", "all", type=b.names("task", TASKS)),
    argument("--steps", "of every training; far fewer say little", STEPS, type=whole),
    b.RANKS,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Bytes of an element, the final losses, and how far they are from those of exact weights."""
    found = {name: trained(name, args.steps, group) for name in args.tasks}
    rows = []
    for name in (REFERENCE, NUDGED, *PARAMETER_WIRES):
        size = FORMATS[name if name in FORMATS else REFERENCE].coded_bytes(_NUMEL) / _NUMEL
        cells = [f"`{name}`", f"{size:.3f}"]
        for curves in found.values():
            above = curves[name].excess(curves[REFERENCE])
            cells += [f"{curves[name].final:.4f}", f"{above:+.2%}"]
        rows.append(cells)
    losses = (head for task in found for head in (f"{task}: loss", "against fp32"))
    headers = ["parameters", "bytes per element", *losses]
    title = "loss of held-out data at the end of training with rounded parameters"
    yield b.table(f"{title} on {group.world} ranks", headers, rows)
    check(found)
