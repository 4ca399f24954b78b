"""Notice of modules and parameters that scripts register in any module of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class _Registrations:
    """Counts them, from the first look on."""

    def __init__(self) -> None:
        self.count = 0
        register_module_module_registration_hook(self._add)
        register_module_parameter_registration_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


_counted = cache(_Registrations)


def registrations() -> int:
    """Return a number that changes when any module gets another module or parameter."""
    return _counted().count


@contextmanager
def unnoticed() -> Iterator[None]:
    """Do not count what is registered inside."""
    before = registrations()
    yield
    _counted().count = before
