"""What a tuning has found, as a file that the next run of the same model on the same ranks reads.

Rank 0 alone reads and writes: the cache folders of several machines may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fastsync.plan.sizes import Sizes
from fastsync.plan.topology import Network

__all__ = ["Found", "path_of", "read", "write"]

FORMAT = "fastsync tuning"
VERSION = 1
_ALIKE = 2.0  # networks whose rates differ by less


@dataclass(frozen=True)
class Found:
    """The result of a tuning.

    Attributes:
        sizes: None: those that follow from policy and network.
        network: on which that was found.
    """

    sizes: Sizes | None
    network: Network

    def holds_on(self, network: Network) -> bool:
        """Whether `network` is about as fast as the one then."""
        slow, fast = sorted((self.network.rate, network.rate))
        return fast <= _ALIKE * slow


def path_of(folder: Path, subject: Mapping[str, object]) -> Path:
    """The file of what `subject` describes: a model, its ranks, how gradients travel."""
    text = json.dumps(subject, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read(path: Path) -> Found | None:
    """What was found; None where there is no such file, or one of another kind.

    Raises:
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            return None
        sizes = document["sizes"]
        rate, latency = (float(document["network"][name]) for name in ("rate", "latency"))
        return Found(None if sizes is None else Sizes(**sizes), Network(rate, latency))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write(path: Path, found: Found) -> None:
    """Whoever reads meanwhile finds the former file or this one; the folder is made.

    Raises:
        OSError: it cannot be written.
    """
    sizes = None if found.sizes is None else asdict(found.sizes)
    document = {"format": FORMAT, "version": VERSION, "sizes": sizes}
    document["network"] = asdict(found.network)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
