"""Runs every fault at every place, in every way to synchronise, among 2, 3 and 4 ranks.

    python -m tests.faults.fault_cells --json cells.json --seconds 250 --at-once 2

Adds to what FILE holds of earlier runs, so that it can be run in slices. The exit code is 1 if a
cell has ended in another way than it should: if a rank hangs, an error does not name the rank or
the bucket, or ranks have unequal weights after a step.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock

from docs.tables import write_table
from tests.faults import fault_table
from tests.faults.fault_endings import (
    WARN_AFTER,
    Ending,
    check_place,
    check_state,
    check_text,
    name_of,
)
from tests.faults.fault_script import STALLED
from tests.faults.machine_faults import cell_of
from tests.helpers.scripts import run_jobs

AT_A_TIME = 6  # jobs of one process
LIMIT = 600  # seconds for them
CHECKS = {"rank": check_text, "place": check_place, "weights": check_state}
HEADINGS = {"pieces": "between collectives"}


def waits(ending):
    """Seconds of each survivor from the fault to its error, or from when it came to wait."""
    struck = ending.struck()
    errors = [seen for seen in ending.others if seen and "error" in seen]
    if struck is None:
        return []
    return [min(s["at"] - struck, s.get("seconds") or s["at"] - struck) for s in errors]


def outcome(job, ending):
    """Return what a cell has shown."""
    found = {"job": job, "wrong": {}}
    for name, check in CHECKS.items():
        try:
            check(*((ending,) if check is check_state else (job, ending)))
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            found["wrong"][name] = f"{type(error).__name__}: {error}"
    found["seconds"] = [round(seconds, 4) for seconds in waits(ending)]
    found["warned"] = [seconds[0] for seconds in ending.warnings() if seconds]
    found["steps"] = [len(weights) for weights in ending.weights()]
    return found


class Cells:
    """Cells that have been run, by name, in a file."""

    def __init__(self, path):
        self.path, self.lock = path, Lock()
        self.found = json.loads(path.read_text()) if path.exists() else {}

    def run(self, jobs, until):
        """Run the cells that have not been run, a few at a time."""
        if time.monotonic() > until or not jobs:
            return
        outside = [job for job in jobs if job[0] in fault_table.OUTSIDE]
        for job in outside:
            self._keep({name_of(job): cell_of(list(job))})
        inside = [job for job in jobs if job not in outside]
        if inside:
            with tempfile.TemporaryDirectory() as folder:
                ((_, stuck),) = run_jobs(
                    "tests.faults.fault_script", folder, inside, LIMIT, at_once=1
                )
                names = {name_of(job): job for job in inside}
                self._keep({n: outcome(j, Ending(folder, j, stuck[n])) for n, j in names.items()})

    def _keep(self, seen):
        with self.lock:
            self.found |= seen
            self.path.write_text(json.dumps(self.found, indent=0))
            for name, cell in seen.items():
                print(f"{len(self.found):4} {name}: {describe(cell)}", flush=True)


def describe(cell):
    for what, text in cell["wrong"].items():
        return f"WRONG {what}: {text}"
    return " ".join(f"{seconds:.2f} s" for seconds in cell["seconds"]) or "no error"


def spread(seconds):
    return f"{median(seconds):.2f} / {max(seconds):.2f}" if seconds else "-"


def rows(cells):
    """Yield the rows of the table: a fault by place, with its warnings if there are any."""
    for fault, names in fault_table.FAULTS.items():
        mine = [cell for cell in cells if cell["job"][0] in names]
        if not mine:
            continue
        failed = sum(bool(cell["wrong"]) for cell in mine)
        yield [fault, str(len(mine)), str(failed), *by_place(mine, "seconds")]
        if any(cell["warned"] for cell in mine) and fault in ("SIGSTOP", "sleep", "cut link"):
            yield [f"{fault}: the warning", "", "", *by_place(mine, "warned")]


def by_place(cells, what):
    for place in fault_table.PLACES:
        here = [cell for cell in cells if fault_table.in_matrix(cell["job"][1]) == place]
        yield spread([seconds for cell in here for seconds in cell[what]])


def report(cells, path):
    possible = len(list(fault_table.jobs()))
    failed = sum(bool(cell["wrong"]) for cell in cells)
    title = (
        "seconds from a fault to the error on every survivor, or from when it came to wait, median "
        f"/ worst; for a stall also to its warning, whose threshold is {WARN_AFTER:g} s, and the "
        f"group's timeout {STALLED:g} s. {len(cells)} of {possible} cells, {failed} of them "
        "failed; -: no such error"
    )
    headings = [f"{HEADINGS.get(place, place)}, s" for place in fault_table.PLACES]
    about = {"ranks": "2 to 4", "threads_per_rank": 1}
    write_table(path, title, ["fault", "cells", "failed", *headings], rows(cells), **about)


def parser():
    made = argparse.ArgumentParser(
        "tests.faults.fault_cells", description=__doc__.partition("\n")[0]
    )
    made.add_argument("--json", type=Path, required=True, help="adds the cells to this file")
    made.add_argument("--only", help="faults, with commas in between: kill,stop,...")
    made.add_argument("--at-once", type=int, default=1, help="trainings at the same time")
    made.add_argument("--seconds", type=float, default=1e9, help="begin no more after this long")
    made.add_argument("--again", action="store_true", help="those that have failed, too")
    made.add_argument("--report", type=Path, help="write a table for python -m bench report")
    return made


def main():
    args = parser().parse_args()
    until, cells = time.monotonic() + args.seconds, Cells(args.json)
    chosen = args.only.split(",") if args.only else None
    done = {n for n, cell in cells.found.items() if not (args.again and cell["wrong"])}
    left = [j for j in fault_table.jobs() if name_of(j) not in done]
    left = [job for job in left if chosen is None or job[0] in chosen]
    shares = [left[first : first + AT_A_TIME] for first in range(0, len(left), AT_A_TIME)]
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda share: cells.run(share, until), shares))
    failed = [name for name, cell in cells.found.items() if cell["wrong"]]
    print(f"{len(cells.found)} cells have been run, {len(failed)} failed: {', '.join(failed)}")
    if args.report:
        report(list(cells.found.values()), args.report)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
