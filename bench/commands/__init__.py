"""The commands of `python -m bench`: one module for each, whose `main` runs it."""
