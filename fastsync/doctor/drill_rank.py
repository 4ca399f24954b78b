"""One rank of a drill: trains a small model, until a fault or an error ends it.

Started by `fastsync.doctor.drill`, which reads the lines of JSON on its standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync._torch import PrefixStore, TCPStore

__all__ = ["EXIT_CODE", "Order"]

EXIT_CODE = 3
_STEPS, _AT = 30, 4
_WIDTH, _LAYERS, _BATCH = 64, 6, 4
_BEATS = 0.3  # seconds after which the others have heard where a rank is
_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """The task of a rank.

    Attributes:
        fault: what happens to it; empty for survivors.
        host, port, place: of the store, and a part of it that is the drill's.
        timeout: seconds of the process group.
    """

    fault: str
    rank: int
    world: int
    local_rank: int
    backend: str
    host: str
    port: int
    place: str
    timeout: float


class DrillError(RuntimeError):
    """The exception that a drill raises."""


def _say(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, "at": time.monotonic_ns(), **facts}), flush=True)


def _have(fault: str) -> None:
    time.sleep(_BEATS)
    _say("fault")
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
        self.step, self._fault = 0, fault
        layers[_LAYERS // 2].weight.register_hook(self._in_backward)

    def _in_backward(self, grad: torch.Tensor) -> None:
        if self._fault and self.step == _AT:
            _have(self._fault)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _train(order: Order) -> None:
    device = torch.device("cpu")
    if order.backend == "nccl":
        device = torch.device("cuda", order.local_rank)
        torch.cuda.set_device(device)
    store = PrefixStore(order.place, TCPStore(order.host, order.port, wait_for_workers=False))
    dist.init_process_group(
        order.backend,
        store=store,
        rank=order.rank,
        world_size=order.world,
        timeout=timedelta(seconds=order.timeout),
    )
    net = _Net(order.fault).to(device)
    model = fastsync.FastDDP(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for net.step in range(_STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(_BATCH, _WIDTH, device=device))
        torch.autograd.backward(loss)
        optimizer.step()
        float(loss)  # on a GPU, where the host would run ahead of the fault


def main() -> None:
    """Train; the process ends as its training does."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # ends with its parent
    torch.set_num_threads(1)
    try:
        _train(Order(**json.loads(sys.argv[1])))
    except Exception as error:
        facts: dict[str, object] = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, fastsync.SyncFault):
            facts |= {"ranks": error.ranks, "reason": error.reason}
        _say("error", **facts)
        raise
    _say("end")


if __name__ == "__main__":
    main()
