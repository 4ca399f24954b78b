"""Weights of micro-batches: gradients are sums over all ranks, divided by the sum of all weights.

The weights of a synchronised step are added up over the ranks while its backward begins, in one
small collective. The sum is there before the first gradients are packed, which its reciprocal then
scales, as 1 / ranks does otherwise. A script that gives no weight has none of this.

[Note: means that are added to]
A script that does not clear its gradients goes on with a mean: the next step has the sum of what
they stand for and of what comes, divided by the sum of all these weights. The earlier mean is
multiplied once for that. Where autograd adds to it, each rank takes an equal part of the earlier
sum, before the first backward. Where it is kept apart from what autograd makes (gradient shards),
it is multiplied once the new sum of weights is known. A gradient that is None has been cleared, and
one of zeros that was written to since, as by `zero_grad(set_to_none=False)`.

[Note: weights on a device]
The host does not wait: sum and factor stay on the device. A mistake makes all gradients of the step
NaN, and this rank raises the error later, once the host can see it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from fastsync._build.env import Env
from fastsync.faults.consensus import RankMismatchError
from fastsync.reducer.monitor import awaited, make_rendezvous

Number = float | torch.Tensor  # a tensor is 0-d, fp64, on the device of the gradients


class _Status(IntEnum):
    """State of one rank's weights in a step."""

    ABSENT = 0  # it has run out of inputs, or leaves the step out
    NONE = 1
    GIVEN = 2
    ADDED = 3  # given, and the gradients hold an earlier mean
    MISSING = 4
    NEGATIVE = 5
    NOT_FINITE = 6
    HALF_CLEARED = 7
    CHANGED = 8
    WEIGHTLESS = 9


_MISTAKES = {
    _Status.NONE: "gave none",
    _Status.ADDED: "did not clear the gradients of the last step, unlike the others",
    _Status.MISSING: "gave none for one of several backwards",
    _Status.NEGATIVE: "gave a negative one",
    _Status.NOT_FINITE: "gave NaN or infinity",
    _Status.HALF_CLEARED: "cleared some gradients of the last step and went on with others",
    _Status.CHANGED: "changed gradients of the last step, which it did not clear",
    _Status.WEIGHTLESS: "went on with gradients of a step without weights, or left out by ranks",
}
_REMEDY = (
    "Call add_weight() on every rank, once for each micro-batch, before its backward and after the "
    "last synchronised step, or on none"
)


@dataclass
class _Given:
    """Weights of some micro-batches of this rank.

    Attributes:
        total: their sum.
        count: how many there are.
        mistake: the worst in them; `mistake_there`: likewise in those on the device, 0: none.
    """

    total: Number = 0.0
    count: int = 0
    mistake: _Status = _Status.ABSENT
    mistake_there: torch.Tensor | None = None

    def add(self, other: _Given) -> None:
        self.total = self.total + other.total
        self.count += other.count
        self.mistake = max(self.mistake, other.mistake)
        there = [m for m in (self.mistake_there, other.mistake_there) if m is not None]
        self.mistake_there = torch.stack(there).amax() if there else None

    @classmethod
    def one(cls, weight: Number) -> _Given:
        """
        Raises:
            ValueError: it is not one number.
        """
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1 or weight.is_complex():
                raise ValueError(f"a weight is one real number, not {tuple(weight.shape)}")
            weight = weight.detach().reshape(()).to(torch.float64)
            if weight.device.type != "cpu":
                mistake = torch.where(weight < 0, float(_Status.NEGATIVE), 0.0)
                mistake = torch.where(weight.isfinite(), mistake, float(_Status.NOT_FINITE))
                return cls(weight, 1, mistake_there=mistake)
        weight = float(weight)
        if not math.isfinite(weight):
            return cls(weight, 1, _Status.NOT_FINITE)
        return cls(weight, 1, _Status.NEGATIVE if weight < 0 else _Status.ABSENT)


class _Mean(NamedTuple):
    """The mean of a step that has ended.

    Attributes:
        weight: the sum of its weights; None: it had none.
        held: the gradients that hold it, with their versions, by parameter; None where there is
            none.
    """

    weight: Number | None
    held: Sequence[tuple[weakref.ref[torch.Tensor], int] | None]


class SharedBatches(Protocol):
    """Batches that the ranks divide, by numbers that travel with the weights.

    Attributes:
        numbers: how many each rank sends.
    """

    numbers: int

    def mine(self) -> Sequence[float]:
        """Return this rank's numbers, at the start of a backward that synchronises."""

    def agree(self, step: int, numbers: Sequence[Sequence[float]]) -> None:
        """Take the numbers of all ranks, at the same step on each of them."""


