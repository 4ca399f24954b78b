"""elastic_races, whose ranks end one after another, past torch's static destructors by then.

A handler of the C library's exit that is registered before torch is loaded runs after those.
"""

import ctypes
import importlib

_SECONDS = 0.5  # between two ranks


class Timespec(ctypes.Structure):
    """Argument of nanosleep()."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_at_the_end():
    """Register a sleep at exit, and return its duration, which the process may still change."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    place = libc.malloc(ctypes.sizeof(Timespec))  # the interpreter would free its own
    handler = ctypes.cast(libc.nanosleep, ctypes.c_void_p)
    libc.__cxa_atexit(handler, ctypes.c_void_p(place), None)
    pause = Timespec.from_address(place)
    pause.seconds, pause.nanoseconds = 0, 0
    return pause


def main():
    pause = sleep_at_the_end()
    races = importlib.import_module("tests.elastic.elastic_races")

    def train(rank, *given):
        seconds, rest = divmod(rank * _SECONDS, 1)
        pause.seconds, pause.nanoseconds = int(seconds), int(rest * 1e9)
        races.train(rank, *given)

    races.main(train)


if __name__ == "__main__":
    main()
