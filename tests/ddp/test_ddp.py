"""FastDDP as an object: what it is, what it takes, what it tells."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from fastsync import FastDDP
from tests.helpers.models import build
from tests.helpers.teams import run_ranks


def test_it_takes_every_argument_of_ddp_in_the_same_order():
    theirs = list(inspect.signature(DDP.__init__).parameters)
    ours = list(inspect.signature(FastDDP.__init__).parameters)
    missing = [name for name in theirs if name not in ours]
    assert not missing
    shared = [name for name in ours if name in theirs]
    assert shared == theirs


def test_former_arguments_are_errors_that_say_what_to_use_instead():
    with pytest.raises(TypeError, match=r"no argument 'tune'; bucket sizes follow .*bucket_cap_mb"):
        FastDDP(nn.Linear(2, 2), tune=True)
    with pytest.raises(TypeError, match=r"no argument 'tone'$"):
        FastDDP(nn.Linear(2, 2), tone=True)


def describe(rank, world):
    model = FastDDP(build("conv"), bucket_cap_mb=0.001)
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    stats = model.sync_stats()
    names = [name for name, _ in model.named_parameters()]
    return isinstance(model, DDP), stats, names, model.training


def test_stats_and_names():
    for is_ddp, stats, names, training in run_ranks(describe, 2):
        assert is_ddp
        assert training
        assert all(name.startswith("module.") for name in names)
        assert stats["steps"] == 3
        assert stats["plans"] == 2
        assert stats["collectives"] >= 3 * len(stats["buckets"]) - 3
        assert stats["bytes"] > 0
        assert stats["exposed_seconds"] >= 0
        assert sum(stats["buckets"]) * 3 >= stats["bytes"] > 0


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.kind = kind

    def forward(self, *args, **kwargs):
        x = self.layer(kwargs.get("x", args[0] if args else None))
        return {"tuple": (x, None), "dict": {"out": [x]}, "tensor": x, "two": (x, x * 2)}[self.kind]


def first_tensor(output):
    while not isinstance(output, torch.Tensor):
        output = output["out"] if isinstance(output, dict) else output[0]
    return output


def call(rank, world):
    found = []
    for kind in ("tuple", "dict", "tensor", "two"):
        for by_name in (True, False):
            model = FastDDP(Returns(kind))
            x = torch.full((1, 2), float(rank))
            output = model(x=x) if by_name else model(x)
            first_tensor(output).sum().backward()
            found.append(model.module.layer.weight.grad[0, 0].item())
    return found


def test_inputs_and_outputs_of_all_kinds():
    assert run_ranks(call, 2) == [[0.5] * 8] * 2


def keep_differences(rank, world):
    torch.manual_seed(rank)
    model = FastDDP(nn.Linear(2, 2), init_sync=False)
    mine = model.module.weight.detach().clone()
    torch.manual_seed(rank)
    return torch.equal(mine, nn.Linear(2, 2).weight)


def test_init_sync_can_be_left_out():
    assert run_ranks(keep_differences, 2) == [True, True]


def use_mesh(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = FastDDP(nn.Linear(1, 1, bias=False), device_mesh=mesh)
    model(torch.full((1, 1), float(rank))).sum().backward()
    try:
        FastDDP(nn.Linear(1, 1), device_mesh=mesh, process_group=dist.group.WORLD)
    except RuntimeError as error:
        return model.module.weight.grad.item(), str(error)


def test_a_device_mesh():
    for value, text in run_ranks(use_mesh, 2):
        assert value == 0.5
        assert "both process_group and device_mesh" in text


def ignore_parameters(rank, world):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    model = FastDDP(module)
    torch.manual_seed(0)
    nn.init.ones_(module[0].weight)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
    bare = nn.Sequential(*[nn.Linear(2, n, bias=False) for n in (2, 1)])
    bare.load_state_dict(module.state_dict())
    bare(torch.full((1, 2), float(rank + 1))).sum().backward()
    return torch.equal(module[0].weight.grad, bare[0].weight.grad), module[1].weight.grad.tolist()


def test_ignored_parameters_stay_local():
    (local, one), (also, other) = run_ranks(ignore_parameters, 2)
    assert local
    assert also
    assert one == other


def run_no_sync(rank, world):
    """Nested, left by an exception, and around the forward only."""
    warnings.simplefilter("ignore")
    model = FastDDP(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), float(rank))
    values = []
    try:
        with model.no_sync():
            model(x).sum().backward()
            raise KeyError
    except KeyError:
        values.append(model.module.weight.grad.item())
    model(x).sum().backward()
    values.append(model.module.weight.grad.item())
    model.zero_grad()
    with model.no_sync():
        loss = model(x).sum()
    loss.backward()  # the forward decides, as in DDP
    values.append(model.module.weight.grad.item())
    return values, model.sync_stats()["collectives"]


def test_no_sync():
    for rank, (values, collectives) in enumerate(run_ranks(run_no_sync, 2)):
        assert values == [rank, 1.0, rank]
        assert collectives == 1
