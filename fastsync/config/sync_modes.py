"""How often ranks average: the arguments of `FastDDP(model, sync=...)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, TypeAlias, cast

from torch.distributed import GroupMember, ProcessGroup

from fastsync.wire.formats import FORMATS, AnyCodec, Choice, Wire, make_codec

# What torch.distributed.new_group() returns on a rank that is not in the group.
NO_GROUP = (GroupMember.NON_GROUP_MEMBER, None)


class _Mode:
    """What modes have in common, where they have no field of the name."""

    within: Within

    @property
    def warmup(self) -> int:
        """Return how many first steps average gradients."""
        return 0

    @property
    def part_size(self) -> int:
        """Return how many ranks average their gradients."""
        if isinstance(self.within, ProcessGroup):
            return self.within.size()
        return 1 if self.within is None else self.within

    def describe(self) -> str:
        """Return the text that all ranks must agree on."""
        mode = cast(SyncMode, self)
        chosen = [f.name for f in fields(mode) if getattr(mode, f.name) != f.default]
        values = {name: getattr(mode, name) for name in chosen}
        if isinstance(mode.within, ProcessGroup):
            values["within"] = f"a group of {mode.within.size()} ranks"
        if isinstance(mode, DiLoCo) and "wire" in values:
            values["wire"] = Wire.of(mode.wire).describe()
        return f"{type(mode).__name__}({', '.join(f'{n}={v!r}' for n, v in values.items())})"


@dataclass(frozen=True)
class LocalSGD(_Mode):
    """Average parameters every `every` optimizer steps; gradients stay local in between.

    (Stich, "Local SGD converges fast and communicates little", 2018; with `warmup` post-local SGD,
    Lin et al., "Don't use large mini-batches, use local SGD", 2020.)

    Attributes:
        every: optimizer steps from one average to the next.
        warmup: first optimizer steps, before which gradients are averaged as without `sync`.
        optimizer_state: average the state of optimizers as well, where it is one value for each
            element of a parameter, such as a momentum.
        within: ranks that follow each other, such as those of a node, and average their gradients
            at every step; or a process group of such ranks, one on each rank, all of one size.
            Parameters are averaged between these groups.

    Raises:
        TypeError, ValueError: a value makes no sense.
    """

    every: int
    warmup: int = 0
    optimizer_state: bool = False
    within: Within = 1

    def __post_init__(self) -> None:
        _check_number(self, "every", 1)
        _check_warmup(self)
        _check_within(self)


@dataclass(frozen=True)
class DiLoCo(_Mode):
    """Step on fp32 outer parameters by the averages of what `every` inner steps have changed.

    The outer optimizer is SGD with Nesterov momentum. With `fragments` the parameters travel in
    parts, in turn; with `overlap` each travels while the next inner steps run. (Douillard et al.,
    "DiLoCo", 2311.08105, and "Streaming DiLoCo with overlapping communication", 2501.18512.)

    Attributes:
        every: optimizer steps from one average of a parameter to the next.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its momentum.
        fragments: parts of the parameters, of similar sizes, each sent at a step of its own.
        overlap: optimizer steps from sending a fragment to merging it.
        wire: what differences travel as: a format or codec. What coding loses is added to the next
            difference of the same elements, in any format.
        alpha: part of this rank's own parameters that a merge keeps; None: 0.5 with `overlap`, else
            0, after which all ranks have the same.
        warmup: as of `LocalSGD`. Outer parameters are what these steps have made.
        within: as of `LocalSGD`. Differences are averaged between these groups.

    Raises:
        TypeError, ValueError: a value makes no sense.
    """

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    wire: Wire | Choice = "fp32"
    alpha: float | None = None
    warmup: int = 0
    within: Within = 1

    def __post_init__(self) -> None:
        _check_number(self, "every", 1)
        _check_warmup(self)
        _check_within(self)
        _check_number(self, "fragments", 1)
        _check_number(self, "overlap", 0)
        if self.fragments > self.every:
            raise ValueError(
                f"sync: fragments must be at most every={self.every}, because each is sent at a "
                f"step of its own, but is {self.fragments}"
            )
        if self.overlap >= self.every:
            raise ValueError(
                f"sync: overlap must be below every={self.every}, when a fragment is sent again, "
                f"but is {self.overlap}"
            )
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"sync: outer_lr must be a positive number, but is {self.outer_lr}")
        _check_part(self, "outer_momentum")
        if self.alpha is not None:
            _check_part(self, "alpha")
        _check_wire(Wire.of(self.wire))

    @property
    def codec(self) -> AnyCodec | None:
        """Return what differences travel as; None: as they are."""
        codec = make_codec(Wire.of(self.wire).format)
        return None if codec is FORMATS["fp32"] else codec

    @property
    def kept(self) -> float:
        """Return the part of a rank's own parameters that a merge keeps."""
        if self.alpha is None:
            return 0.5 if self.overlap else 0.0
        return self.alpha


