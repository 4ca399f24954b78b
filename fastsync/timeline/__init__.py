"""Recorded timelines: marks of real steps, what they show, and the command that shows them."""

from fastsync.timeline.command import main

__all__ = ["main"]
