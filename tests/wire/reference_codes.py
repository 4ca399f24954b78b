"""Reference for the values of a parameter that travels as a code, by torch's operations."""

import math
from itertools import pairwise

import torch

from fastsync import Codec

__all__ = ["ROUND", "GatheredHalves", "Halves", "by_shares", "chunked_topk"]


def _blocks(values, size):
    """Return values as [blocks, size], in the order of memory, filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)


def _poisoned(rounded, blocks):
    """Flat; NaN where a block holds NaN, or what is too large for a scale."""
    largest = blocks.abs().amax(1, keepdim=True)
    return torch.where(largest < 2.0**127, rounded, torch.nan).flatten()


def _int8(values):
    """Multiples of the smallest bfloat16 of which 127 reach the block's largest magnitude."""
    blocks = _blocks(values, 128)
    step = blocks.abs().amax(1, keepdim=True).double() / 127
    narrow = step.float()
    narrow = torch.where(narrow.double() < step, narrow.nextafter(torch.tensor(torch.inf)), narrow)
    bits = narrow.view(torch.int32)
    up = torch.where(bits & 0xFFFF != 0, (bits | 0xFFFF) + 1, bits)
    scale = up.view(torch.float32).clamp_min(2.0**-126)
    return _poisoned((blocks * (1 / scale)).round().clamp(-127, 127) * scale, blocks)


def _float(dtype):
    """Numbers over the smallest power of two that keeps the block's largest one finite."""

    def rounded(values):
        blocks = _blocks(values, 256)
        largest = blocks.abs().amax(1, keepdim=True).double() / torch.finfo(dtype).max
        exponent = largest.clamp_min(2.0**-126).log2().ceil()
        power = torch.exp2(exponent).float()
        return _poisoned((blocks / power).to(dtype).float() * power, blocks)

    return rounded


_FLAT = {
    "bf16": lambda values: values.bfloat16().float(),
    "fp16": _float(torch.float16),
    "fp8_e4m3": _float(torch.float8_e4m3fn),
    "int8": _int8,
}


def _whole(flat_rule):
    def rounded(master):
        """A parameter of any memory format, in fp32."""
        result = master.detach().clone()
        memory = result.as_strided((result.numel(),), (1,))
        memory.copy_(flat_rule(memory.clone())[: memory.numel()])
        return result

    return rounded


ROUND = {name: _whole(rule) for name, rule in _FLAT.items()}


def by_shares(tensor, wire, world, dim=0):
    """In fp32, what a tensor is whose shares along `dim` have been coded, each by itself."""
    each = -(-tensor.shape[dim] // world)
    ends = [min(tensor.shape[dim], each * rank) for rank in range(world + 1)]
    parts = [tensor.narrow(dim, a, b - a).contiguous().float() for a, b in pairwise(ends)]
    return torch.cat([ROUND[wire](part) for part in parts], dim)


def chunked_topk(tensor, kept):
    """Return what `kept` elements of each chunk of a finite tensor arrive as, one by one."""
    values, result = tensor.flatten(), torch.zeros(tensor.numel())
    for begin in range(0, values.numel(), 4096):
        chunk = values[begin : begin + 4096].tolist()
        order = sorted(range(len(chunk)), key=lambda i: -abs(chunk[i]))
        largest = torch.tensor(abs(chunk[order[0]]))
        quarter, half, most = (largest * part for part in (0.25, 0.5, 0.75))
        for i in order[:kept]:
            if abs(chunk[i]) >= quarter:
                size = largest if abs(chunk[i]) >= most else half
                result[begin + i] = math.copysign(size, chunk[i])
    return result.view_as(tensor)


class Halves(Codec):
    """A user's codec: float16 by torch. Off by 2^-11 of a number, or by 2^-25."""

    name = "halves"

    def coded_bytes(self, numel):
        return 2 * numel

    def encode(self, values, wire):
        wire.view(torch.float16).copy_(values)

    def decode(self, wire, values):
        values.copy_(wire.view(torch.float16))


class GatheredHalves(Halves):
    form = "gather"
    error_feedback = False
