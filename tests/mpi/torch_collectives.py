"""torch's own tests of collectives, over MPI.

    mpirun -n 4 python -m tests.mpi.torch_collectives

They are those of torch.testing._internal.distributed.distributed_test, which torch runs with Gloo:
all that are about collectives, groups and messages, and need no GPU. Each rank runs each test, as
torch does with its MPI backend. The last line counts them.
"""

import os
import re
import sys
import tempfile
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

COLLECTIVES = re.compile(
    r"test_(get_rank|destroy|new_subgroups|average_parameters|periodic|3_level|send_recv"
    r"|isend|irecv|broadcast|reduce|all_reduce|scatter|gather|all_gather|all_to_all|barrier"
    r"|batch_isend_irecv|sparse_all_reduce|coalescing|DistributedSampler|get_future|post_local)"
)
ELSEWHERE = re.compile(r"nccl|cuda|profiler|hierarchical_model_averager|with_hierarchical_sgd")
# Not of this backend, with the reason.
LEFT_OUT = {
    "test_sparse_all_reduce_sum": "fastsync_mpi carries dense tensors",
    "test_barrier_timeout_global": "makes the default group again, with a store of its own",
    "test_batch_isend_irecv_mixed_backend_err": "makes a group of NCCL",
    "test_batch_isend_irecv_op_err": "needs a GPU",
    "test_coalescing_manager": "of NCCL's coalescing",
    "test_coalescing_manager_async": "of NCCL's coalescing",
}


def suite():
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test as upstream

    class Collectives(TestCase, upstream.DistributedTest._DistTestBase):
        @property
        def rank(self):
            return dist.get_rank()

        @property
        def world_size(self):
            return dist.get_world_size()

        def _barrier(self, *_, **__):
            dist.barrier()

    return Collectives


def shared_folder():
    """Create the folder of rank 0 in which upstream's ranks leave files for each other."""
    path = [tempfile.mkdtemp(prefix="fastsync-mpi-")]
    dist.broadcast_object_list(path)
    for name in ("barrier", "test_dir", "init_dir"):
        Path(path[0], name).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = path[0]


def names_of(suite):
    names = unittest.TestLoader().getTestCaseNames(suite)
    return [n for n in names if COLLECTIVES.match(n) and not ELSEWHERE.search(n)]


def outcome(test):
    """'passed', why it was skipped, or a traceback."""
    try:
        test.setUp()
        getattr(test, test._testMethodName)()
        test.tearDown()
    except (unittest.SkipTest, SystemExit) as skipped:
        return f"skipped: {skipped}"
    except BaseException:
        return traceback.format_exc()
    return "passed"


def main():
    os.environ["BACKEND"] = "gloo"  # whose tests they are
    import fastsync.mpi

    torch.set_num_threads(1)
    dist.init_process_group(fastsync.mpi.NAME, timeout=timedelta(seconds=60))
    results = dist.new_group(backend="gloo")
    shared_folder()
    os.environ["WORLD_SIZE"] = "8"  # tests of groups of some ranks want so many, and use four
    collectives = suite()
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    for name in names_of(collectives):
        if name in LEFT_OUT or not wanted.search(name):
            continue
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, outcome(collectives(name)), group=results)
        passed = all(text == "passed" for text in found)
        skipped = any(text.startswith("skipped") for text in found)
        kind = "passed" if passed else "skipped" if skipped else "failed"
        counts[kind] += 1
        if dist.get_rank() == 0 and kind != "passed":
            print(name, kind, *dict.fromkeys(found), sep="\n  ", flush=True)
    if dist.get_rank() == 0:
        print(f"{len(LEFT_OUT)} left out,", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    dist.destroy_process_group()
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
