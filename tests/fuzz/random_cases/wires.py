"""Wire formats to draw, and how far each may be off, as `docs/wire.md` states it."""

import dataclasses

from fastsync import ChunkedTopK, TopK, Wire
from fastsync.wire.formats import FORMATS
from tests.wire.reference_codes import GatheredHalves, Halves

__all__ = ["BLOCK_BOUNDS", "EXACT_WIRES", "draw_wire", "tolerance"]

# Coded, but without loss: the rule holds bit for bit.
EXACT_WIRES = (
    Wire("fp32", form="two_shot"),
    Wire("fp32", form="two_shot", piece_bytes=100),
    Wire("fp32", form="gather", piece_bytes=400),
)
# Error of one code, as a share of the number, and of the largest number in its block.
BLOCK_BOUNDS = {
    "fp16": (2**-11, 2**-39),
    "fp8_e4m3": (2**-4, 2**-17),
    "fp8_e5m2": (2**-3, 2**-31),
    "int8": (0.0, 1 / 252),
    "int4": (0.0, 1 / 13.8),
}
BOUNDS = {"fp32": (2**-23, 0.0), "bf16": (2**-8, 0.0), **BLOCK_BOUNDS}
FP32 = 2**-23


def draw_wire(rng, world, dense=True):
    """A policy of any kind; the same on every rank."""
    kind = rng.choice(("block", "block", "block", "topk", "codec", "native"))
    feedback = rng.choice((None, True, False))
    if kind == "native":
        return Wire("bf16", form="native")
    if kind == "topk":
        kinds = [TopK(0.01), TopK(0.2), TopK(0.7), ChunkedTopK(0.001), ChunkedTopK(0.05)]
        format, form = rng.choice(kinds), "auto"
    elif kind == "codec":
        format, form = rng.choice((Halves, GatheredHalves))(), "auto"
    else:
        format = rng.choice(tuple(FORMATS))
        forms = ("auto", "two_shot", "gather", *(["hierarchical"] * 3 if world == 4 else []))
        form = rng.choice(forms)
    wire = Wire(format, form, feedback, seed=rng.randrange(3))
    return dataclasses.replace(wire, **_refinements(rng, kind))


def _refinements(rng, kind):
    chosen = {}
    if kind == "block" and rng.random() < 0.2:
        chosen["stochastic"] = True
    if kind == "block" and rng.random() < 0.3:
        chosen["piece_bytes"] = rng.choice((1, 100, 700))
    if rng.random() < 0.2:
        chosen["warmup_steps"] = rng.randint(1, 3)
    if rng.random() < 0.15:
        chosen["min_bytes"] = rng.choice((64, 400))
    if rng.random() < 0.15:
        chosen["overrides"] = {"*1*": rng.choice(("fp32", "bf16", "int8"))}
    return chosen


def tolerance(coded, wire, param, values):
    """Return how far the average of one parameter may be off, by element.

    Args:
        coded: the `CodedPlan` of its bucket.
        values: of each rank, what it coded: fp64, flat, in units of the average, residual included.
    """
    codec = coded.codec
    size = sum(value.abs() for value in values)
    rounding = 16 * FP32 * size + 1e-37
    if codec.name in ("topk", "chunked_topk"):  # no code is further from a number than zero is
        return size + rounding

    def loss(value):
        if codec.name == "halves":
            return 2**-11 * value + 2**-25
        share, of_largest = BOUNDS[codec.name]
        twice = 2 if wire.stochastic else 1
        return twice * (share * value + of_largest * _largest(value))

    error = sum(loss(value.abs()) for value in values)
    if coded.form == "two_shot":
        error = error + loss(size + error)
    return error + rounding


def _largest(values):
    return values.max() if values.numel() else 0.0
