"""The ranks and their rendezvous store: what they tell rank 0, and what it tells them.

Rank 0 alone reads what all have written, so that the cost grows with the number of ranks and not
with its square. Each exchange has a deadline: ranks that are gone cost the others that much.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed.rendezvous import rendezvous

from fastsync.ranks.clocks import Mailbox
from fastsync.torch_private import Store

__all__ = ["Team", "present"]

T = TypeVar("T")


class Team:
    """This rank among the others.

    Attributes:
        rank, world: this one's number, and how many there are.
        store: shared by all ranks.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._timeout = timeout

    @staticmethod
    def meet(timeout: float) -> Team:
        """Finds the store that the launcher's variables name.

        Args:
            timeout: seconds for this, and for each exchange.

        Raises:
            RuntimeError, ValueError: there is none, or not all ranks came.
        """
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return Team(store, rank, world, timeout)

    def mail(self, topic: str, timeout: float | None = None) -> Mailbox:
        """A mailbox for one exchange, alike on all ranks."""
        return Mailbox(self.store, f"doctor/{topic}", timeout or self._timeout)

    def gather(
        self, topic: str, text: str, timeout: float | None = None, absent: Container[int] = ()
    ) -> list[str | None]:
        """What every rank says, on rank 0; None for ranks that did not come in time.

        Args:
            absent: ranks that are not waited for.

        Returns:
            On the other ranks, nothing.
        """
        mail = self.mail(topic, timeout)
        mail.put(str(self.rank), text)
        if self.rank != 0:
            return []
        return [None if r in absent else _taken(mail, r) for r in range(self.world)]

    def tell(self, topic: str, text: str, timeout: float | None = None) -> str:
        """What rank 0 says, on every rank.

        Rank 0 may have waited for ranks that are gone before it speaks, so the others wait longer.

        Raises:
            RuntimeError: it did not say anything in time.
        """
        mail = self.mail(topic, 2 * (timeout or self._timeout) + 5)
        if self.rank == 0:
            mail.put("said", text)
            return text
        return mail.read("said").decode()

    def part(self) -> None:
        """Rank 0, which may serve the store, leaves last."""
        try:
            self.gather("parting", "")
        except RuntimeError:
            return  # the store has gone, so nobody waits for it


def _taken(mail: Mailbox, rank: int) -> str | None:
    try:
        return mail.take(str(rank)).decode()
    except RuntimeError:
        return None


def present(told: Sequence[T | None]) -> dict[int, T]:
    """By rank, what those said that came."""
    return {rank: it for rank, it in enumerate(told) if it is not None}
