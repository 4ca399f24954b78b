"""The built-in wire formats in torch's own operations: what fused kernels are timed against."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsync.wire.formats import Format

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
LARGEST = {"int8": 127, "int4": 7}

# Codes, then scales of blocks where the format has them.
Code = tuple[Tensor, ...]


def encode(format: Format, flat: Tensor) -> Code:
    """The code of `flat`, fp32 [whole blocks]."""
    if format.scale_bytes == 0:
        return (flat.to(DTYPES[format.name], copy=True),)
    blocks = flat.view(-1, format.block)
    peaks = blocks.abs().amax(1, keepdim=True)
    if format.name in DTYPES:
        dtype = DTYPES[format.name]
        exponents = torch.frexp(peaks / torch.finfo(dtype).max).exponent
        return torch.ldexp(blocks, -exponents).to(dtype), exponents.to(torch.int8)
    largest = LARGEST[format.name]
    steps = (peaks / largest).to(torch.bfloat16)
    codes = (blocks / steps).round_().clamp_(-largest, largest).to(torch.int8)
    if format.bits == 4:
        codes = codes[:, 0::2].bitwise_and(15).bitwise_or_(codes[:, 1::2] << 4)
    return codes, steps


def decode(format: Format, code: Code) -> Tensor:
    """What a code stands for, fp32, flat."""
    codes = code[0]
    if format.scale_bytes == 0:
        return codes.float()
    scales = code[1]
    if format.name in DTYPES:
        return torch.ldexp(codes.float(), scales.int()).view(-1)
    if format.bits == 4:
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=2).flatten(1)
    return (codes * scales.float()).view(-1)


def reduce(format: Format, codes: list[Code]) -> Code:
    """The code of the sum of what several codes stand for."""
    total = decode(format, codes[0])
    for code in codes[1:]:
        total = total + decode(format, code)
    return encode(format, total)
