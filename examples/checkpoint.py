"""Checkpoints of a data-parallel training: written by rank 0, read by rank 0, complete for all.

Weights, buffers and the optimizer's state are the same on every rank, so rank 0's are everyone's;
random states are not, so they are gathered. Reading needs no shared file system: rank 0 reads the
file and broadcasts its bytes.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Trained:
    """The objects that a checkpoint restores, with `state_dict` and `load_state_dict`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device

    def parts(self) -> dict[str, Any]:
        return {"module": self.module, "optimizer": self.optimizer, "scaler": self.scaler}


def save(path: Path, trained: Trained, steps: int, settings: dict[str, Any]) -> None:
    """Collective. Rank 0 writes; a crash while it does leaves the former file as it was."""
    random = _random_states(trained.device)
    if dist.get_rank() != 0:
        return
    states = {name: part.state_dict() for name, part in trained.parts().items()}
    settings = settings | {"ranks": dist.get_world_size()}
    content = {"steps": steps, "settings": settings, "random": random, **states}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def resume(path: Path, trained: Trained, settings: dict[str, Any]) -> int:
    """Collective. Restores what `save` wrote and returns its step; 0 where rank 0 has no file.

    Raises:
        ValueError: the checkpoint is of another number of ranks or other settings; on every rank.
    """
    file = [path.read_bytes() if dist.get_rank() == 0 and path.exists() else b""]
    dist.broadcast_object_list(file, 0, device=trained.device)
    if not file[0]:
        return 0
    content = torch.load(io.BytesIO(file[0]), map_location="cpu", weights_only=True)
    for name, value in {"ranks": dist.get_world_size(), **settings}.items():
        if content["settings"].get(name) != value:
            raise ValueError(
                f"the checkpoint was made with {name} = {content['settings'].get(name)}, but this "
                f"run has {value}; continue with the same settings, or without --resume"
            )
    for name, part in trained.parts().items():
        part.load_state_dict(content[name])
    _set_random_state(content["random"][dist.get_rank()], trained.device)
    return int(content["steps"])


def _random_states(device: torch.device) -> Tensor:
    """uint8 [ranks, bytes]: the state of every rank's generators, the device's after the CPU's."""
    mine = torch.get_rng_state()
    if device.type == "cuda":
        mine = torch.cat([mine, torch.cuda.get_rng_state(device)])
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine.numpy())
    return torch.stack([torch.from_numpy(state) for state in everyones])


def _set_random_state(state: Tensor, device: torch.device) -> None:
    of_cpu = len(torch.get_rng_state())
    torch.set_rng_state(state[:of_cpu].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[of_cpu:].clone(), device)
