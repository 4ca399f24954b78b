"""Wire formats: what gradients travel as, chosen before training; and codecs that users bring.

A built-in format codes blocks of elements, each with a scale of its own (`csrc/kernels/codec.h`
says how). `TopK` and `ChunkedTopK` send parts of a gradient. A `Codec` codes chunks of a flat fp32
buffer in Python or C++. `Wire` is the policy: which format, for which parameters, from which step
on, over which collectives.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Format:
    """A built-in wire format.

    Attributes:
        name: what `wire=` calls it.
        bits: of one element's code.
        block: elements that share a scale; slots are aligned to it.
        scale_bytes: of one block's scale.
        native: the dtype that a backend's all-reduce can sum it in, where there is one.
        error_feedback: on unless asked otherwise.
    """

    name: str
    bits: int
    block: int
    scale_bytes: int
    native: torch.dtype | None = None
    error_feedback: bool = False

    def coded_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements, a multiple of `block`: codes, then scales."""
        return numel * self.bits // 8 + numel // self.block * self.scale_bytes


FORMATS: Final[Mapping[str, Format]] = {
    f.name: f
    for f in (
        Format("fp32", 32, 16, 0, torch.float32),
        Format("bf16", 16, 16, 0, torch.bfloat16),
        Format("fp16", 16, 256, 1, torch.float16),
        Format("fp8_e4m3", 8, 256, 1),
        Format("fp8_e5m2", 8, 256, 1),
        Format("int8", 8, 128, 2),
        Format("int4", 4, 64, 2, error_feedback=True),
    )
}

PIECE_BYTES: Final = 4 << 20
LEAST_PIECE_BYTES: Final = 256 << 10

FORMS: Final = ("auto", "native", "two_shot", "gather", "hierarchical")


