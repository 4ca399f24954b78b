"""State that coding carries between steps, as a checkpoint: by parameter name, on any number of
ranks.

A rank's residual is what it still owes to the averages, in units of the averages. Only the sum over
ranks has a meaning, and it is what survives a change of world size (see `deal`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from fastsync.config.topology import Network
from fastsync.faults import consensus
from fastsync.reducer.engine import Engine, Progress
from fastsync.reducer.monitor import watched

VERSION: Final = 3
_KEYS: Final = (
    "version",
    "wire",
    "rank",
    "world_size",
    "steps",
    "order",
    "rate",
    "latency",
    "residuals",
)

State = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """State that one rank loads from a checkpoint."""

    progress: Progress
    residuals: Mapping[str, torch.Tensor]


def capture(engine: Engine) -> dict[str, Any]:
    """This rank's state; no collective. See `FastDDP.sync_state_dict`."""
    residuals, network = engine.residuals(), engine.measured()
    return {
        "version": VERSION,
        "wire": engine.wire.describe(),
        "rank": engine.group.rank(),
        "world_size": dist.get_world_size(engine.group),
        "steps": engine.core.steps(),
        "order": [engine.params[i].name for i in engine.next_order()],
        "rate": network.rate,
        "latency": network.latency,
        # Nothing kept back yet: zeros, which take no memory.
        "residuals": {
            name: residuals.get(name, torch.zeros((), device="cpu").expand(shape))
            for name, shape in engine.residual_shapes().items()
        },
    }