@dataclass(frozen=True)
class Delayed(_Mode):
    """Average parameters while the next steps run, and add the steps made meanwhile.

    Every `steps` optimizer steps a rank sends its parameters. When `steps` more are made, they
    become the average of what was sent, plus this rank's own change since. So ranks differ by
    their latest steps alone, whatever momentum their optimizers have.

    Attributes:
        steps: optimizer steps that a collective may take.
        within: as of `LocalSGD`.

    Raises:
        TypeError, ValueError: a value makes no sense.
    """

    steps: int = 1
    within: Within = 1

    def __post_init__(self) -> None:
        _check_number(self, "steps", 1)
        _check_within(self)

    @property
    def every(self) -> int:
        """Return the optimizer steps from one average to the next."""
        return self.steps


Within: TypeAlias = int | ProcessGroup | None
SyncMode: TypeAlias = LocalSGD | DiLoCo | Delayed
# Of `sync="diloco:64"`, which commands and the environment can give.
_NAMES: Final[dict[str, Callable[[int], SyncMode]]] = {
    "local": LocalSGD,
    "diloco": DiLoCo,
    "delayed": Delayed,
}


def sync_mode(wanted: str | SyncMode | None) -> SyncMode | None:
    """Return the mode of FastDDP's argument `sync`; None: gradients are averaged at every step.

    Args:
        wanted: a mode, or its name and number of steps: "local:64", "diloco:64", "delayed:1".

    Raises:
        TypeError, ValueError: it is something else.
    """
    if wanted is None or isinstance(wanted, LocalSGD | DiLoCo | Delayed):
        return wanted
    if not isinstance(wanted, str):
        raise TypeError(
            "sync must be None, a LocalSGD, DiLoCo or Delayed, or a text such as 'diloco:64', but "
            f"is {wanted!r}"
        )
    name, _, steps = wanted.partition(":")
    if name not in _NAMES or not steps.isdecimal():
        known = ", ".join(f"'{name}:STEPS'" for name in _NAMES)
        raise ValueError(f"sync must be one of {known}, but is {wanted!r}")
    return _NAMES[name](int(steps))


def _check_number(mode: object, name: str, least: int) -> None:
    value = getattr(mode, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"sync: {name} must be a whole number, but is {value!r}")
    if value < least:
        raise ValueError(f"sync: {name} must be at least {least}, but is {value}")


def _check_warmup(mode: SyncMode) -> None:
    _check_number(mode, "warmup", 0)
    if mode.warmup and mode.part_size > 1:
        raise ValueError(
            "sync: warmup averages gradients over all ranks, within= over some; leave one out"
        )


def _check_within(mode: SyncMode) -> None:
    # A rank that is in no group learns of it with the others, when the model is wrapped.
    if not isinstance(mode.within, ProcessGroup) and mode.within not in NO_GROUP:
        _check_number(mode, "within", 1)


def _check_part(mode: object, name: str) -> None:
    value = getattr(mode, name)
    if not 0 <= value < 1:
        raise ValueError(f"sync: {name} must be at least 0 and below 1, but is {value}")


def _check_wire(wire: Wire) -> None:
    if wire.error_feedback is False:
        raise ValueError(
            f"sync: wire={wire.describe()!r} has no error feedback, so that differences would lose "
            "what coding leaves out, round by round; leave error_feedback out"
        )
    default = Wire()
    settings = (f.name for f in fields(Wire) if f.name not in ("format", "error_feedback"))
    if others := [name for name in settings if getattr(wire, name) != getattr(default, name)]:
        raise ValueError(
            f"sync: differences are coded as a whole by each rank, so that wire= knows no "
            f"{', '.join(others)}; leave that out"
        )
