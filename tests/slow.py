"""Which tests `make test` leaves to `make test-all`, so that it stays within a few minutes.

`slow.txt` lists them, by id; they are marked `slow`. Runs of tests note with `--seconds-to FILE`
what each has taken, as those of `.ci/run` do, and `python -m tests.slow SECONDS FILES` chooses the
list anew: the dearest tests, until the others take no longer than SECONDS together.

* Each test function keeps its cheapest case as long as that suffices; each file its cheapest test.
* What takes less than CHEAP is never left out: without it nothing would be won, but a check lost.
* What fixtures of a module take counts in equal parts for the tests that use them, because fewer
  tests have less to set up, and the first one does not work for itself alone.
* A test that is marked in its code is slow whatever it takes.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
HEADER = "# Left to `make test-all`; written by python -m tests.slow, see there\n"
CHEAP = 0.05  # seconds


def read():
    """The ids of the slow tests."""
    lines = LIST.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def write(names):
    LIST.write_text(HEADER + "".join(f"{name}\n" for name in sorted(names)))


def function_of(name):
    return name.partition("[")[0]


def file_of(name):
    return name.partition("::")[0]


def choose(seconds, budget):
    """The tests to leave out.

    Args:
        seconds: what each test takes, by its id.
        budget: seconds that the others may take together.
    """
    kept, total = dict(seconds), sum(seconds.values())
    dearest = [name for name in sorted(kept, key=kept.get, reverse=True) if kept[name] >= CHEAP]
    for group_of in (function_of, file_of):
        left = Counter(group_of(name) for name in kept)
        for name in dearest:
            if total <= budget:
                return set(seconds) - set(kept)
            if name in kept and left[group_of(name)] > 1:
                left[group_of(name)] -= 1
                total -= kept.pop(name)
    return set(seconds) - set(kept)


class Clock:
    """A plugin that notes in a file what each test of a run takes."""

    def __init__(self, path):
        self.path = path
        self.fixtures = {}  # those of each test
        self.own = defaultdict(float)
        self.shared = defaultdict(float)  # by file and fixtures

    def pytest_collection_finish(self, session):
        listed = read()
        for item in session.items:
            if item.nodeid in listed or not item.get_closest_marker("slow"):
                self.fixtures[item.nodeid] = (file_of(item.nodeid), *sorted(item.fixturenames))

    def pytest_runtest_logreport(self, report):
        fixtures = self.fixtures.get(report.nodeid)
        if fixtures and report.when == "setup":
            self.shared[fixtures] += report.duration
        elif fixtures:
            self.own[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        users = Counter(self.fixtures[name] for name in self.own)
        parts = {fixtures: self.shared[fixtures] / count for fixtures, count in users.items()}
        seconds = {n: round(t + parts[self.fixtures[n]], 4) for n, t in self.own.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(seconds, indent=0, sort_keys=True))


def main():
    parser = argparse.ArgumentParser("tests.slow", description="chooses tests/slow.txt anew")
    parser.add_argument("budget", type=float, help="seconds that the tests not listed may take")
    parser.add_argument("files", type=Path, nargs="+", help="written by --seconds-to")
    args = parser.parse_args()
    seconds = {}
    for path in args.files:
        seconds |= json.loads(path.read_text())
    left_out = choose(seconds, args.budget)
    write(left_out)
    rest = sum(t for name, t in seconds.items() if name not in left_out)
    print(f"{LIST.name}: {len(left_out)} of {len(seconds)} tests; the others take {rest:.0f} s")


if __name__ == "__main__":
    main()
