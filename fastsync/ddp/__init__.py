"""Checks on every rank of what a script asks for, and the objects that torch's front drives."""
