"""Runs a command that does not outlive whoever asked for it: `python guard.py COMMAND ...`.

Whoever asks holds the other end of our standard input and starts us as the leader of a process
group. However he ends, by a signal that nobody handles too, the kernel closes his end. Then the
whole group ends: the command, and what it has started.
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
