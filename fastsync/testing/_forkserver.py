"""Imported once by the server that `fastsync.testing` forks ranks from; never by anyone else.

Importing torch costs seconds, a fork of a process that has done it milliseconds. What is imported
here must start no thread and run no backward: autograd's threads do not survive a fork.
"""

import contextlib

import torch
import torch._dynamo  # the optimizers import it when the first one is made
import torch.distributed
import torch.utils.checkpoint

import fastsync
from fastsync.engine import core

torch.set_num_threads(1)
# A rank that needs the extension will say why it is not there.
with contextlib.suppress(fastsync.BuildError):
    core.load()