class CodecLike(Protocol):
    """Attributes that an object needs to carry gradients; `Codec` says what each is for."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def form(self) -> str: ...
    @property
    def error_feedback(self) -> bool: ...
    def coded_bytes(self, numel: int) -> int: ...
    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None: ...
    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None: ...


class Codec:
    """A wire format of your own. Subclass it, or pass any object with these attributes.

    Gradients reach it as chunks of a flat fp32 buffer, already divided by the number of ranks; it
    turns each into a fixed number of bytes. Calls come one at a time, without autograd, from the
    backward's thread and from a worker thread.

    Attributes:
        name: names it in messages; equal on all ranks.
        block: elements; chunks are multiples of it.
        form: "two_shot", where sums are coded again, or "gather", where every rank sums what all
            ranks sent.
        error_feedback: whether what a chunk's code lost is added to the next step's gradient.
        whole: a bucket is one chunk, whatever its size. It holds zeros between gradients, and
            `coded_bytes` is asked for the number of elements without them. Gather form only.
    """

    name: str = "codec"
    block: int = 16
    form: str = "two_shot"
    error_feedback: bool = True
    whole: bool = False

    def describe(self) -> str:
        """Name and parameters, as they must be equal on all ranks."""
        return self.name

    def coded_bytes(self, numel: int) -> int:
        """Bytes of a coded chunk of `numel` elements."""
        raise NotImplementedError

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write the code of `values`, fp32 [numel], to `payload`, uint8 [coded_bytes(numel)]."""
        raise NotImplementedError

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Write to `values` what `payload` stands for."""
        raise NotImplementedError


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the largest elements of a bucket by magnitude now, and the others in later steps.

    A bucket of n elements sends k = max(1, round(density * n)): 8 k bytes to every other rank,
    int32 positions and then fp32 values. Of equal magnitudes the first ones are kept; NaN and
    infinities count as largest. All ranks sum what all ranks sent, so the bytes received grow with
    the number of ranks. (Stich et al., "Sparsified SGD with memory", 2018.)

    The engine runs it in C++; `encode` and `decode` are the same by torch's operations.

    Attributes:
        density: part of the elements that travels, above 0 and at most 1.

    Raises:
        ValueError: the density is out of range.
    """

    density: float = 0.01

    name = "topk"
    block = 1
    form = "gather"
    whole = True

    def __post_init__(self) -> None:
        _check_density(self.density)

    def describe(self) -> str:
        return f"topk(density={self.density})"

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements travel."""
        return max(1, round(self.density * numel))

    def coded_bytes(self, numel: int) -> int:
        """Bytes of a bucket of `numel` elements.

        Raises:
            ValueError: there are more than int32 can number.
        """
        if numel >= 1 << 31:
            raise ValueError(
                f"topk numbers the elements of a bucket with 32 bits, but one has {numel}; choose "
                "a smaller bucket_cap_mb"
            )
        return 8 * self.kept(numel)

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        positions, kept = self._parts(payload)
        magnitudes = values.view(torch.int32) & 0x7FFFFFFF
        order = magnitudes.argsort(descending=True, stable=True)[: kept.numel()]
        positions.copy_(order)
        kept.copy_(values[order])

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        positions, kept = self._parts(payload)
        values.zero_()
        values[positions.long()] = kept

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = payload.numel() // 2
        return payload[:half].view(torch.int32), payload[half:].view(torch.float32)


@dataclass(frozen=True)
class ChunkedTopK(Codec):
    """Sends 2 bits of each of the largest elements of every chunk of 4096; the rest comes later.

    A chunk belongs to one parameter. Its k largest elements travel as 14 bits each: the place in
    the chunk, the sign, and whether the magnitude is nearer to m or to m / 2, where m is the
    chunk's largest magnitude, in fp32. An element below m / 4, nearer to zero than to m / 2, does
    not travel: the largest one takes its place once more. So no code is further from an element
    than zero is, and what is not sent of it, at most m / 4 where one is sent, stays in the
    residual. A scale from one exact element needs no sum, and what is far larger than the rest of
    its chunk is gone after one step. (Sarfi et al., "Communication efficient LLM pre-training with
    SparseLoCo", 2025, arXiv 2508.15706, sends 1 to 3 % with 2-bit values.)

    Of equal magnitudes the first ones are kept. Infinities arrive alone; a NaN makes what its chunk
    sends NaN. All ranks sum what all ranks sent. It runs by torch's operations.

    Attributes:
        density: part of the elements of a chunk that travels, above 0 and at most 1, in steps of
            1/1024.

    Raises:
        ValueError: the density is out of range.
    """

    density: float = 1 / 64

    name = "chunked_topk"
    block = 4096
    form = "gather"

    def __post_init__(self) -> None:
        _check_density(self.density)

    def describe(self) -> str:
        return f"chunked_topk(density={self.density})"

    @property
    def kept(self) -> int:
        """Return how many elements of a chunk travel: whole bytes of codes."""
        return 4 * max(1, round(self.density * self.block / 4))

    def coded_bytes(self, numel: int) -> int:
        return sum(self._sizes(numel))

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        chunks, last = values.view(-1, self.block), self.block - 1
        # No two keys are equal: of equal magnitudes, the first place has the largest.
        keys = (chunks.view(torch.int32) & 0x7FFFFFFF).long().mul_(self.block)
        keys.add_(torch.arange(last, -1, -1, device=values.device))
        places = last - (keys.topk(self.kept).values & last)
        kept = chunks.gather(1, places)
        scales = kept[:, :1].abs()
        weak = kept.abs() < scales / 4
        places = places.where(~weak, places[:, :1])
        kept = kept.where(~weak, kept[:, :1])
        bits = (kept < 0) + 2 * (kept.abs() >= 0.75 * scales)
        parts = (
            scales.view(torch.uint8),
            (places & 0xFF).to(torch.uint8),
            _packed(places >> 8, 4),
            _packed(bits, 2),
        )
        torch.cat([part.flatten() for part in parts], out=payload)

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        scales, low, high, bits = payload.split(self._sizes(values.numel()))
        places = low.long() + 256 * _unpacked(high, 4)
        codes = _unpacked(bits, 2).view(-1, self.kept)
        sizes = scales.clone().view(torch.float32).view(-1, 1)  # a part may start at any byte
        sizes = torch.where(codes >= 2, sizes, sizes / 2)
        chunks = values.zero_().view(-1, self.block)
        chunks.scatter_(1, places.view_as(codes), torch.where(codes % 2 == 1, -sizes, sizes))

    def _sizes(self, numel: int) -> list[int]:
        """Bytes of scales, of the lower and the upper bits of places, and of values."""
        chunks = numel // self.block
        kept = chunks * self.kept
        return [4 * chunks, kept, kept // 2, kept // 4]


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, but is {density}")


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return bytes, each of 8 / bits values, the first in its lowest bits."""
    shifts = torch.arange(0, 8, bits, device=values.device)
    return (values.reshape(-1, len(shifts)) << shifts).sum(1).to(torch.uint8)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, bits, device=packed.device)
    return (packed.long().unsqueeze(1) >> shifts & (1 << bits) - 1).flatten()


