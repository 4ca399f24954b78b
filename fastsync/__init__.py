"""fastsync: gradient synchronisation for PyTorch data-parallel training.

`FastDDP` replaces `torch.nn.parallel.DistributedDataParallel`::

    model = fastsync.FastDDP(model)
"""

from fastsync._build import BuildError
from fastsync.codec import Codec, Wire, register_codec
from fastsync.config import TimelinePolicy
from fastsync.consensus import RankMismatchError
from fastsync.ddp import FastDDP
from fastsync.stats import BucketTiming, SyncStats, log_to_tensorboard

__all__ = [
    "BucketTiming",
    "BuildError",
    "Codec",
    "FastDDP",
    "RankMismatchError",
    "SyncStats",
    "TimelinePolicy",
    "Wire",
    "__version__",
    "log_to_tensorboard",
    "register_codec",
]
__version__ = "0.1.0"
