"""fastsync: gradient synchronisation for PyTorch data-parallel training.

`FastDDP` replaces `torch.nn.parallel.DistributedDataParallel`::

    model = fastsync.FastDDP(model)
"""

from fastsync._build import BuildError
from fastsync.codec import Codec, Wire, register_codec
from fastsync.consensus import RankMismatchError
from fastsync.ddp import FastDDP

__all__ = [
    "BuildError",
    "Codec",
    "FastDDP",
    "RankMismatchError",
    "Wire",
    "__version__",
    "register_codec",
]
__version__ = "0.1.0"
