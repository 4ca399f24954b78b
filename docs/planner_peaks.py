"""Compare planned peaks of memory with measured ones: python -m docs.planner_peaks

This project's models at every stage, as they are, with checkpointing, and in bf16 with fp32
masters; and in the wire formats that a stage can have. Two ranks over Gloo measure them, also on a
busy machine; docs/measured/peaks.json holds the results, which docs/make_planner.py shows.

Masters of stages 1 and 2 are those of `Zero(master_weights=True)`, of stage 3 those of
`fully_shard(mp_policy=...)`, whose shares are fp32. Stage 0 has none, so a script keeps them beside
its parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from bench.models import WORKLOADS
from examples.common.costs import peak_memory
from examples.common.machine import describe, environment
from examples.common.ranks import Group
from examples.common.training import OPTIMIZERS, Lane, Workload, make_batches, make_lane
from examples.common.variants import Variant, fast_ddp
from fastsync import fully_shard
from fastsync.config.policy import BucketPolicy
from fastsync.fsdp.group_choice import choose_units
from fastsync.planner.memory import Memory, peak_of, phases_of
from fastsync.planner.record import Record
from fastsync.planner.strategy import Strategy, engine_plan, named
from fastsync.planner.trace import find_blocks, trace_model, trace_optimizer
from fastsync.testing import run_ranks

RANKS, CAP_MB = 2, 25.0
MODELS, STAGES = ("wide", "transformer", "gpt2", "conv"), (0, 1, 2, 3)
WIRES = ("int8", "int4")  # without and with residuals
MEASURED = Path(__file__).resolve().parent / "measured" / "peaks.json"
TIMEOUT = 3000.0  # seconds
NARROW = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    model: str
    stage: int
    checkpointing: bool = False
    masters: bool = False
    wire: str = "fp32"

    @property
    def way(self) -> str:
        words = ["checkpointing"] * self.checkpointing + ["bf16, masters"] * self.masters
        return ", ".join(words if self.wire == "fp32" else [*words, self.wire])


def case_of(row: Mapping[str, Any]) -> Case:
    """What a row of the measurement is about."""
    return Case(**{name: value for name, value in row.items() if name != "bytes"})


def every_case(models: Sequence[str] = MODELS) -> list[Case]:
    """Of models without repeated blocks nothing is checkpointed."""
    ways = ((False, False), (True, False), (False, True), (True, True))
    cases = (Case(m, stage, *way) for m in models for way in ways for stage in STAGES)
    blocks = {model: find_blocks(WORKLOADS[model]().build()) for model in models}
    wired = [
        Case(model, stage, wire=wire)
        for model in models
        for wire in WIRES
        for stage in STAGES
        if Strategy(stage, RANKS, RANKS, wire=wire).possible
    ]
    return [case for case in cases if blocks[case.model] or not case.checkpointing] + wired


# ---- planned ---------------------------------------------------------------------------------


def adamw(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> Any:
    return trace_optimizer("adamw", shapes, foreach=False)


@cache
def traced(model: str, checkpointing: bool = False, narrow: bool = False) -> Record:
    workload = WORKLOADS[model]()
    return trace_model(
        workload.build,
        tuple(workload.batch(0, 0).shape),
        loss=lambda output, _: workload.loss(output),
        dtype=NARROW if narrow else None,
        checkpointing=checkpointing,
    )


def planned(case: Case) -> Memory:
    record = traced(case.model, case.checkpointing, case.masters)
    base = named(str(case.stage), RANKS, RANKS)
    asked = {"masters": case.masters, "checkpointing": case.checkpointing, "wire": case.wire}
    strategy = replace(base, **asked)
    plan = engine_plan(record, strategy, buckets=BucketPolicy.from_mb(CAP_MB))
    return peak_of(phases_of(record, strategy, plan, adamw))


# ---- measured --------------------------------------------------------------------------------


class Masters:
    """AdamW on fp32 copies of narrow parameters, as scripts without ZeRO have them."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self._masters = [nn.Parameter(p.detach().float()) for p in self._params]
        self._inner = OPTIMIZERS["adamw"](self._masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self._inner.step()
        self._inner.zero_grad()
        for param, master in zip(self._params, self._masters, strict=True):
            param.copy_(master)


def workload_of(case: Case) -> Workload:
    base = WORKLOADS[case.model]()
    narrow = case.masters and case.stage < 3  # fully_shard casts by itself

    def build() -> nn.Module:
        module = base.build()
        for block in find_blocks(module) if case.checkpointing else ():
            block.forward = partial(  # type: ignore[method-assign]
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
        return module.to(NARROW) if narrow else module

    def batch(rank: int, step: int) -> torch.Tensor:
        made = base.batch(rank, step)
        return made.to(NARROW) if case.masters and made.is_floating_point() else made

    return Workload(case.model, build, batch, base.loss)


def lane_of(case: Case, group: Group) -> Lane:
    workload = workload_of(case)
    if case.masters and case.stage == 3:
        module = workload.build()
        for buffer in module.buffers():  # with which what is narrow is normalised
            buffer.data = buffer.to(NARROW) if buffer.is_floating_point() else buffer
        shard = partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=NARROW))
        for unit in choose_units(module, None):
            shard(unit)
        shard(module)
        made = OPTIMIZERS["adamw"](module.parameters())
        return Lane(workload, module, module, made, make_batches(workload, group), update=True)
    how: dict[str, Any] = {"zero": case.stage, "wire": case.wire}
    how |= {"bucket_cap_mb": CAP_MB} if case.stage < 3 else {}
    how |= {"master_weights": True} if case.masters and case.stage else {}
    lane = make_lane(workload, Variant("run", fast_ddp(**how)), group, "adamw")
    if case.masters and not case.stage:
        made_here: Any = Masters(lane.module.parameters())
        lane.optimizer = made_here
    return lane


def measured(case: Case, group: Group) -> float | None:
    """Bytes of the rank that holds most, in that of two trainings which takes more: by how much
    ranks are apart is chance. A first lane pays for what a process loads once."""
    lane_of(case, group).step()
    seen = (peak_memory(lambda: lane_of(case, group), group) for _ in range(2))
    known = [peak for peak in seen if peak is not None]
    found = max(known, default=None)
    nbytes = sum(p.nbytes for p in workload_of(replace(case, stage=3)).build().parameters())
    fp32 = case.stage == 3 or not case.masters
    return None if found is None else found * (nbytes if fp32 else nbytes / 2)


def peaks_here(rank: int, world: int, case: Case) -> dict[str, Any]:
    """What a rank measures."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # for the thread that looks
    group = Group(rank, world, torch.device("cpu"))
    return {"environment": environment(group), "bytes": measured(case, group)}


def main() -> None:
    """Measure case by case; what is known of others stays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--way", help="as the table calls it (default: all)")
    args = parser.parse_args()
    rows = json.loads(MEASURED.read_text())["peaks"] if MEASURED.exists() else []
    for case in every_case(args.models.split(",")):  # in processes of their own
        if args.way not in (None, case.way):
            continue
        found = run_ranks(peaks_here, RANKS, case, timeout=TIMEOUT)[0]
        own = {**asdict(case), "bytes": found["bytes"]}
        print(own, flush=True)
        rows = [row for row in rows if case_of(row) != case] + [own]
        rows.sort(key=lambda row: MODELS.index(row["model"]))
        document = {"machine": describe(found["environment"]), "peaks": rows}
        MEASURED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
