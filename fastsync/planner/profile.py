"""What --measure has found out about a machine, as a file that later plans read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastsync.planner.links import Link, hop_beside_base
from fastsync.planner.quantities import gigabytes

__all__ = ["DeviceRates", "LinkRates", "Machine", "OwnStep", "Profile", "Sample", "fit"]

FORMAT = "fastsync profile"
VERSION = 7  # until 6, files did not say what tensors and codes cost
_HOW = "write one with torchrun --nproc-per-node N -m fastsync.plan --measure FILE"


@dataclass(frozen=True)
class DeviceRates:
    """What a rank computes while the others do: operations and bytes per second.

    Attributes:
        overhead: seconds that an operator takes at least.
        sending: seconds of computing lost per byte that is sent beside it; `launching`: per
            collective; `handling`: per tensor.
        coding: bytes of gradients per second of a pass of coding.
    """

    flops: float
    bandwidth: float
    overhead: float
    sending: float = 0.0
    launching: float = 0.0
    handling: float = 0.0
    coding: float = 0.0


@dataclass(frozen=True)
class Sample:
    """An all-reduce of so many bytes, in seconds."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class LinkRates:
    """A class of links, as all-reduces found it.

    Attributes:
        ranks: of each group that measured, all groups at once.
        latency: seconds of a hop; `rate`: bytes per second that a rank sends.
        scatter: share of that which other collectives get.
    """

    ranks: int
    latency: float
    rate: float
    samples: tuple[Sample, ...]
    scatter: float = 1.0

    @classmethod
    def of(cls, samples: Sequence[Sample], ranks: int) -> LinkRates:
        """Fitted to all-reduces of several sizes."""
        return cls(ranks, *fit(samples, ranks), tuple(samples))

    @classmethod
    def read(cls, document: dict[str, Any] | None) -> LinkRates | None:
        """From a file."""
        if document is None:
            return None
        samples = tuple(Sample(**sample) for sample in document.pop("samples"))
        return cls(samples=samples, **document)

    def link(self, backend: str) -> Link:
        """What clusters over this backend are made of."""
        latency = self.latency
        if backend == "nccl":
            latency = hop_beside_base(latency, self.ranks)
        return Link(self.rate, latency, "net", scatter=self.scatter)


@dataclass(frozen=True)
class Machine:
    """What a rank ran on.

    Attributes:
        processor: its name, and `cores` of it.
        gpu: its name; empty where ranks computed on the processor.
        memory: bytes of the GPU.
    """

    processor: str
    cores: int
    gpu: str = ""
    memory: float = 0.0

    def __str__(self) -> str:
        processor = f"{self.processor}, {self.cores} cores"
        return f"{self.gpu} of {gigabytes(self.memory)}, {processor}" if self.gpu else processor


@dataclass(frozen=True)
class OwnStep:
    """A step of a model of the user's, which each rank made by itself while the others did.

    Attributes:
        model: its class; `tensors` of it are trained, with `numel` elements.
        batch: sizes of a rank's input; `sample_bytes`: of one sample of it.
        optimizer: its class.
        forward, backward: seconds; `update`: of the optimizer's step on all parameters.
    """

    model: str
    tensors: int
    numel: int
    batch: tuple[int, ...]
    sample_bytes: int
    optimizer: str
    forward: float
    backward: float
    update: float

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.batch))
        return f"{self.model} with a batch of {sizes} and {self.optimizer}"

    @classmethod
    def read(cls, document: dict[str, Any] | None) -> OwnStep | None:
        """From a file."""
        if document is None:
            return None
        return cls(**{**document, "batch": tuple(document["batch"])})


@dataclass(frozen=True)
class Profile:
    """Rates of one machine, or cluster.

    Attributes:
        machine: of rank 0.
        world: ranks that measured.
        inside: links inside a machine; `between`: links between machines. None: not measured, as
            no machine had two ranks, or there was one machine alone.
        step: of the user's model, if that was measured.
    """

    machine: Machine
    torch: str
    world: int
    backend: str
    device: DeviceRates
    inside: LinkRates | None = None
    between: LinkRates | None = None
    step: OwnStep | None = None

    def __str__(self) -> str:
        return f"{self.machine}, torch {self.torch}, {self.world} ranks over {self.backend}"

    def dump(self, path: Path) -> None:
        """Writes it as JSON; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads one.

        Raises:
            ValueError: the file is no profile, or of another version.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.pop("format") != FORMAT:
                raise ValueError
            version = document.pop("version")
            if version == VERSION:
                return cls._of(document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no profile that fastsync has measured; {_HOW}") from error
        raise ValueError(
            f"{path} is a profile of format {version}; this fastsync reads {VERSION}, which says "
            f"what tensors and codes cost; {_HOW}"
        )

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Profile:
        machine, device = Machine(**document.pop("machine")), DeviceRates(**document.pop("device"))
        inside, between = (LinkRates.read(document.pop(n)) for n in ("inside", "between"))
        step = OwnStep.read(document.pop("step"))
        return cls(machine, device=device, inside=inside, between=between, step=step, **document)


def fit(samples: Sequence[Sample], world: int) -> tuple[float, float]:
    """Latency of a hop and rate of a rank, from all-reduces of several sizes.

    A line through seconds over bytes, by least squares of relative errors, so that small messages
    count as much as large ones: t = 2 (N - 1) latency + 2 (N - 1) / N M / rate.
    """
    hops, factor = 2 * (world - 1), 2 * (world - 1) / world
    rows = [(hops / s.seconds, factor * s.nbytes / s.seconds) for s in samples]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency = (a1 * bb - b1 * ab) / determinant
    per_byte = (b1 * aa - a1 * ab) / determinant
    return max(latency, 0.0), 1 / max(per_byte, 1e-15)
