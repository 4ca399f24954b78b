"""Benchmarks of gradient synchronisation: fastsync beside every variant of torch's DDP."""
