"""Numbers with units, as people type and read them: 450GB/s, 70e9, 8x1024, 5us."""

from __future__ import annotations

import re

import torch

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {
    **{"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
_BITS = {"bit": 0.125, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def _read(text: str, units: dict[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(text)
    try:
        value = float(found[1]) * units[found[2]] if found else -1.0
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is no positive number with a unit; write it like {example}")
    return value


def count(text: str) -> int:
    """Parse a number of things: 70e9, 70B, 124M."""
    return round(_read(text.lower(), _COUNTS, "70e9 or 70B"))


def whole(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no whole number of at least 1")
    return int(text)


def worlds(text: str) -> tuple[int, ...]:
    """Parse numbers of GPUs, separated by commas."""
    return tuple(whole(part.strip()) for part in text.split(","))


def nbytes(text: str) -> float:
    """Parse bytes: 80GB (of 10^9), 24GiB (of 2^30)."""
    return _read(text, _BYTES, "80GB or 24GiB")


def rate(text: str) -> float:
    """Parse bytes per second: 450GB/s, 10Gbit/s."""
    units = {f"{unit}/s": factor for unit, factor in {**_BYTES, **_BITS}.items()}
    return _read(text, units, "450GB/s or 10Gbit/s")


def seconds(text: str) -> float:
    """Parse a duration: 5us, 1.2ms."""
    return _read(text, _SECONDS, "5us or 1.2ms")


def ratio(text: str) -> float:
    """Parse a share, above 0 and at most 1: 0.4 or 40%."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is no share above 0 and at most 1; write it like 0.4 or 40%")
    return value


def shape(text: str) -> tuple[int, ...]:
    """Parse sizes of a batch, first dimension first: 8x1024."""
    return tuple(whole(part) for part in text.lower().split("x"))


def dtype(text: str) -> torch.dtype:
    """Parse a dtype: fp32, bf16, fp16 or fp64."""
    if text not in DTYPES:
        raise ValueError(f"{text!r} is no dtype of parameters; choose one of {', '.join(DTYPES)}")
    return DTYPES[text]


def gigabytes(value: float) -> str:
    """Format bytes as people read memory: 227.5 GB, 12.3 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor * (1e4 if unit == "TB" else 1.0):
            return f"{value / factor:.4g} {unit}"
    return f"{value:.0f} B"


def millions(number: float) -> str:
    """Format a number of things: 7 B, 27.3 M, 4,096."""
    for unit, factor in (("B", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{number:,.0f}"


def shown_seconds(value: float) -> str:
    """Format a duration: 1.23 s, 45.6 ms, 7.8 us."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            digits = ".3g" if value < 100 * factor else ".0f"
            return f"{value / factor:{digits}} {unit}"
    return "0" if value < 1e-9 else f"{value * 1e9:.0f} ns"
