"""A rendezvous store that outlives every rank of a test, as the one of a launcher does."""

import os
import signal

from fastsync._torch import TCPStore

__all__ = ["end_store", "environment_of", "serve_store"]


def serve_store():
    """Fork a process that serves a store and nothing else; return its port and its process id."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    os.close(writer)
    port = int(os.read(reader, 16))
    os.close(reader)
    return port, process


def end_store(process):
    """End the process of a store."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def environment_of(port):
    """Return the variables by which `env://` finds a store that no rank serves."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