def restore(
    engine: Engine,
    states: State | Sequence[State],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Load a state; see `FastDDP.load_sync_state_dict`. Collective.

    Args:
        check: raises a `ValueError` where the rest of the state does not fit.
    """
    group = engine.group
    rank, world = group.rank(), dist.get_world_size(group)
    device = engine.params[0].tensor.device
    task = "the state of error feedback cannot be loaded on every rank;"
    run = partial(watched, group, "the comparison of checkpoints")
    with consensus.together(group, device, task, run) as settings:
        share = deal(states, rank, world)
        check_fit(share, engine)
        _check_groups(engine, states, world)
        check()
        settings["the number of steps in the state"] = str(share.progress.steps)
    engine.resume(share.progress, share.residuals)


def _check_groups(engine: Engine, states: State | Sequence[State], world: int) -> None:
    if not engine.policy.groups or isinstance(states, Mapping):
        return
    if states[0]["residuals"] and states[0]["world_size"] != world:
        raise ValueError(
            "with groups= ranks keep back parts of different parameters of the same name, so that "
            f"what {states[0]['world_size']} ranks have kept back cannot be given to {world}; "
            "resume with as many ranks, or from the model and the optimizer alone"
        )


def deal(states: State | Sequence[State], rank: int, world: int) -> Share:
    """Return the state that rank `rank` of `world` loads from the states of the former ranks.

    The residual of old rank r goes to rank r % world. With as many ranks as before, or more, every
    rank takes at most one: the sum over ranks is kept exactly. With fewer, a rank adds up several
    in fp64 and rounds once to fp32, so that each element of the sum is off by at most 2^-24 of the
    magnitudes of those that fell together.

    Raises:
        ValueError: the states are not all those of one training.
    """
    given = [states] if isinstance(states, Mapping) else list(states)
    for state in given:
        _check_form(state)
    if isinstance(states, Mapping):
        _check_own(states, rank, world)
        mine = given
    else:
        given = _in_rank_order(given)
        mine = given[rank::world]
    first = given[0]
    residuals = {name: _sum(name, mine, like) for name, like in first["residuals"].items()}
    # Other ranks have another network between them.
    same = first["world_size"] == world
    network = Network(float(mine[0]["rate"]), float(mine[0]["latency"])) if same else Network()
    progress = Progress(int(first["steps"]), list(first["order"]), network)
    return Share(progress, residuals)


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"expects what sync_state_dict() returned, or a list of it, but got {type(state)}"
        )
    version = state.get("version", VERSION)
    if version != VERSION:
        raise ValueError(f"the state is of version {version}, but this fastsync reads {VERSION}")
    lacks = [key for key in _KEYS if key not in state]
    if lacks:
        raise ValueError(
            f"this is no state of error feedback: it lacks {', '.join(lacks)}. Pass what "
            "sync_state_dict() returned, not model.state_dict()"
        )


def _check_own(state: State, rank: int, world: int) -> None:
    if state["world_size"] != world:
        raise ValueError(
            f"the state was saved by one of {state['world_size']} ranks, but there are {world} "
            "of them here. Pass the list of the states of all old ranks, the same on every rank"
        )
    if state["rank"] != rank:
        raise ValueError(
            f"the state is that of rank {state['rank']}, but this is rank {rank}: every rank keeps "
            "back something else. Save and load one state per rank, or pass the list of all states"
        )


def _in_rank_order(states: Sequence[State]) -> list[State]:
    if not states:
        raise ValueError("expects the states of all old ranks, but got an empty list")
    by_rank = {int(state["rank"]): state for state in states}
    world = states[0]["world_size"]
    missing = sorted(set(range(world)) - set(by_rank))
    if missing or len(states) != world:
        raise ValueError(
            f"the states were saved by {world} ranks, but {len(states)} are given"
            + (f"; those of ranks {missing} are missing" if missing else "")
        )
    for key in ("world_size", "steps", "wire"):
        values = sorted({str(state[key]) for state in states})
        if len(values) > 1:
            raise ValueError(
                f"the states are not of one training: {key} is {' and '.join(values)}; pass states "
                "that all ranks saved after the same step"
            )
    for state in states:
        _check_same_names(states[0], state)
    return [by_rank[rank] for rank in range(world)]


def _check_same_names(first: State, other: State) -> None:
    odd = sorted(set(first["residuals"]) ^ set(other["residuals"]))
    if odd:
        raise ValueError(
            f"the states are not of one training: {odd[0]!r} is in that of rank {first['rank']} or "
            f"rank {other['rank']} alone"
        )


def _sum(name: str, states: Sequence[State], like: torch.Tensor) -> torch.Tensor:
    parts = [state["residuals"][name] for state in states]
    shapes = sorted({str(tuple(part.shape)) for part in (*parts, like)})
    if len(shapes) > 1:
        raise ValueError(f"the residuals of {name!r} are of different shapes: {', '.join(shapes)}")
    if len(parts) == 1:
        only: torch.Tensor = parts[0]
        return only
    if not parts:
        return torch.zeros((), dtype=torch.float32, device="cpu").expand(like.shape)
    total = torch.zeros(like.shape, dtype=torch.float64, device="cpu")
    for part in parts:
        total += part.to("cpu")
    return total.float()


def check_fit(share: Share, engine: Engine) -> None:
    """Check that the model keeps residuals of just these parameters.

    Raises:
        ValueError: it does not; names a parameter.
    """
    expected = engine.residual_shapes()
    known = {param.name for param in engine.params}
    wire = engine.wire.describe()
    for name, residual in share.residuals.items():
        if name not in known:
            raise ValueError(
                f"the state holds a residual of {name!r}, but the model has no such parameter; "
                "load it into the model that it was saved from"
            )
        if name not in expected:
            raise ValueError(
                f"the state holds a residual of {name!r}, but wire={wire!r} has no error feedback "
                "for it: what the averages lack would be lost. Use the wire that the state was "
                "saved with, or do not load it"
            )
        if tuple(residual.shape) != expected[name]:
            raise ValueError(
                f"the residual of {name!r} has shape {tuple(residual.shape)}, but the parameter "
                f"{expected[name]}; load it into the model that it was saved from"
            )
    missing = [name for name in expected if name not in share.residuals]
    if missing:
        raise ValueError(
            f"the state holds no residual of {missing[0]!r}, for which wire={wire!r} has error "
            "feedback; it was saved from another model, or with a wire without error feedback"
        )
