"""Trainings in which one rank has a fault, at a place or after a time that are drawn."""
