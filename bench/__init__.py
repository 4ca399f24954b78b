"""Benchmarks of gradient synchronisation: fastsync beside every variant of torch's DDP."""

import time

STARTED = time.monotonic()  # before torch is imported, which may take half a minute
