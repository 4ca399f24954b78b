"""Real text that every machine with Python has: the standard library's own source.

Bytes are the tokens, so nothing is downloaded and no vocabulary is built. Files are in
the order of their names; every twentieth one is held out for validation.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
HOLD_OUT = 20
# Folders of tests, of tables, and of what is not the library.
LEFT_OUT = {"test", "tests", "encodings", "pydoc_data", "site-packages", "dist-packages"}
DATA_SEED = 7


@dataclass(frozen=True)
class Corpus:
    """The text as bytes: one-dimensional uint8 tensors."""

    train: Tensor
    validation: Tensor
    files: int

    def batch(self, rank: int, step: int, size: int, length: int) -> Tensor:
        """Return windows drawn from the training text, other ones for each rank and step.

        Returns:
            int64 [size, length + 1]: each position's target is the next one.
        """
        generator = torch.Generator().manual_seed(DATA_SEED + rank * 1_000_003 + step)
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return windows(self.train, starts, length)

    def validation_batch(self, size: int, length: int) -> Tensor:
        """Return windows spread evenly over the held-out text, int64 [size, length + 1]."""
        starts = torch.linspace(0, len(self.validation) - length - 1, size).long()
        return windows(self.validation, starts, length)


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()


def source_files() -> list[Path]:
    """Return the standard library's modules, without tests and tables, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in found if not LEFT_OUT.intersection(path.parts)]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load() -> Corpus:
    """Read the corpus; about 10 MB.

    Raises:
        RuntimeError: this Python comes without its source.
    """
    texts = [path.read_bytes() for path in source_files()]
    train = b"\n".join(text for i, text in enumerate(texts) if i % HOLD_OUT)
    validation = b"\n".join(text for i, text in enumerate(texts) if i % HOLD_OUT == 0)
    if len(validation) < 10_000:
        raise RuntimeError("expects the standard library's .py files but this Python has none")
    return Corpus(_tensor(train), _tensor(validation), len(texts))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
