"""Tests under mpirun are skipped where there is no MPI, except in CI, which installs one."""

import os

import pytest

from tests.mpi import jobs


@pytest.fixture(autouse=True, scope="session")
def mpi():
    why = jobs.missing()
    if why and os.environ.get("FASTSYNC_STRICT") == "1":
        pytest.fail(f"CI needs MPI, but {why}")
    if why:
        pytest.skip(why)
