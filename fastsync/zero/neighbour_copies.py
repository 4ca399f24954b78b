"""Shares of an optimizer's state that survive their owner, because the next rank has them, too.

[Note: the same step on two ranks]
Where ranks may die, gradients stay whole on every rank. So each rank makes the optimizer's step on
its own share and on that of the rank before it, from the same gradients and the same state: the two
copies are equal bit for bit at the end of each step's local part, and no state is ever sent. The
bytes of whole gradients are the price, (N-1)/N of the parameters' per rank and step. Sending state
would cost Adam 2/N; but the averages of a rank that dies between its backward and its step would be
gone with it, and with them what the script has done to them.

[Note: who has made a step]
When ranks die, the survivors are at different places. None of them waits in the middle of a step's
local part, so each has made a step of an optimizer or has not (`ShardedOptimizer.steps`), and they
tell each other. Where all have made as many, they cut the state anew at once: the owner, or the
rank that holds the share of one that is gone, tells all what it has of it, parameters included. So
it does not matter how far the exchange had got.

Otherwise some had gone on into the step while others waited in the vote of the backward before.
That is the only way to differ: no rank's exchange ends before all have made the step. These have
the averages, and make the step on their old shares; at its end, all cut anew.

A rank that comes back begins with nothing and offers nothing: those that have been there before
tell what they have, and the state is cut anew over all. All of those have made as many steps then,
since they take it in between two steps. fastsync/zero/state_passing.py says what it needs before.

What has been cut anew replaces the old only once all survivors are known to have it: if another
dies before that, they begin again with what they had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fastsync.reducer.monitor import gather_watched
from fastsync.zero.flat_buffer import FlatBuffer, Sharing, lay_out
from fastsync.zero.optimizer_state import described, held_state
from fastsync.zero.partition import Partition, Slice
from fastsync.zero.sharded_optimizer import ShardedOptimizer, ShardedOptimizers
from fastsync.zero.slices import State, Whole, batches, cut_value

T = TypeVar("T")

_PLACE = "the sharing of an optimizer's state among the ranks that are left"
# What a rank tells of a piece: the parameter's elements, and the state.
_Offer = tuple[torch.Tensor, State]


@dataclass(frozen=True)
class _RankState:
    """The optimizers of one rank.

    Attributes:
        taken: how many have been taken over so far; those with later numbers will be.
        steps: that each has made, by number; of those that still live.
        partitions: ownership of the shares of each; none on a rank that comes back.
    """

    taken: int
    steps: dict[int, int]
    partitions: tuple[Partition, ...]

    def steps_of(self, number: int) -> int | None:
        """Return the steps of an optimizer; None where it is gone, -1 where it has not been
        sharded.
        """
        return self.steps.get(number) if number <= self.taken else -1


class _Recut:
    """Exchange of the optimizer state that one rank needs in order to go on with other shares.

    Args:
        present: ranks that are left of those that have shares, as they were counted at the start.
        partition: ownership of the shares from then on.
        group: the process group of the owners.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        optimizer: Optimizer,
        present: Collection[int],
        partition: Partition,
        group: dist.ProcessGroup,
    ) -> None:
        self._sharded, self._optimizer = sharded, optimizer
        self._partition, self._group = partition, group
        comes_back = partition.ranks[partition.mine] not in present
        self._offered = () if comes_back else sharded.partition.offered(present)
        # By buffer: whole parameters; states of what this rank will step on; of each parameter,
        # its state without elements.
        self._values: list[list[torch.Tensor]] = []
        self._states: list[dict[Slice, State]] = []
        self._wholes: list[dict[int, State | None]] = []
        self._sharings: list[Sharing] = []
        for buffer in sharded.buffers:
            self._collect(buffer)

    def _collect(self, buffer: FlatBuffer) -> None:
        """Collect one buffer's states for the new shares. Collective."""
        sharing = self._sharded.sharing(buffer, self._partition.size)
        layout = lay_out(buffer.params, self._partition.size, sharing)
        wanted = defaultdict(list)
        for share in self._partition.kept:
            for piece in layout.owned(share):
                wanted[piece.param].append(piece)
        values: list[torch.Tensor] = []
        states: dict[Slice, State] = {}
        wholes: dict[int, State | None] = {}
        for batch in batches(buffer):
            parts: defaultdict[int, dict[Slice, torch.Tensor]] = defaultdict(dict)
            whole = Whole([buffer])
            for offer in _gather(self._offer(buffer, batch), self._group):
                for piece, (elements, state) in offer.items():
                    parts[piece.param][piece] = elements
                    if state:
                        whole.add(0, piece, state)
            whole.copy_own()
            joined = whole.finished()
            for index in batch:
                param = buffer.params[index]
                values.append(_joined_value(buffer, index, parts[index]))
                state = joined.get(param, {})
                wholes[index] = described(param, state, sharing.whole)
                for piece in wanted[index]:
                    states[piece] = {
                        n: cut_value(buffer, piece, param, v) for n, v in state.items()
                    }
        self._values.append(values)
        self._states.append(states)
        self._wholes.append(wholes)
        self._sharings.append(sharing)

    def _offer(self, buffer: FlatBuffer, batch: range) -> dict[Slice, _Offer]:
        return {
            piece: (
                buffer.delivered(piece),
                self._sharded.saved(self._optimizer, tensor),
            )
            for piece, tensor in buffer.owned.items()
            if piece.param in batch and piece.rank in self._offered
        }

    def install(self) -> None:
        """Go on with that."""
        sharded, optimizer = self._sharded, self._optimizer
        sharded.shares.gate.begin()
        sharded.take_state(optimizer)
        buffers = []
        found = zip(sharded.buffers, self._values, self._sharings, strict=True)
        for old, values, sharing in found:
            for param, value in zip(old.params, values, strict=True):
                param.data.copy_(value)
            buffers.append(FlatBuffer(old.params, self._partition, sharing))
            values.clear()
        sharded.use(self._partition, buffers)
        held = held_state(optimizer)
        for buffer, states, known in zip(buffers, self._states, self._wholes, strict=True):
            for piece, tensor in buffer.owned.items():
                if rest := sharded.take_master(tensor, states[piece]):
                    held[tensor] = rest
            sharded.learn(buffer, known)
        if not sharded.blank:
            sharded.mark_used()
        sharded.end_change(optimizer)


