"""One rank of a drill: trains a small model, until a fault or an error ends it.

Started by `fastsync.doctor.drill`, which reads the line of JSON on its standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

import fastsync
from fastsync._torch import PrefixStore

DRILL_TIMEOUT = 6.0  # seconds of the process group
EXIT_CODE = 3
_STEPS, _AT = 30, 4
_WIDTH, _LAYERS, _BATCH = 64, 6, 4
_BEATS = 0.3  # seconds after which the others have heard where a rank is
_START = timedelta(seconds=60)
_PDEATHSIG = 1


class DrillError(RuntimeError):
    """The exception that a drill raises."""


def _have(fault: str) -> None:
    time.sleep(_BEATS)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exit":
        os._exit(EXIT_CODE)
    else:
        raise DrillError("a drill")


class _Net(nn.Module):
    """A model with a fault in the middle of a backward, when some buckets have been sent."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        self.layers = nn.Sequential(*layers)
        self.step, self.begun, self._fault = 0, time.monotonic(), fault
        layers[_LAYERS // 2].weight.register_hook(self._in_backward)

    def _in_backward(self, grad: torch.Tensor) -> None:
        if self._fault and self.step == _AT:
            _have(self._fault)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _train(net: _Net, backend: str) -> None:
    """Train until something ends it; the steps begin at the same time on all ranks."""
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    store, rank, world = next(rendezvous("env://"))
    store = PrefixStore("doctor/drill", store)
    store.set(f"here {rank}", "")  # the group's timeout is too short for a busy machine's imports
    store.wait([f"here {other}" for other in range(world)], _START)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=DRILL_TIMEOUT),
    )
    model = fastsync.FastDDP(net.to(device), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for net.step in range(_STEPS):
        net.begun = time.monotonic()
        optimizer.zero_grad()
        loss = model(torch.ones(_BATCH, _WIDTH, device=device))
        torch.autograd.backward(loss)
        optimizer.step()
        float(loss)  # on a GPU, where the host would run ahead of the fault


def main() -> None:
    """Train; the process ends as its training does."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # ends with its parent
    torch.set_num_threads(1)
    fault, backend = sys.argv[1:]
    net = _Net(fault)
    try:
        _train(net, backend)
    except Exception as error:
        seconds = max(0.0, time.monotonic() - net.begun - _BEATS)
        facts = {"error": type(error).__name__, "text": str(error), "seconds": seconds}
        if isinstance(error, fastsync.SyncFault):
            facts |= {"ranks": error.ranks, "reason": error.reason}
        print(json.dumps(facts), flush=True)
        raise


if __name__ == "__main__":
    main()
