"""Runnable examples; start with `make demo`."""