# What a gradient travels in, and what a user may name it by.
AnyCodec: TypeAlias = Format | CodecLike
Choice: TypeAlias = str | AnyCodec

_REGISTRY: Final[dict[str, Callable[[], AnyCodec]]] = {"topk": TopK}
_HOOKS: Final = "torch.distributed.algorithms.ddp_comm_hooks"
# Former formats, and what to use instead.
_FORMER: Final = {
    "powersgd": f"register the hook of {_HOOKS}.powerSGD_hook with model.register_comm_hook(), "
    "and leave wire out"
}


def register_codec(name: str, factory: Callable[[], AnyCodec]) -> None:
    """Make `wire=name` mean `factory()`, which returns a `Codec`. Call it on every rank.

    The factory is called once, when the name is used for the first time.

    Raises:
        ValueError: the name is taken.
    """
    if name in FORMATS or name in _REGISTRY:
        raise ValueError(f"a wire format named {name!r} exists already; choose another name")
    _REGISTRY[name] = functools.cache(factory)


def wire_formats() -> tuple[str, ...]:
    """Every name that `wire=` may be: block formats, topk, registered codecs."""
    return (*FORMATS, *_REGISTRY)


def make_codec(wire: object) -> AnyCodec:
    """The format or codec that `wire` names or is.

    Raises:
        ValueError: there is none of that name, or it lacks what a codec must have.
    """
    if isinstance(wire, str):
        if wire in FORMATS:
            return FORMATS[wire]
        if wire in _REGISTRY:
            return make_codec(_REGISTRY[wire]())
        if wire in _FORMER:
            raise ValueError(f"there is no wire format {wire!r} any more; {_FORMER[wire]}")
        known = ", ".join(repr(name) for name in (*FORMATS, *_REGISTRY))
        raise ValueError(
            f"unknown wire format {wire!r}; choose one of {known}, or pass a fastsync.Codec"
        )
    return wire if isinstance(wire, Format) else _checked(wire)


def native_dtype(codec: AnyCodec) -> torch.dtype | None:
    """The dtype that a backend's all-reduce can sum `codec` in, where there is one."""
    return codec.native if isinstance(codec, Format) else None


def _checked(wire: object) -> CodecLike:
    """A codec that a user brought, once it is known to be one."""
    needs = ("name", "block", "form", "error_feedback", "coded_bytes", "encode", "decode")
    lacks = [name for name in needs if not hasattr(wire, name)]
    if lacks:
        raise ValueError(f"{wire!r} is no wire format: it lacks {', '.join(lacks)}")
    codec = cast(CodecLike, wire)
    if codec.form not in _forms_of(codec):
        known = " or ".join(repr(form) for form in _forms_of(codec))
        raise ValueError(f"the form of {codec.name} must be {known}, but is {codec.form!r}")
    return codec


def _forms_of(codec: AnyCodec) -> tuple[str, ...]:
    """The forms that a codec can travel in."""
    if getattr(codec, "whole", False):
        return ("gather",)
    native = ("native",) if native_dtype(codec) else ()
    return (*native, "two_shot", "gather", "hierarchical")


def _describe(codec: AnyCodec) -> str:
    describe = getattr(codec, "describe", None)
    return str(describe() if describe else codec.name)


