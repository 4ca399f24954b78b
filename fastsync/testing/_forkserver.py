"""Imported once by the server that `fastsync.testing` forks ranks from; never elsewhere.

Importing torch costs seconds, a fork of a process that has done it milliseconds. What is imported
here must start no thread and run no backward: autograd's threads do not survive a fork.
"""

import contextlib
import gc

import torch
import torch._dynamo  # the optimizers import it when the first one is made
import torch._dynamo.backends.distributed  # as does wrapping a module
import torch.distributed
import torch.distributed.checkpoint.state_dict
import torch.utils.checkpoint

import fastsync
from fastsync.reducer import core

torch.set_num_threads(1)
# A rank that needs the extension will say why it is not there.
with contextlib.suppress(fastsync.BuildError):
    core.load()

# Ranks do not search what they all have: a search would write to that memory, and so copy it.
gc.collect()
gc.freeze()
