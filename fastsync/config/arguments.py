"""Arguments of FastDDP that hold several settings each: `Zero` and `Faults`.

Commands and the environment name the same settings one by one; `grouped` makes arguments of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fastsync.config.fault_policies import ElasticPolicy, PreemptionPolicy, ReplicaPolicy
from fastsync.wire.formats import Wire

_SHARD_BY = ("auto", "element", "tensor")
# Formats of updated parameters. Others are too coarse for weights: see docs/zero.md.
PARAMETER_WIRES = ("bf16", "fp16", "fp8_e4m3", "int8")


@dataclass(frozen=True)
class Zero:
    """Settings of sharding instead of replication: `FastDDP(model, zero=Zero(2, ...))`.

    Attributes:
        stage: 0: nothing; 1: the state of optimizers, and gradients between backward and step; 2:
            gradients while they accumulate, too; 3: parameters as well.
        shard_by: how parameters are cut: "element", "tensor", or "auto", which chooses by the class
            of the optimizer.
        master_weights: optimizers step on fp32 masters of parameters of 16 bits; each rank holds
            those of its shards.
        parameter_wire: the format of updated parameters on the wire, one of `PARAMETER_WIRES`;
            their owners keep exact ones. None: their own dtype.
        units: of stage 3, what is gathered together: modules, their names or classes; None: the
            repeated blocks of the model.

    Raises:
        ValueError: a value is unknown, or does not go with the stage.
    """

    stage: int = 0
    shard_by: str = "auto"
    master_weights: bool = False
    parameter_wire: str | None = None
    units: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"zero must be 0 (every rank holds everything), 1 (each holds its share of the "
                f"optimizer's state), 2 (and of gradients under no_sync()) or 3 (and of "
                f"parameters), but is {self.stage!r}"
            )
        if self.units is not None:
            object.__setattr__(self, "units", tuple(self.units))
            if self.stage != 3:
                raise ValueError("units= says what zero=3 gathers together; leave it out otherwise")
        if self.stage == 3 and (self.master_weights or self.shard_by != "auto"):
            raise ValueError(
                "zero=3 keeps parameters as they are stored and cuts them along their first "
                "dimension; leave out master_weights and shard_by"
            )
        if self.shard_by not in _SHARD_BY:
            known = ", ".join(_SHARD_BY)
            raise ValueError(f"shard_by must be one of {known}, but is {self.shard_by!r}")
        if self.master_weights and self.stage == 0:
            raise ValueError(
                "master_weights=True spreads masters over the ranks, which zero=0 does not; pass "
                "zero=Zero(1, master_weights=True), or stage 2"
            )
        if self.parameter_wire is not None:
            self._check_parameter_wire()

    def _check_parameter_wire(self) -> None:
        if self.stage == 0:
            raise ValueError(
                "parameter_wire says what the ranks of zero=1, 2 and 3 send each other of their "
                "parameters, which zero=0 does not; leave it out"
            )
        check_parameter_wire(self.parameter_wire)

    @classmethod
    def of(cls, wanted: int | Zero) -> Zero:
        """Return `wanted` itself, or the defaults of the stage of that number."""
        return wanted if isinstance(wanted, Zero) else cls(wanted)

    def describe(self) -> str:
        """Return the text that all ranks must agree on."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "units"}
        units = None if self.units is None else [_name_of(unit) for unit in self.units]
        return ", ".join(
            f"{name}={value!r}" for name, value in {**settings, "units": units}.items()
        )


def _name_of(unit: object) -> str:
    """Return a unit's name, or the name of its class, which is the same on all ranks."""
    if isinstance(unit, str):
        return unit
    return (unit if isinstance(unit, type) else type(unit)).__name__


def check_parameter_wire(name: str | None) -> None:
    """Check that parameters can travel in the format `name`.

    Raises:
        ValueError: they cannot.
    """
    if name is not None and name not in PARAMETER_WIRES:
        known = ", ".join(map(repr, PARAMETER_WIRES))
        raise ValueError(
            f"parameter_wire must be None or one of {known}, but is {name!r}; other formats lose "
            "too much of a weight"
        )


@dataclass(frozen=True)
class Faults:
    """The response of a training to faults: `FastDDP(model, faults=Faults(...))`.

    Attributes:
        nonfinite: response to a step whose gradients hold NaN or infinity: "ignore", "skip", which
            leaves the step out on every rank, or "raise"; both name parameter and ranks.
        replicas: True compares parameters and averages of all ranks every 10 steps; a difference
            is an error that names the tensor. A `ReplicaPolicy` says more; see docs/faults.md.
        on_skip: "average_others" lets ranks leave out steps that fail: `FastDDP.skipping()`.
        elastic: True or an `ElasticPolicy`: ranks go on when others die; see docs/faults.md.
        on_preemption: called without arguments on every rank, after the same step, once any rank
            gets SIGTERM; then all end. A `PreemptionPolicy` names other signals.
    """

    nonfinite: str = "ignore"
    replicas: bool | ReplicaPolicy = False
    on_skip: str = "raise"
    elastic: bool | ElasticPolicy = False
    on_preemption: Callable[[], object] | PreemptionPolicy | None = None


_ZERO = tuple(f.name for f in fields(Zero) if f.name != "stage")
_FAULTS = tuple(f.name for f in fields(Faults))
# Former arguments, and what to do instead; `{}` is the value.
_MOVED: Mapping[str, str] = {
    **{name: f"pass zero=fastsync.Zero(stage, {name}={{}})" for name in _ZERO},
    **{name: f"pass faults=fastsync.Faults({name}={{}})" for name in _FAULTS},
    "on_nonfinite": "pass faults=fastsync.Faults(nonfinite={})",
    "check_replicas": "pass faults=fastsync.Faults(replicas={})",
    "shared_memory": "pass wire=fastsync.Wire(format, shared_memory={}), or set FASTSYNC_SHM",
    "tune": "bucket sizes follow the network's speed, and bucket_cap_mb sets others",
}


def moved(unknown: Mapping[str, object]) -> TypeError:
    """Return the error of arguments that FastDDP does not have."""
    name, value = next(iter(unknown.items()))
    remedy = f"; {_MOVED[name].format(repr(value))}" if name in _MOVED else ""
    return TypeError(f"FastDDP has no argument {name!r}{remedy}")


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of FastDDP from settings that are named one by one.

    Args:
        settings: arguments of FastDDP, and attributes of `Zero`, `Faults`, and `shared_memory` of
            `Wire`, by name.
    """
    left = dict(settings)
    faults = {name: left.pop(name) for name in _FAULTS if name in left}
    if faults:
        left["faults"] = Faults(**faults)
    zero = {name: left.pop(name) for name in _ZERO if name in left}
    if zero:
        left["zero"] = replace(Zero.of(left.get("zero", 0)), **zero)
    if "shared_memory" in left:
        shared, wire = left.pop("shared_memory"), left.get("wire", "fp32")
        left["wire"] = replace(Wire.of(wire), shared_memory=shared)
    return left
