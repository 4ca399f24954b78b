"""What a device computes and holds: from the makers' data sheets, dense, without sparsity.

Efficiencies are what well-tuned training reaches, and stated wherever a plan rests on them; a
recorded timeline or a measured profile replaces them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

__all__ = ["DEVICES", "Device", "device_named", "kind_of_gpu"]

_TERA = 1e12
_GPU = re.compile(r"\b(V100|A100|H100|H200|B200)\b", re.IGNORECASE)
_HALF = 60e9  # bytes; an A100 with fewer is the one of 40 GB


@dataclass(frozen=True)
class Device:
    """A kind of accelerator.

    Attributes:
        narrow: floating-point operations per second in 16 bits; `wide`: in 32 (TF32 where it has).
        bandwidth: of its memory, bytes per second.
        memory: bytes.
        framework: bytes of it that context, libraries and the backend's channels hold. Users have
            reported 0.3 to 0.5 GB for a process with PyTorch (pytorch/pytorch#107667, #81257), and
            for NCCL 0.7 GB on four A100 (NVIDIA/nccl#964), 1.1 GB on eight H100
            (NVIDIA/nccl#1685).
        efficiency: share of the peak that matrix products reach.
        streaming: share of the bandwidth that other operators reach.
        overhead: seconds that an operator takes at least, as its launch does.
        sending: seconds of computing lost per byte that is sent beside it, where both need the
            same processor; `launching`: per collective; `handling`: per tensor that is packed or
            unpacked for one.
        coding: bytes of gradients per second that a pass of coding reads; 0: what operators reach.
    """

    name: str
    narrow: float
    wide: float
    bandwidth: float
    memory: float
    framework: float = 1.5e9
    efficiency: float = 0.5
    streaming: float = 0.8
    overhead: float = 0.0
    sending: float = 0.0
    launching: float = 0.0
    handling: float = 0.0
    coding: float = 0.0

    @property
    def code_rate(self) -> float:
        """Bytes of gradients per second of a pass of coding."""
        return self.coding or self.bandwidth * self.streaming

    @property
    def on_cpu(self) -> bool:
        """Whether fastsync treats it as a CPU."""
        return self.name == "cpu"

    def peak(self, dtype: torch.dtype) -> float:
        """Operations per second on numbers of this dtype."""
        return self.narrow if dtype.itemsize == 2 else self.wide

    def seconds(self, work: float, moved: float, dtype: torch.dtype) -> float:
        """What an operator takes: its arithmetic, its traffic or its launch, the longest."""
        arithmetic = work / (self.peak(dtype) * self.efficiency)
        traffic = moved / (self.bandwidth * self.streaming)
        return max(arithmetic, traffic, self.overhead)


DEVICES = {
    "v100": Device("v100", 125 * _TERA, 15.7 * _TERA, 0.9 * _TERA, 32e9),
    "a100": Device("a100", 312 * _TERA, 156 * _TERA, 2.039 * _TERA, 80e9),
    "a100-40": Device("a100-40", 312 * _TERA, 156 * _TERA, 1.555 * _TERA, 40e9),
    "h100": Device("h100", 989 * _TERA, 494 * _TERA, 3.35 * _TERA, 80e9),
    "h200": Device("h200", 989 * _TERA, 494 * _TERA, 4.8 * _TERA, 141e9),
    "b200": Device("b200", 2250 * _TERA, 1100 * _TERA, 8.0 * _TERA, 180e9),
    "cpu": Device("cpu", 3e10, 3e10, 1e10, 16e9, framework=0.0),
}


def device_named(name: str) -> Device:
    """One of `DEVICES`, in any case.

    Raises:
        ValueError: there is none of that name.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise ValueError(f"unknown --device {name!r}; choose one of {', '.join(DEVICES)}")
    return replace(device)


def kind_of_gpu(name: str, memory: float) -> str | None:
    """Which of `DEVICES` a GPU is, by the name that its driver gives it; None: none of them."""
    found = _GPU.search(name)
    if found is None:
        return None
    kind = found[1].lower()
    return "a100-40" if kind == "a100" and memory < _HALF else kind
