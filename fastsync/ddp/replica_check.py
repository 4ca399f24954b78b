"""Comparison, bit for bit, of what all ranks should have alike: parameters, and averages of
gradients. Parameters of a group are compared among its ranks.

A flipped bit in one rank's memory raises no error, and each step that follows carries it on. So at
the end of every so many synchronised backwards each rank digests what it has, and the ranks compare
one number of all of it (csrc/reducer/reducer.cpp). Only where they differ is this module
called: the digests of single tensors travel, which tell the parameter and, by majority, the ranks.

Nothing is under way then, and the optimizer has not stepped yet: what is repaired here has done no
more harm than to this rank's part of one average.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fastsync._torch import without_modes
from fastsync.config.fault_policies import ReplicaPolicy
from fastsync.faults.wording import name_ranks
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import explained, gather_watched, watched, watched_call
from fastsync.reducer.optimizer_hooks import StepWatcher, watch_steps
from fastsync.reducer.weak_calls import weakly

_log = logging.getLogger("fastsync")
_PLACE = "the comparison of what all ranks should have"
_ABSENT = 0  # the digest of a gradient that is not there, or not compared


class ReplicaError(RuntimeError):
    """The ranks hold different parameters, or different averages of gradients.

    Attributes:
        parameters: names, in the order of the model.
        ranks: by parameter, those that differ from the majority; all of them where there is none.
        step: after which the ranks were compared, counted from 1.
    """

    def __init__(
        self, message: str, parameters: list[str], ranks: list[list[int]], step: int
    ) -> None:
        super().__init__(message)
        self.parameters, self.ranks, self.step = parameters, ranks, step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.parameters, self.ranks, self.step)


@dataclass(frozen=True)
class _Finding:
    """A tensor that is not the same on all ranks.

    Attributes:
        index: index of the parameter.
        what: a description of the tensor.
        tensor: this rank's tensor; None where it has none, which is not repaired.
        ranks: those that should have it alike.
        wrong: those of them that differ from the majority; all where there is none.
        source: the first rank of the majority; None where there is none, or it has no such tensor.
    """

    index: int
    what: str
    tensor: torch.Tensor | None
    ranks: list[int]
    wrong: list[int]
    source: int | None


class ReplicaGuard(StepWatcher):
    """Compares what the ranks of an engine have.

    Args:
        engine: engine of the parameters and gradients.
        policy: when, and what becomes of a difference.
    """

    def __init__(self, engine: Engine, policy: ReplicaPolicy) -> None:
        self._engine, self._policy = engine, policy
        # In the order of their first steps.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._groups = [engine.group_of(param) for param in engine.params]  # by parameter
        self._parts = _parts_of(engine)
        self._compare_every(policy.every)
        watch_steps(self)

    def _compare_every(self, steps: int) -> None:
        """Let the reducer compare each part of the ranks that should have something alike."""
        rank = self._engine.group.rank()
        sizes: list[int] = []
        mine: list[int] = []  # this rank's part, by group
        for parts in self._parts:
            mine.append(len(sizes) + next(i for i, part in enumerate(parts) if rank in part))
            sizes += map(len, parts)
        sets = [mine[number] for number in self._groups]
        self._engine.core.compare_every(steps, weakly(self.on_difference), sizes, sets)

    def after_step(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(optimizer, None)

    def on_difference(self, digests: Sequence[int]) -> None:
        """Find, report and perhaps repair a difference, at the end of a backward. Collective.

        Args:
            digests: digests of this rank's parameters, then of its averages.

        Raises:
            ReplicaError: the policy repairs nothing, or no rank knows how.
        """
        # Without the modes of the backward that has just ended.
        with without_modes(), torch.no_grad(), explained(self._engine.group, _PLACE):
            findings = self._locate(self._everyones(digests))
            step = self._engine.core.steps()
            if not self._policy.repair or any(f.source is None for f in findings):
                raise self._error(findings, step)
            for finding in findings:
                self._repair(finding)
        self._say(findings, step)

    def _everyones(self, digests: Sequence[int]) -> list[list[int]]:
        group = self._engine.group
        mine = torch.tensor(digests, dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        watched(group, _PLACE, partial(dist.all_gather, rows, mine, group=group, async_op=True))
        return [row.tolist() for row in rows]

    @property
    def _device(self) -> torch.device:
        return self._engine.params[0].tensor.device

    def _locate(self, rows: Sequence[Sequence[int]]) -> list[_Finding]:
        findings = []
        for place, digests in enumerate(zip(*rows, strict=True)):
            is_average, index = divmod(place, len(self._groups))
            for ranks in self._parts[self._groups[index]]:
                its = {rank: digests[rank] for rank in ranks}
                if len(set(its.values())) > 1:
                    findings.append(self._finding(index, bool(is_average), its))
        return sorted(findings, key=lambda finding: finding.index)

    def _finding(self, index: int, is_average: bool, digests: Mapping[int, int]) -> _Finding:
        """Return a tensor that is not the same on the ranks of `digests`.

        Args:
            digests: by rank.
        """
        name, param = self._engine.params[index].name, self._engine.params[index].tensor
        kind = "the average gradient of parameter" if is_average else "parameter"
        held = param.grad if is_average else param
        ((digest, count),) = Counter(digests.values()).most_common(1)
        known = 2 * count > len(digests)
        wrong = [rank for rank, other in digests.items() if other != digest or not known]
        # A tensor that some rank lacks cannot be sent to it in place.
        whole = known and _ABSENT not in digests.values()
        source = next(rank for rank, its in digests.items() if its == digest) if whole else None
        what = f"{kind} {name!r}"
        if self._groups[index]:
            what += f", which {name_ranks(list(digests))} should have alike"
        return _Finding(index, what, held, list(digests), wrong, source)

    def _error(self, findings: Sequence[_Finding], step: int) -> ReplicaError:
        first, *others = findings
        differing = f"{name_ranks(first.wrong)} {'differs' if len(first.wrong) == 1 else 'differ'}"
        more = f", and {len(others)} more tensors differ" if others else ""
        if len(first.wrong) < len(first.ranks):
            text = f"{differing} from the other ranks in {first.what}"
            remedy = "A rank that differs again and again has a broken machine"
        else:
            text = f"{differing} from each other in {first.what}"
            remedy = "No value has a majority, so nobody can say which ranks are right"
        remedy += ". Restart from a checkpoint"
        if not self._policy.repair and all(f.source is not None for f in findings):
            remedy += (
                ", or have ranks take over what most of them have: "
                "replicas=fastsync.ReplicaPolicy(repair=True)"
            )
        return ReplicaError(
            f"after step {step}, {text}{more}. A bit was flipped, or a script changed one rank "
            f"alone. {remedy}",
            [self._engine.params[finding.index].name for finding in findings],
            [finding.wrong for finding in findings],
            step,
        )

    def _repair(self, finding: _Finding) -> None:
        """Copy what the majority has, and its optimizers' state, to its ranks. Collective there."""
        tensor, rank = finding.tensor, self._engine.group.rank()
        if rank not in finding.ranks:
            return
        assert tensor is not None
        flat = tensor.detach().resolve_conj().resolve_neg().clone().reshape(-1).contiguous()
        group, source = self._sender(finding)
        bits = flat.view(torch.uint8)
        send = partial(dist.broadcast, bits, group_src=source, group=group, async_op=True)
        watched(group, _PLACE, send)
        is_wrong = rank in finding.wrong
        if is_wrong:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.shape))
        is_shared = self._engine.policy.zero.stage > 0 and not self._groups[finding.index]
        if finding.what.startswith("parameter") and not is_shared:
            self._repair_states(finding, is_wrong)

    def _sender(self, finding: _Finding) -> tuple[dist.ProcessGroup, int]:
        """Return the group of a finding's ranks, and the place of its source in it."""
        assert finding.source is not None
        whole, number = self._engine.group, self._groups[finding.index]
        if number == 0:
            return whole, finding.source
        group = self._engine.policy.groups[number - 1].process_group
        return group, dist.get_group_rank(group, dist.get_global_rank(whole, finding.source))

    def _repair_states(self, finding: _Finding, is_wrong: bool) -> None:
        """Repair the state of the optimizer, which may hold what corrupted the parameter."""
        param = self._engine.params[finding.index].tensor
        states = [o.state[param] for o in self._optimizers if param in o.state]
        told: list[Any] = [[_on_host(state) for state in states]]
        group, source = self._sender(finding)
        send = partial(
            dist.broadcast_object_list, told, group_src=source, group=group, device=self._device
        )
        watched_call(group, _PLACE, send)
        if is_wrong:
            for mine, theirs in zip(states, told[0], strict=False):
                _copy_state(mine, theirs)

    def _say(self, findings: Sequence[_Finding], step: int) -> None:
        """Report the repair on rank 0, and on the ranks that were repaired."""
        rank = self._engine.group.rank()
        for finding in findings:
            if rank == 0 or rank in finding.wrong:
                _log.warning(
                    "fastsync: after step %d, %s differed from the other ranks in %s, and took "
                    "over what rank %d has. A rank that differs again and again has a broken "
                    "machine",
                    step,
                    name_ranks(finding.wrong),
                    finding.what,
                    finding.source,
                )


def _parts_of(engine: Engine) -> list[list[list[int]]]:
    """Return the ranks that have parameters alike: of the model, and by group, in parts.

    Collective with groups.
    """
    found = [[list(range(engine.group.size()))]]
    mine = [group.ranks for group in engine.policy.groups]
    everyones = gather_watched(mine, engine.group, _PLACE) if mine else []
    for number in range(len(mine)):
        parts: dict[tuple[int, ...], list[int]] = {}
        for rank, ranks_of in enumerate(everyones):
            parts.setdefault(ranks_of[number], []).append(rank)
        found.append(list(parts.values()))
    return found


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def _copy_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Copy `theirs` into `mine`, in place where possible: the tensors may be in use elsewhere."""
    for name, value in theirs.items():
        own = mine.get(name)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            own.copy_(value)
        else:
            mine[name] = value
