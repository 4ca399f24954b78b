"""Ranks that share parameters, and ranks that replicate them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fastsync._torch import default_group, is_gloo
from fastsync.fsdp.cpu_offload import HOME, Offload


class RefusedError(ValueError, AssertionError):
    """Bad input that FSDP2 refuses with an AssertionError: scripts may catch it as that."""


@dataclass(frozen=True)
class Place:
    """This rank's place in a mesh.

    Attributes:
        mesh: of one dimension, or of two: ranks of a row share, rows replicate each other (HSDP).
        group: the ranks that share.
        replicas: ranks that have the same share; None where no other rank has.
        rank: this rank, in `group`.
        world: number of ranks that share.
        device: that units compute on.
        offload: policy that keeps shares on the CPU; None: they are on `device`.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    rank: int
    world: int
    device: torch.device
    offload: Offload | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh, policy: OffloadPolicy | None = None) -> Place:
        """
        Raises:
            ValueError: the mesh has neither one nor two dimensions, or two without names.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise RefusedError(
                "Please init the 2D mesh for HSDP with mesh_dim_names specified: fully_shard "
                "replicates along its first dimension and shards along its second"
            )
        group = mesh.get_group(mesh.ndim - 1)
        replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        device = _device_of(mesh)
        offload = Offload.of(policy, device)
        return cls(mesh, group, replicas, group.rank(), group.size(), device, offload)

    @property
    def home(self) -> torch.device:
        """Return the device of the shares."""
        return self.device if self.offload is None else HOME

    @property
    def ranks(self) -> int:
        """Return the number of ranks that gradients are averaged over."""
        return self.world * (1 if self.replicas is None else self.replicas.size())

    def everybody(self) -> dist.ProcessGroup:
        """Return all ranks of the mesh, if they have a group; otherwise those that share."""
        if self.replicas is not None and default_group().size() == self.mesh.size():
            return default_group()
        return self.group

    @property
    def by_messages(self) -> bool:
        """Return whether shares can travel as messages of any size."""
        return self.device.type == "cpu" and is_gloo(self.group)

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the placements of a parameter that is cut along `dim`."""
        return (Shard(dim),) if self.replicas is None else (Replicate(), Shard(dim))


def default_mesh() -> DeviceMesh:
    """Return a mesh of all ranks in one dimension, on the accelerator if there is one."""
    size = default_group().size()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh("cpu" if found is None else found.type, (size,))


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return all ranks of a mesh."""
    return [int(rank) for rank in mesh.mesh.flatten()]


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
