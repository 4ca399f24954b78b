"""fastsync: gradient synchronisation for PyTorch data-parallel training.

`FastDDP` replaces `torch.nn.parallel.DistributedDataParallel`::

    model = fastsync.FastDDP(model)
"""

from fastsync._build import BuildError
from fastsync._build import source_dir as include_dir
from fastsync.codec import Codec, PowerSGD, TopK, Wire, register_codec
from fastsync.config import TimelinePolicy
from fastsync.consensus import RankMismatchError
from fastsync.ddp import FastDDP
from fastsync.leaving import guard_exit
from fastsync.plugin import load_codec
from fastsync.stats import BucketTiming, SyncStats, log_to_tensorboard

__all__ = [
    "BucketTiming",
    "BuildError",
    "Codec",
    "FastDDP",
    "PowerSGD",
    "RankMismatchError",
    "SyncStats",
    "TimelinePolicy",
    "TopK",
    "Wire",
    "__version__",
    "include_dir",
    "load_codec",
    "log_to_tensorboard",
    "register_codec",
]
__version__ = "0.1.0"

guard_exit()
