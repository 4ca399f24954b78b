"""Process groups of one's own, for tests."""

import torch.distributed as dist

__all__ = ["OverGloo"]


class OverGloo(dist.ProcessGroup):
    """Gloo under another name, less what a subclass leaves out; it gathers."""

    called = "over-gloo"

    def __init__(self, rank, world, inner):
        super().__init__(rank, world)
        self._inner = inner

    def getBackendName(self):
        return self.called

    def setGroupName(self, name):
        self._name = name

    def getGroupName(self):
        return self._name

    def allgather(self, *args):
        return self._inner.allgather(*args)