class MeanWeights:
    """The weights that a script gives one model.

    Args:
        group: the ranks that average.
        name: the model; no other has the same.
        device: of the gradients.
        averages: returns the gradient of each parameter, or what this rank keeps of it.
        copies: by parameter, how many ranks have that and let autograd add to it; 0: autograd adds
            to something else.

    Attributes:
        group, device: as given.
        backwards: those that have begun.
        is_open: a step has begun and not ended.
        divides: what the ranks divide by numbers that travel with the weights; the same on every
            rank, in every step. None: nothing.
        waited: seconds that this rank has waited for the sums.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        device: torch.device,
        averages: Callable[[], Sequence[torch.Tensor | None]],
        copies: Callable[[int], int],
    ) -> None:
        self.group, self._rank, self._world = group, group.rank(), group.size()
        self.device, self._averages, self._copies = device, averages, copies
        self.backwards, self.waited = 0, 0.0
        self.divides: SharedBatches | None = None
        self._rendezvous = make_rendezvous(group, f"weights-{name}", Env.read().agree_timeout)
        self._have_met = False
        self._new: Number | None = None  # weight of the running step's mean; None: it has none
        self._unweighted, self._hook_divisor = 1.0 / self._world, 1.0
        self._step = 0
        self._status = _Status.NONE  # of this rank in the running step
        self.is_open = False
        self._skips = False  # this rank leaves it out
        self._mine: Number = 0.0  # what this rank has given for the last step
        self._total: Number = 0.0  # and all ranks; 0: it has no weights
        self._fresh = _Given()  # since a backward began
        self._forget()
        self._shared = torch.empty(0, device="cpu")  # the sum, then the status of each rank
        self._work: dist.Work | None = None
        self._unseen: list[tuple[torch.Event, int, torch.Tensor]] = []
        self._last: _Mean | None = None  # until the next backward begins
        if any(average is not None for average in averages()):
            self.note_mean()  # of a step before the first weight

    def _forget(self) -> None:
        """Forget the backwards since the last step, or since the gradients were cleared."""
        self._given = _Given()
        self._backwards = 0
        self._cleared = False
        self._earlier: Number | None = None  # weight of the mean that these backwards add to
        self._later: list[torch.Tensor] = []  # gradients to multiply when the sum is known

    def add(self, weight: Number) -> None:
        """Count `weight` in the next step that synchronises.

        Raises:
            RankMismatchError: the weights of a former step made no mean, on a device.
            ValueError: it is not one number.
        """
        self._raise_what_is_seen()
        self._fresh.add(_Given.one(weight))

    @property
    def has_mean(self) -> bool:
        """Return whether the gradients were left with the mean of a step that had weights."""
        return self._last is not None and self._last.weight is not None

    # --- a step

    def begin_backward(self, accumulated: bool) -> list[int]:
        """Prepare gradients that hold the last mean, before a backward adds to them.

        Args:
            accumulated: backwards have left gradients since the last synchronised step.

        Returns:
            The parameters of whose mean each rank now has a part.
        """
        now = self._averages()
        cleared = all(average is None for average in now)
        if accumulated and cleared:
            self._forget()
            self._cleared = True
        self.count_backward()
        last, self._last = self._last, None
        return [] if last is None or cleared else self._go_on(last, now)

    def drop(self) -> None:
        """Forget what has been given: nothing is trained, so that no step follows."""
        self._forget()
        self._fresh, self._cleared = _Given(), True

    def count_backward(self) -> None:
        """Note a backward that adds to no mean: what it computes is kept apart from these."""
        if self.is_open:  # the last step has failed
            self._forget()
            self._cleared, self.is_open = True, False
        self._given.add(self._fresh)
        self._fresh, self._skips = _Given(), False
        self._backwards += 1
        self.backwards += 1

    def _go_on(self, last: _Mean, now: Sequence[torch.Tensor | None]) -> list[int]:
        """Prepare the gradients that still hold the last mean. See `begin_backward`."""
        parts = []
        kept = self._kept(last, now)
        if kept and last.weight is None:
            self._given.mistake = _Status.WEIGHTLESS
        elif kept:
            assert last.weight is not None
            self._earlier = last.weight
            for index, average in kept:
                copies = self._copies(index)
                if copies == 0:
                    self._later.append(average)
                else:
                    average.mul_(last.weight / copies)
                    parts.append(index)
        return parts

    def _kept(
        self, last: _Mean, now: Sequence[torch.Tensor | None]
    ) -> list[tuple[int, torch.Tensor]]:
        """Return the gradients that still hold the last mean, by parameter."""
        kept, cleared = [], 0
        for index, (held, average) in enumerate(zip(last.held, now, strict=True)):
            if held is None:
                continue
            same = average is not None and held[0]() is average
            if average is not None and same and average._version == held[1]:
                kept.append((index, average))
                continue
            cleared += 1
            if average is not None and same and _is_known_nonzero(average):
                self._given.mistake = _Status.CHANGED
        if kept and cleared:
            self._given.mistake = _Status.HALF_CLEARED
        return kept

    def start(self, backwards: int, unweighted: float, hook_divisor: float = 1.0) -> None:
        """Start to add up the weights of all ranks. Collective.

        Args:
            backwards: backwards since the last step, under `no_sync()` too, and the running one.
            unweighted: factor of gradients where no rank has given a weight.
            hook_divisor: number that a communication hook divides by afterwards; 1: there is none.
        """
        self._unweighted, self._hook_divisor = unweighted, hook_divisor
        if not self._have_met:
            self._rendezvous.meet("the others to give weights", remedy=_REMEDY)
            self._have_met = True
        status = self._status_of(self._backwards if self._cleared else backwards)
        skips, self._skips = self._skips, False
        self._share(_Status.ABSENT if skips else status)

    def _status_of(self, backwards: int) -> _Status:
        if not self._given.count and self._earlier is None:
            return _Status.NONE
        if self._given.mistake:
            return self._given.mistake
        if self._given.count < backwards:
            return _Status.MISSING
        return _Status.GIVEN if self._earlier is None else _Status.ADDED

    def skip(self) -> None:
        """Forget what has been given for the next step, in which this rank gives no gradients."""
        self._forget()
        self._fresh, self._skips = _Given(), True

    def factors_after_skips(self, gave: Sequence[bool], contributors: Sequence[int]) -> list[float]:
        """Return what turns the gradients of a step into means of the ranks that have not left it
        out. Collective, at the end of the step.

        Args:
            gave: whether this rank has given each gradient.
            contributors: how many ranks have.

        Raises:
            RankMismatchError: no weight is left, or the mean of the step before is incomplete.
        """
        if self._status == _Status.ADDED:
            raise _no_mean(self._step, "ranks left it out, and it adds to the mean before it")
        left = torch.tensor(gave, dtype=torch.float64, device=self.device) * self._mine
        if self._world > 1:
            work = dist.all_reduce(left, group=self.group, async_op=True)
            awaited(self.group, f"the weights that are left of step {self._step}", work)
        total, weights = float(self._total), left.tolist()
        given = [weight for weight, count in zip(weights, contributors, strict=True) if count > 0]
        if total == 0:
            return [self._world / max(count, 1) for count in contributors]
        if not all(given):
            raise _no_mean(self._step, "they are zero on all ranks that did not leave it out")
        self._new = given[0] if given and len(set(given)) == 1 else None
        return [total / weight if weight else 1.0 for weight in weights]

    def shadow(self) -> None:
        """Take part in a step of the other ranks, without inputs. Collective."""
        self._share(_Status.ABSENT)
        self.scale()
        self.is_open = False

    def _share(self, status: _Status) -> None:
        self._step += 1
        self._status, self.is_open = status, True
        batches = self.divides
        more = 0 if batches is None else batches.numbers
        numbers = 1 + self._world * (1 + more)
        self._shared = torch.zeros(numbers, dtype=torch.float64, device=self.device)
        total = self._shared.narrow(0, 0, 1)
        mine = self._shared.narrow(0, 1 + self._rank, 1)
        # Numbers are values of a kernel's arguments: a copy from the host would have it wait.
        mine.fill_(float(status))
        given, there = self._given.total, self._given.mistake_there
        self._mine = given
        if isinstance(given, torch.Tensor):
            total.copy_(given)
        else:
            total.fill_(given)
        if there is not None:
            mine.copy_(torch.where(there > 0, there, mine))
        if batches is not None:
            first = 1 + self._world + self._rank * more
            self._shared[first : first + more] = torch.tensor(
                batches.mine(), dtype=torch.float64, device="cpu"
            )
        if self._world > 1:
            self._work = dist.all_reduce(self._shared, group=self.group, async_op=True)

    def scale(self) -> Number:
        """Wait for the sum, and return the factor of this step's gradients.

        Raises:
            RankMismatchError: the weights make no mean; names the ranks.
        """
        if self._work is not None:
            start = time.perf_counter()
            awaited(self.group, f"the sum of the weights of step {self._step}", self._work)
            self.waited += time.perf_counter() - start
            self._work = None
        earlier = 0.0 if self._earlier is None else self._earlier
        later = self._later
        self._forget()
        if self.device.type != "cpu":
            return self._scale_there(earlier, later)
        added, *rest = self._shared.tolist()
        statuses, rest = rest[: self._world], rest[self._world :]
        total = float(added + earlier)
        if _are_plain(statuses) and self.divides is None:
            self._new, self._total = None, 0.0
            return self._unweighted
        if problem := _problem(total, statuses):
            raise _no_mean(self._step, problem)
        self._new = self._total = total
        if self.divides is not None:
            more = self.divides.numbers
            rows = [rest[i : i + more] for i in range(0, len(rest), more)]
            self.divides.agree(self._step, rows)
        for average in later:
            average.mul_(earlier / total)
        return self._hook_divisor / total

    def _scale_there(self, earlier: Number, later: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the factor, NaN where the weights make no mean. See
        [Note: weights on a device].
        """
        total, statuses = self._shared[0] + earlier, self._shared[1:]

        def all_are(status: _Status) -> torch.Tensor:
            return ((statuses == status) | (statuses == _Status.ABSENT)).all()

        fits = all_are(_Status.GIVEN) | (statuses == _Status.ADDED).all()
        fits = fits & total.isfinite() & (total > 0)
        for average in later:
            average.mul_(earlier / total)
        facts = torch.cat((total.reshape(1), statuses))
        on_host = torch.empty(facts.shape, dtype=torch.float64, device="cpu", pin_memory=True)
        on_host.copy_(facts, non_blocking=True)
        event = torch.get_device_module(self.device).Event()
        event.record()
        self._unseen.append((event, self._step, on_host))
        self._new = None if self._status == _Status.NONE else total
        self._total = torch.where(all_are(_Status.NONE), 0.0, total)
        scale = torch.where(fits, self._hook_divisor / total, math.nan)
        return torch.where(all_are(_Status.NONE), self._unweighted, scale)

    def note_mean(self) -> None:
        """Note the gradients that hold the mean, at the end of the step."""
        if self._work is not None:
            self.scale()  # nothing had to be sent
        self.is_open = False
        ref = weakref.ref
        held = [None if a is None else (ref(a), a._version) for a in self._averages()]
        self._last = _Mean(self._new, held)

    def _raise_what_is_seen(self) -> None:
        while self._unseen and self._unseen[0][0].query():
            _, step, facts = self._unseen.pop(0)
            total, *statuses = facts.tolist()
            if not _are_plain(statuses) and (problem := _problem(total, statuses)):
                raise _no_mean(step, problem)


