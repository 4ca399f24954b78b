"""CPUOffloadPolicy on GPUs: what lies where, the weights of training without it, and the memory."""

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fastsync import fully_shard
from fastsync._torch import local_of
from tests.helpers.devices import needs_gpu, run_cuda_ranks

pytestmark = needs_gpu
# Norms and whole weights of what is on the CPU travel over Gloo.
TRANSPORT = "cpu:gloo,cuda:nccl"
WIDTH, BLOCKS, STEPS = 512, 6, 4
POLICIES = {"pinned": CPUOffloadPolicy(), "pageable": CPUOffloadPolicy(pin_memory=False)}
LOWER = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        x = x + self.codes.sum().to(x.dtype) / 100
        return x + self.down(torch.relu(self.up(x))) * self.scale.to(x.dtype)


def built(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 8)).to(dtype)
    for block in model[:-1]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, WIDTH, generator=generator)
    dtype = trained(model)[0].dtype
    model(inputs.to("cuda", dtype)).float().square().mean().backward()


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def gradients(model):
    return [local_of(p.grad).detach().cpu().clone() for p in trained(model)]


def adamw(params):
    return optim.AdamW(params, 1e-3)


def sgd(params):
    return optim.SGD(params, 0.1, momentum=0.9)


def train(model, rank, micro=1, optimizer=adamw):
    """Gradients of the first step, and the shares after the last one, on the CPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    optimizer = optimizer(trained(model))
    first = None
    for step in range(STEPS):
        for batch in range(micro):
            backward(model, rank, 10 * step + batch)
        first = first or gradients(model)
        nn.utils.clip_grad_norm_(trained(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return first, [local_of(p).detach().cpu().clone() for p in trained(model)]


def places(rank, world, policy):
    """Return where shares, gradients, states and buffers lie."""
    model = built(offload_policy=POLICIES[policy])
    optimizer = optim.AdamW(trained(model), 1e-3)
    backward(model, rank, 0)
    optimizer.step()
    params = list(model.parameters())
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    found = {
        t.to_local().device.type for t in [*params, *(p.grad for p in trained(model)), *states]
    }
    meshes = {p.device_mesh.device_type for p in params}
    pinned = {local_of(p).is_pinned() for p in params if local_of(p).numel()}
    return found, meshes, pinned, {b.device.type for b in model.buffers()}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_lies_where(policy):
    for found in run_cuda_ranks(places, 2, policy, transport=TRANSPORT):
        assert found == ({"cpu"}, {"cuda"}, {policy == "pinned"}, {"cuda"})


RUNS = {
    "": (1, {}),
    "accumulated": (3, {}),
    "kept": (1, {"reshard_after_forward": False}),
    "lower": (2, {"mp_policy": LOWER}),
    "lower shares": (2, {"dtype": torch.bfloat16}),
    "codes": (1, {"wire": "int8", "parameter_wire": "int8"}),
}


def beside_the_device(rank, world, run):
    """Return what comes out without a policy, and with each."""
    micro, options = RUNS[run]
    # What a CPU rounds otherwise may become another code, or another number of 16 bits, of which
    # AdamW would make a whole step.
    optimizer = sgd if run in ("codes", "lower") else adamw
    models = (built(offload_policy=each, **options) for each in (None, *POLICIES.values()))
    return [train(model, rank, micro, optimizer) for model in models]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("run", RUNS)
def test_weights_are_those_without_a_policy(run, world):
    """First gradients to the bit, unless a CPU adds them up in 16 bits; then AdamW is the CPU's."""
    limit = 2e-2 if run == "lower shares" else 1e-4
    for results in run_cuda_ranks(beside_the_device, world, run, transport=TRANSPORT):
        (wanted, weights), *others = results
        for found, theirs in others:
            pairs = list(zip(found, wanted, strict=True))
            if run == "lower shares":
                assert all(torch.allclose(a, b, rtol=2e-2, atol=1e-3) for a, b in pairs)
            else:
                assert all(torch.equal(a, b) for a, b in pairs)
            for one, other in zip(theirs, weights, strict=True):
                assert torch.allclose(one, other, rtol=limit, atol=limit)


def late(model):
    """Put the device far behind the host, and spoil memory that is freed too early."""

    def behind(*_):
        torch.cuda._sleep(5_000_000)
        for numel in (8, WIDTH, 2 * WIDTH * WIDTH, 4 * WIDTH * WIDTH):
            torch.full((numel,), torch.nan, device="cuda")

    for block in model:
        block.register_forward_hook(behind)
        block.register_full_backward_hook(behind)
    return model


def on_a_late_device(rank, world, micro):
    policy = POLICIES["pinned"]
    plain = train(built(offload_policy=policy), rank, micro)
    behind = train(late(built(offload_policy=policy)), rank, micro)
    return [*plain[0], *plain[1]], [*behind[0], *behind[1]]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_host_waits_for_a_device_that_is_late(micro, world):
    for plain, behind in run_cuda_ranks(on_a_late_device, world, micro, transport=TRANSPORT):
        assert all(torch.equal(a, b) for a, b in zip(behind, plain, strict=True))


def peaks(rank, world):
    """Bytes of the device at most in a step, without and with a policy; and those of the shares."""
    found = []
    for policy in (None, CPUOffloadPolicy()):
        model = built(offload_policy=policy)
        optimizer = optim.AdamW(trained(model), 1e-3)
        for step in range(3):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated())
        shares = sum(local_of(p).nbytes for p in model.parameters())
        del model, optimizer
    return (*found, shares)


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_takes_less_of_the_device(world):
    """Shares, their gradients and AdamW's states are four times the shares."""
    for plain, offloaded, shares in run_cuda_ranks(peaks, world, transport=TRANSPORT):
        assert offloaded + 2 * shares < plain


def moved(rank, world):
    """Return what a step says after the module was moved to the device, and the gradients after it
    came back.
    """
    model = built(offload_policy=CPUOffloadPolicy())
    backward(model, rank, 0)
    wanted = gradients(model)
    model.zero_grad()
    model.cuda()
    try:
        backward(model, rank, 0)
        said = ""
    except RuntimeError as error:
        said = str(error)
    model.cpu()
    for block in model[:-1]:
        block.scale = block.scale.cuda()
    backward(model, rank, 0)
    return said, wanted, gradients(model)


def test_a_module_that_was_moved_is_an_error_until_it_comes_back():
    for said, wanted, found in run_cuda_ranks(moved, 2, transport=TRANSPORT):
        assert "materialized on CPU" in said and "'6.weight'" in said  # of the first to be gathered
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
