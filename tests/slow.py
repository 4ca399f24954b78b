"""Which tests `make test` leaves to `make test-all`, so that it stays within a few minutes.

`python -m pytest -m '' --choose-slow SECONDS` runs every test and rewrites `slow.txt`, whose tests
are marked `slow`: the dearest ones, until the others take no longer than SECONDS. Each test
function keeps its cheapest case as long as that suffices; each file keeps its cheapest test.
"""

from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
HEADER = "# Left to `make test-all`; written by pytest -m '' --choose-slow, see tests/slow.py\n"


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
    kept = dict(seconds)
    for group_of in (function_of, file_of):
        left = defaultdict(int)
        for name in kept:
            left[group_of(name)] += 1
        for name in sorted(kept, key=kept.get, reverse=True):
            if sum(kept.values()) <= budget:
                return set(seconds) - set(kept)
            if left[group_of(name)] > 1:
                left[group_of(name)] -= 1
                del kept[name]
    return set(seconds) - set(kept)
