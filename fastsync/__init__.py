"""fastsync: gradient synchronisation for PyTorch data-parallel training.

`FastDDP` replaces `torch.nn.parallel.DistributedDataParallel`::

    model = fastsync.FastDDP(model)
"""

import importlib
from types import ModuleType

from fastsync._build.recipe import BuildError
from fastsync._build.recipe import source_dir as include_dir
from fastsync.config.arguments import Faults, Zero
from fastsync.config.fault_policies import ElasticPolicy, PreemptionPolicy, ReplicaPolicy
from fastsync.config.param_groups import Group
from fastsync.config.sync_modes import Delayed, DiLoCo, LocalSGD
from fastsync.ddp.elastic_training import Membership
from fastsync.ddp.fast_ddp import FastDDP
from fastsync.ddp.nonfinite import NonFiniteGradientError
from fastsync.ddp.rank_identity import meet_alone_where_started_later
from fastsync.ddp.replica_check import ReplicaError
from fastsync.ddp.sharded import ShardedDDP as ShardedDDP
from fastsync.ddp.shares import Shares, ShareSampler
from fastsync.faults.consensus import RankMismatchError
from fastsync.faults.exit_hooks import guard_exit
from fastsync.faults.preemption_vote import outlive_preemption
from fastsync.faults.sync_fault import SyncFault
from fastsync.fsdp.fsdp_module import FSDPModule, register_fsdp_forward_method
from fastsync.fsdp.fully_shard import fully_shard
from fastsync.reducer.step_timing import SlowRanks
from fastsync.replacing import replace_where_asked
from fastsync.timeline.data import UnitTiming
from fastsync.timeline.recorder import TimelinePolicy
from fastsync.timeline.stats import BucketTiming, SyncStats
from fastsync.wire.formats import ChunkedTopK, Codec, TopK, Wire, register_codec
from fastsync.wire.plugins import load_codec

__all__ = [
    "BucketTiming",
    "BuildError",
    "ChunkedTopK",
    "Codec",
    "Delayed",
    "DiLoCo",
    "ElasticPolicy",
    "FSDPModule",
    "FastDDP",
    "Faults",
    "Group",
    "LocalSGD",
    "Membership",
    "NonFiniteGradientError",
    "PreemptionPolicy",
    "RankMismatchError",
    "ReplicaError",
    "ReplicaPolicy",
    "ShareSampler",
    "Shares",
    "SlowRanks",
    "SyncFault",
    "SyncStats",
    "TimelinePolicy",
    "TopK",
    "UnitTiming",
    "Wire",
    "Zero",
    "__version__",
    "fully_shard",
    "include_dir",
    "load_codec",
    "outlive_preemption",
    "register_codec",
    "register_fsdp_forward_method",
]
__version__ = "0.1.0"

guard_exit()
replace_where_asked()
meet_alone_where_started_later()


def __getattr__(name: str) -> ModuleType:
    """Modules that few programs need are imported when they are asked for."""
    if name == "integrations":
        return importlib.import_module("fastsync.integrations")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
