"""Finds out by trying which sizes make the steps of a training faster."""