def _gather(mine: T, group: dist.ProcessGroup) -> list[T]:
    return [mine] if group.size() == 1 else gather_watched(mine, group, _PLACE)


def _joined_value(
    buffer: FlatBuffer, index: int, parts: Mapping[Slice, torch.Tensor]
) -> torch.Tensor:
    assert sum(piece.end - piece.begin for piece in parts) == buffer.params[index].numel()
    whole = buffer.full_like(index, buffer.params[index])
    for piece, elements in parts.items():
        buffer.cut(piece, whole).copy_(elements)
    return whole


def share_again(sharded: ShardedOptimizer, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Copy what the owner of each share has been given to its second holder. Collective."""
    with torch.no_grad():
        _Recut(sharded, optimizer, sharded.partition.ranks, sharded.partition, group).install()


class Neighbours:
    """The optimizers of one model, when ranks die.

    Args:
        sharded: the optimizers.

    Attributes:
        lost: owner and second holder of each share that no rank has any more, as far as `prepare`
            has found; as the ranks were counted at the start.
    """

    def __init__(self, sharded: ShardedOptimizers) -> None:
        self._owner = sharded
        self._partition = sharded.partition  # of the ranks that go on
        self._late: frozenset[int] = frozenset()
        self._prepared: list[_Recut] = []
        self.lost: list[tuple[int, int]] = []

    def prepare(self, ranks: tuple[int, ...], mine: int, present: Collection[int]) -> None:
        """Collect what this rank needs of the state to go on with `ranks`. Collective.

        They are those of the engine's process group. Nothing changes before `install`.

        Args:
            mine: this one's place among them.
            present: those of them that have been there before.
        """
        self._partition = replace(self._owner.partition, ranks=ranks, mine=mine)
        known = self._owner.known()
        steps = {sharded.number: sharded.steps for _, sharded in known}
        partitions = tuple(sharded.partition for _, sharded in known if ranks[mine] in present)
        states = _gather(_RankState(self._owner.taken, steps, partitions), self._owner.engine.group)
        found = {pair for each in states for of in each.partitions for pair in of.lost(present)}
        self.lost = sorted(found)
        if self.lost:
            return
        common, self._late = _compared(states)
        self._prepared = self._recut(common, present)

    def prepare_late(self) -> None:
        """Collect the state of the optimizers that `prepare` has left for later. Collective."""
        self._late, late = frozenset(), self._late
        self._prepared = self._recut(late, self._partition.ranks)

    def install(self) -> None:
        """Go on with what has been collected, once all ranks are known to have it."""
        with torch.no_grad():
            for recut in self._prepared:
                recut.install()
        self._prepared = []
        self._owner.delivery.late = self._late
        if not self._late:  # what is still to be taken over here has been with the others' shares
            self._owner.partition = self._partition
        self._owner.meet_again()

    def _recut(self, numbers: Collection[int], present: Collection[int]) -> list[_Recut]:
        """Collect the states of these optimizers for the new shares. Collective."""
        group, partition = self._owner.engine.group, self._partition
        known = {sharded.number: (sharded, optimizer) for optimizer, sharded in self._owner.known()}
        with torch.no_grad():
            return [_Recut(*known[n], present, partition, group) for n in sorted(numbers)]


def _compared(states: Iterable[_RankState]) -> tuple[list[int], frozenset[int]]:
    """Return the numbers of optimizers with the same steps on all ranks, and those of the others.

    None of those that a rank has seen the end of: no rank steps with them any more.
    """
    states = list(states)
    common, late = [], set()
    for number in sorted({number for each in states for number in each.steps}):
        steps = {each.steps_of(number) for each in states}
        if None in steps:
            continue
        if len(steps) == 1:
            common.append(number)
        else:
            late.add(number)
    return common, frozenset(late)
