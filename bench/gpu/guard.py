"""Runs a command that ends with the process that started it: `python guard.py COMMAND ...`.

The starting process holds the other end of our standard input and starts us as the leader of a
process group. However it ends, even by a signal that it cannot handle, the kernel closes its end.
Then the whole group ends: the command, and all that it has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _end_with_asker() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # The command handles an interrupt of the group; a handler, unlike SIG_IGN, is not inherited.
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_end_with_asker, daemon=True).start()
    sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
