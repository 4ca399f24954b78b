"""Tensors without memory, and every operation on them seen. Not imported by the package itself:
torch needs a while to load it, and only the planner uses it."""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensorMode", "TorchDispatchMode", "tree_leaves"]
