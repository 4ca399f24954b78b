"""fastsync: gradient synchronisation for PyTorch data-parallel training.

`FastDDP` replaces `torch.nn.parallel.DistributedDataParallel`::

    model = fastsync.FastDDP(model)
"""

import importlib
from types import ModuleType

from fastsync.build.recipe import BuildError
from fastsync.build.recipe import source_dir as include_dir
from fastsync.ddp import FastDDP
from fastsync.engine.pace import SlowRanks
from fastsync.front.elastic import Membership
from fastsync.front.nonfinite import NonFiniteGradientError
from fastsync.front.replicas import ReplicaError
from fastsync.front.seat import meet_alone_where_started_later
from fastsync.plan.arguments import Faults, Zero
from fastsync.plan.elastic import ElasticPolicy
from fastsync.plan.preemption import PreemptionPolicy
from fastsync.plan.replicas import ReplicaPolicy
from fastsync.ranks.consensus import RankMismatchError
from fastsync.ranks.faults import SyncFault
from fastsync.ranks.leaving import guard_exit
from fastsync.ranks.preemption import outlive_preemption
from fastsync.replacing import replace_where_asked
from fastsync.sharded import ShardedDDP as ShardedDDP
from fastsync.timeline.policy import TimelinePolicy
from fastsync.timeline.stats import BucketTiming, SyncStats, log_to_tensorboard
from fastsync.timeline.units import UnitTiming
from fastsync.units.module import FSDPModule, register_fsdp_forward_method
from fastsync.units.sharding import fully_shard
from fastsync.wire.formats import Codec, TopK, Wire, register_codec
from fastsync.wire.plugins import load_codec

__all__ = [
    "BucketTiming",
    "BuildError",
    "Codec",
    "ElasticPolicy",
    "FSDPModule",
    "FastDDP",
    "Faults",
    "Membership",
    "NonFiniteGradientError",
    "PreemptionPolicy",
    "RankMismatchError",
    "ReplicaError",
    "ReplicaPolicy",
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
    "log_to_tensorboard",
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
