"""Weights that the demo compares: `python -m tests.mpi.demo_hashes 2`, or under mpirun."""

import sys

from examples import data, demo
from examples.common.ranks import Group, launch


def main(group: Group) -> int:
    demo.check_parity(demo.gpt_workload(data.load()), group)
    return 0


if __name__ == "__main__":
    raise SystemExit(launch(main, int(sys.argv[1])))
