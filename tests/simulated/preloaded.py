"""Imports of the server of ranks: the device first, then what every rank imports."""

import importlib

for name in ("tests.simulated.device", "fastsync.testing._forkserver"):
    importlib.import_module(name)
