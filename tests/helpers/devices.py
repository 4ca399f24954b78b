"""The devices that tests run on, and ranks that share the GPUs of this machine."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from fastsync.testing import run_ranks

NO_GPU = "torch sees no GPU here"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
TRANSPORTS = ["nccl", "gloo"]
# Of ranks, each of which makes a CUDA context and NCCL's connections first. A hang must not cost
# more than bench/gpu gives a command that says nothing.
CUDA_TIMEOUT = 80.0


def placed(tensor, device):
    """A copy of a tensor with its strides, place in its storage and lazy bits; or itself."""
    if tensor is None or device == "cpu":
        return tensor
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // tensor.element_size()
    whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (numel,), (1,)).to(device)
    copy = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    copy = copy.conj() if tensor.is_conj() else copy
    return torch._neg_view(copy) if tensor.is_neg() else copy


def run_cuda_ranks(fn, world, *args, transport="nccl", timeout=CUDA_TIMEOUT):
    """`run_ranks` with a GPU for each rank, or a shared one where there are too few."""
    return run_ranks(_on_gpu, world, transport, fn, args, timeout=timeout)


def share_gpus(rank, world):
    """Chooses this rank's GPU, before it makes a process group."""
    # NCCL refuses two ranks of one host on one GPU. Ranks of different hosts use sockets.
    if world > torch.cuda.device_count():
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_IB_DISABLE": "1"}
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _on_gpu(rank, world, transport, fn, args):
    share_gpus(rank, world)
    store = PrefixStore("cuda", distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(
        transport, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=1)
    )
    result = fn(rank, world, *args)
    torch.cuda.synchronize()
    return result