@dataclass(frozen=True)
class Wire:
    """How gradients travel.

    Attributes:
        format: the name of a format or registered codec, a `TopK` or `ChunkedTopK`, or a
            `Codec`.
        form: "native" (the backend's own all-reduce; fp32, bf16 and fp16 only), "two_shot",
            "gather", "hierarchical" (summed as fp32 inside a node, coded between nodes), or
            "auto": what measures fastest (see `docs/wire.md`). Top-k has a form of its own and
            takes "auto" alone.
        error_feedback: add what coding lost to the next step's gradients; None: as the format
            recommends. Costs 4 bytes per element.
        stochastic: round stochastically instead of to the nearest (built-in formats).
        overrides: format or codec by parameter name pattern, as `fnmatch` has them; the first match
            counts.
        min_bytes: buckets with fewer bytes of gradients travel as fp32.
        warmup_steps: synchronised steps that travel as fp32 before the format is used.
        seed: of stochastic rounding.
        piece_bytes: a coded bucket travels in pieces of about this size, so that one is coded,
            summed and decoded while others are on the wire. None: of 4 MiB, or of what a slower
            network carries in 3 ms, which the first step measures; on devices in one piece.
        node_group: for the hierarchical form, the process group of the ranks in this rank's node;
            None: nodes are as many consecutive ranks as LOCAL_WORLD_SIZE says.
        cross_group: likewise, the ranks that have this rank's place in each node.
        shared_memory: CPU ranks of one machine average through memory that they share; False: all
            through the process group. `set_wire()` does not change it.
    """

    format: Choice = "fp32"
    form: str = "auto"
    error_feedback: bool | None = None
    stochastic: bool = False
    overrides: Mapping[str, Choice] = field(default_factory=dict)
    min_bytes: int = 0
    warmup_steps: int = 0
    seed: int = 0
    piece_bytes: int | None = None
    node_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    cross_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    shared_memory: bool = True

    def __post_init__(self) -> None:
        for wire in (self.format, *self.overrides.values()):
            self._check_form(make_codec(wire))
        for name in ("min_bytes", "warmup_steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.piece_bytes is not None and self.piece_bytes <= 0:
            raise ValueError(f"piece_bytes must be positive, but is {self.piece_bytes}")
        given = [group for group in (self.node_group, self.cross_group) if group is not None]
        if given and (len(given) == 1 or self.form != "hierarchical"):
            raise ValueError(
                "node_group and cross_group go together, with form='hierarchical'; pass both or "
                "leave both out"
            )

    def _check_form(self, codec: AnyCodec) -> None:
        if self.form not in FORMS:
            known = ", ".join(repr(form) for form in FORMS)
            raise ValueError(f"unknown form {self.form!r}; choose one of {known}")
        if self.form == "native" and native_dtype(codec) is None:
            raise ValueError(
                f"no backend sums {codec.name} natively; leave form out, or choose 'two_shot' or "
                "'gather'"
            )
        if self.form not in ("auto", *_forms_of(codec)):
            raise ValueError(
                f"{codec.name} does not travel in the form {self.form!r}; leave form out"
            )

    @classmethod
    def of(cls, wire: Wire | Choice) -> Wire:
        """Return `wire` itself, or the policy that sends everything as `wire`."""
        return wire if isinstance(wire, Wire) else cls(wire)

    @property
    def plain(self) -> bool:
        """Return whether everything travels as its own dtype."""
        return self.format == "fp32" and self.form in ("auto", "native") and not self.overrides

    @property
    def adds_by_parts(self) -> bool:
        """Return whether any elements of a gradient can be added up without the others."""
        codecs = map(make_codec, (self.format, *self.overrides.values()))
        return not any(getattr(codec, "whole", False) for codec in codecs)

    def describe(self) -> str:
        """Return everything that ranks must agree on, in words."""
        default = Wire()
        # Groups differ between ranks; shared memory is a setting of its own.
        unsaid = ("format", "node_group", "cross_group", "shared_memory")
        others = [name for name in self.__dataclass_fields__ if name not in unsaid]
        chosen = [name for name in others if getattr(self, name) != getattr(default, name)]
        values = {name: getattr(self, name) for name in chosen}
        if self.overrides:
            named = {key: _describe(make_codec(wire)) for key, wire in self.overrides.items()}
            values["overrides"] = named
        parts = [f"{name}={value}" for name, value in values.items()]
        return ", ".join([_describe(make_codec(self.format)), *parts])

    def codec_for(self, name: str) -> AnyCodec:
        """The format or codec of the parameter called `name`."""
        for pattern, wire in self.overrides.items():
            if fnmatch.fnmatchcase(name, pattern):
                return make_codec(wire)
        return make_codec(self.format)

    def feedback_for(self, codec: AnyCodec) -> bool:
        """Return whether `codec` runs with error feedback."""
        if self.error_feedback is None:
            return codec.error_feedback
        return self.error_feedback and codec is not FORMATS["fp32"]

    def form_for(self, codec: AnyCodec, world_size: int, device: torch.device) -> str:
        """The form that `codec` travels in between `world_size` ranks.

        The backend sums fp32, and on devices with streams, whose links are fast, bf16. It would
        let fp16 overflow, which blocks with scales of their own do not. Between two ranks the
        gather form moves the same bytes as the two-shot form and rounds once.
        """
        native = native_dtype(codec)
        if native is torch.float32 and (self.form == "auto" or self.format != "fp32"):
            return "native"
        if self.form not in ("auto", "hierarchical"):
            return self.form
        if not isinstance(codec, Format):
            return codec.form
        if self.form == "auto" and native is torch.bfloat16 and device.type != "cpu":
            return "native"
        return "gather" if world_size == 2 else "two_shot"
