"""Ranks that the tests of a file share: `run_ranks` without new processes for each call.

Not for functions that replace attributes of modules, register wire formats or module hooks, count
what a process says once, measure its memory, make device meshes of other shapes than those before
them, or end it.
"""

from fastsync.testing import ranks

_teams = {}  # by number of ranks


def run_ranks(fn, world_size, *args, **limits):
    """Return what `fn(rank, world_size, *args)` returns on each rank."""
    team = _teams.pop(world_size, None) or ranks.Team(world_size)
    results = team.call(fn, *args, **limits)
    _teams[world_size] = team
    return results


def end():
    """End the ranks; an error where one does not end as it should."""
    while _teams:
        _teams.popitem()[1].close()
