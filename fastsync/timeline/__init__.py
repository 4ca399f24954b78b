"""Recorded timelines: marks of real steps, what they show, and the command that shows them."""
