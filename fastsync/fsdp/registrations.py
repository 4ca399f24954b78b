"""Notice of modules and parameters that scripts register in any module of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["registrations", "unnoticed", "watch_registrations"]


class _Registrations:
    """Return how many there have been since the first `fully_shard()`."""

    count = 0
    watched = False

    def __call__(self, *_: object) -> None:
        self.count += 1


_REGISTRATIONS = _Registrations()


def watch_registrations() -> None:
    """Count registrations from now on."""
    if not _REGISTRATIONS.watched:
        _REGISTRATIONS.watched = True
        register_module_module_registration_hook(_REGISTRATIONS)
        register_module_parameter_registration_hook(_REGISTRATIONS)


def registrations() -> int:
    """Return a number that changes when any module gets another module or parameter."""
    return _REGISTRATIONS.count


@contextmanager
def unnoticed() -> Iterator[None]:
    """Do not count what is registered inside."""
    before = _REGISTRATIONS.count
    yield
    _REGISTRATIONS.count = before
