"""Correctness before speed: each variant must train the weights that default DDP trains.

[Note: How equal is equal]
Two ranks add two numbers, in which there is no order to choose, and halve them, which is exact: a
variant that keeps fp32 must give the same bits as DDP. From three ranks on the order of the sum is
the backend's choice, so weights may differ by rounding. Variants that round gradients on their way
are held to a distance: |w - w_ddp| / |w_ddp - w_start|, the part of training that went elsewhere.

[Note: Noise]
Some of torch's CUDA kernels add in an order of chance, whatever one asks for. So on a GPU default
DDP trains twice: where it does not repeat its own bits, distances up to NOISE_FACTOR times its own
are accepted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.common.ranks import CheckFailed, Group
from examples.common.training import Workload, make_batches, make_lane
from examples.common.variants import BASELINE, FLOOR, VARIANTS, Variant

NOISE_FACTOR = 10.0  # see [Note: Noise]
ROUNDING = 1e-3  # accepted distance of fp32 variants on three and more ranks
CHUNK = 1 << 22  # bytes that a checksum takes at a time

State = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """The parameters and buffers of a module before and after training, on its device."""

    start: State
    end: State
    parameters: frozenset[str]

    def digest(self) -> str:
        """Return the SHA-256 of all parameters and buffers, in hexadecimal."""
        digest = hashlib.sha256()
        for name in sorted(self.end):
            digest.update(name.encode())
            digest.update(_bits(self.end[name]).cpu().numpy().tobytes())
        return digest.hexdigest()

    def checksum(self) -> int:
        """Return 48 bits that depend on every parameter; buffers may differ from rank to rank."""
        digest = hashlib.sha256()
        for name in sorted(self.parameters):
            digest.update(f"{name}{_sums_of_bits(self.end[name])}".encode())
        return int(digest.hexdigest()[:12], 16)

    def same_bits(self, other: Trained) -> bool:
        """Return whether all parameters and buffers agree, NaN with NaN."""
        return self.end.keys() == other.end.keys() and all(
            torch.equal(_bits(value), _bits(other.end[name])) for name, value in self.end.items()
        )

    def distance(self, other: Trained) -> float:
        """Return how far apart the parameters are, relative to the way from the start."""
        gap = sum((self.end[n] - other.end[n]).double().square().sum() for n in self.parameters)
        way = sum((other.end[n] - other.start[n]).double().square().sum() for n in self.parameters)
        return math.sqrt(float(gap) / float(way))


def _snapshot(module: torch.nn.Module) -> State:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _sums_of_bits(tensor: Tensor) -> list[int]:
    """Return two sums over a tensor's bytes, of which one depends on their order.

    They are computed on the tensor's device: to copy a large model to the host takes longer.
    """
    plain = ordered = 0
    for chunk in _bits(tensor).split(CHUNK):
        wide = chunk.to(torch.int64)
        places = torch.arange(1, len(wide) + 1, device=wide.device)
        plain += int(wide.sum())
        ordered = (ordered * 31 + int((wide * places).sum())) % (1 << 61)
    return [plain, ordered]


@contextmanager
def repeatable(group: Group) -> Iterator[None]:
    """Makes kernels deterministic where they are not so anyway, as on GPUs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or group.device.type == "cuda", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train(
    workload: Workload, variant: Variant, group: Group, optimizer: str, steps: int
) -> Trained:
    """Train `workload` from its first weights, and return its weights before and after."""
    with repeatable(group):
        batches = make_batches(workload, group, steps)
        lane = make_lane(workload, variant, group, optimizer, batches)
        start = _snapshot(lane.module)
        lane.steps(steps)
        names = frozenset(name for name, _ in lane.module.named_parameters())
        return Trained(start, _snapshot(lane.module), names)


def judge(
    variant: Variant, trained: Trained, expected: Trained, group: Group, noise: float = 0.0
) -> str:
    """Compare the weights of one variant with those of default DDP.

    Args:
        noise: the distance between two trainings of default DDP.

    Returns:
        The verdict in words, for a table.

    Raises:
        CheckFailed: on every rank, if it fails on any.
    """
    identical = group.all_agree(trained.same_bits(expected))
    if variant.name == FLOOR:
        if identical and group.world > 1:
            raise CheckFailed(f"{FLOOR}: expects weights unlike {BASELINE}'s: the check is blind")
        return "not synchronised"
    number = trained.checksum()  # exact in fp64
    if group.most(number) != -group.most(-number):
        raise CheckFailed(f"{variant.name}: ranks ended with different weights")
    if identical:
        return "bit-identical"
    distance = trained.distance(expected)
    exact = not variant.lossy and group.world <= 2 and noise == 0.0
    limit = 0.0 if exact else variant.tolerance if variant.lossy else ROUNDING
    limit += NOISE_FACTOR * noise
    if exact and not group.most(distance):
        raise CheckFailed(f"{variant.name}: parameters are {BASELINE}'s but buffers are not")
    near = group.all_agree(distance <= limit)
    if not near and variant.lossy and variant.wire is None:
        return f"off by {distance:.1e}"  # torch's own error; shown, not fixed here
    if not near or exact:
        raise CheckFailed(
            f"{variant.name}: weights are {distance:.2e} of the way from {BASELINE}'s, "
            f"expects {'the same bits' if exact else f'at most {limit:.0e}'}"
        )
    return f"within {distance:.1e}"


def check_variants(
    workload: Workload,
    variants: tuple[Variant, ...],
    group: Group,
    steps: int,
    show: Callable[[str], None] = lambda name: None,
) -> dict[str, str]:
    """Train `steps` steps of SGD with momentum under each variant.

    Args:
        show: called with the name of each variant before it trains.

    Returns:
        The verdict of each variant by name.

    Raises:
        CheckFailed: a variant trained other weights than default DDP; the message names it.
    """
    show(BASELINE)
    expected = train(workload, VARIANTS[BASELINE], group, "sgd", steps)
    if not all(value.isfinite().all() for value in expected.end.values()):
        raise CheckFailed(f"{BASELINE}: weights of {workload.name} are not finite")
    noise = 0.0
    if group.device.type == "cuda":  # see [Note: Noise]
        show(f"{BASELINE} again")
        again = train(workload, VARIANTS[BASELINE], group, "sgd", steps)
        noise = group.most(0.0 if again.same_bits(expected) else again.distance(expected))
    verdicts = {}
    for variant in variants:
        trained = expected
        if variant.name != BASELINE:
            show(variant.name)
            trained = train(workload, variant, group, "sgd", steps)
        verdicts[variant.name] = judge(variant, trained, expected, group, noise)
    return verdicts