def _is_known_nonzero(average: torch.Tensor) -> bool:
    """Return whether any element is not zero; False on devices, where the host would wait."""
    if average.device.type != "cpu":
        return False
    values = average.coalesce().values() if average.is_sparse else average
    return bool(values.count_nonzero())


def _are_plain(statuses: Sequence[float]) -> bool:
    return set(statuses) <= {_Status.NONE, _Status.ABSENT}


def _problem(total: float, statuses: Sequence[float]) -> str:
    """Return why these weights make no mean, with the ranks; empty if they do."""
    present = set(statuses) - {_Status.ABSENT}
    if present == {_Status.ADDED} and _Status.ABSENT in statuses:
        ranks = [rank for rank, each in enumerate(statuses) if each == _Status.ABSENT]
        return f"ranks {ranks} ran out of inputs, and the others added to the mean of the last step"
    if present == {_Status.GIVEN} or present == {_Status.ADDED}:
        if math.isfinite(total) and total > 0:
            return ""
        return "they are zero on all ranks" if total == 0 else f"their sum is {total}"
    mistakes = []
    for status in sorted(present - {_Status.GIVEN}):
        ranks = [rank for rank, each in enumerate(statuses) if each == status]
        mistakes.append(f"ranks {ranks} {_MISTAKES[_Status(int(status))]}")
    return "; ".join(mistakes)


def _no_mean(step: int, problem: str) -> RankMismatchError:
    return RankMismatchError(f"the weights of step {step} make no mean: {problem}. {_REMEDY}")
