"""The faults that trainings meet, and where they strike: a cell is a fault at a place of a training
that synchronises in a way, among a number of ranks."""

import itertools

WAYS = ("fp32", "int8", "zero1", "zero2")
WORLDS = (2, 3, 4)
# "pieces": between two collectives of a bucket.
PLACES = ("forward", "backward", "pieces", "vote", "wrap", "checkpoint")
# As the jobs of tests/faults/fault_script.py call them; the first one is that of the cells.
FAULTS = {
    "kill -9": ("kill",),
    "SIGSTOP": ("stop",),
    "sleep": ("sleep",),
    "exception": ("raise",),
    "early exit": ("exit", "leave", "fade"),
    "skipped batch": ("skip",),
    "one step fewer": ("fewer",),
    "thaw alone": ("thaw",),
    "other shapes": ("shapes",),
    "other order": ("order",),
    "other settings": ("settings",),
    "NaN": ("nan",),
    "flipped bit": ("flip",),
    "cut link": ("cut",),
    "full disk": ("disk",),
    "no store": ("store",),
}
# Where a fault can strike; at any place, if nothing is said.
WHERE = {
    "skipped batch": ("forward", "backward"),
    "one step fewer": ("forward",),
    "thaw alone": ("vote",),
    "other shapes": ("wrap",),
    "other order": ("wrap",),
    "other settings": ("wrap",),
    "NaN": ("forward", "backward"),
    "flipped bit": ("forward", "backward"),
    "full disk": ("checkpoint",),
    "no store": ("backward", "vote", "wrap", "checkpoint"),
}
_COMPARED = "settings and parameters are compared where the model is wrapped"
# Why it cannot elsewhere.
REASONS = {
    "skipped batch": "a script leaves out a batch in its forward or backward",
    "one step fewer": "a script leaves its loop between two steps",
    "thaw alone": "a thaw takes effect in the vote on a plan",
    "other shapes": _COMPARED,
    "other order": _COMPARED,
    "other settings": _COMPARED,
    "NaN": "no gradient is computed there",
    "flipped bit": "what flips at any time is found at the next comparison, behind a backward",
    "full disk": "nothing else writes to a disk",
    "no store": "nobody needs the store there, as in a backward",
}
# Whose cells are those of tests/faults/machine_faults.py.
OUTSIDE = ("cut", "disk")


def has_pieces(way, world):
    """Return whether a bucket takes two collectives: codes do not in the
    gather form of two ranks.
    """
    return way != "fp32" and (way, world) != ("int8", 2)


def jobs():
    """Each cell that can be: fault, place, way, ranks."""
    for fault, place, way, world in itertools.product(FAULTS, PLACES, WAYS, WORLDS):
        possible = place in WHERE.get(fault, PLACES)
        if possible and (place != "pieces" or has_pieces(way, world)):
            yield FAULTS[fault][0], "loop" if fault == "one step fewer" else place, way, world


def in_matrix(value):
    """Return the column of a place: "between" or "loop" makes the others wait
    in the next forward.
    """
    renamed = {"between": "forward", "loop": "forward", "groups": "wrap", "before": "wrap"}
    renamed |= {"arrived": "wrap", "unlinked": "wrap", "connect": "wrap"}
    renamed |= {"wrapped": "wrap"}
    renamed |= {"nonfinite": "vote", "skips": "vote", "codec": "int8"}
    return renamed.get(value, value)
