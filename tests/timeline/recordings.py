"""Recordings made up for tests: times in milliseconds, one step after the other."""

from fastsync.timeline.data import BucketInfo, RankRecord, Run
from fastsync.timeline.moves import UnitInfo

MS = 1_000_000


def step_events(number, start, buckets, backward=(10, 50), end=60, plan=1):
    """One step's marks.

    Args:
        start: of its forward; all other times count from there.
        buckets: (ready, packed, launched, done) of each.
    """
    marks = [("forward_start", plan, 0), ("forward_end", plan, backward[0])]
    marks += [("backward_start", plan, backward[0])]
    for index, times in enumerate(buckets):
        marks += [
            (m, index, t)
            for m, t in zip(("ready", "packed", "launched", "done"), times, strict=True)
        ]
    marks += [("backward_end", plan, backward[1]), ("step_end", plan, end)]
    return [
        (number, mark, index, 1 << 20 if mark == "launched" else 0, int((start + at) * MS))
        for mark, index, at in marks
    ]


def record(rank, events, error=0):
    return RankRecord(rank, "here", error, 0, tuple(events))


def made_up_run(late=0, steps=4, error=0, names=("layer.weight", "layer.bias")):
    """Two ranks; rank 1 launches `late` ms after rank 0 in every step."""
    ranks = []
    for rank in (0, 1):
        delay = late * rank
        events = []
        for number in range(steps):
            buckets = [
                (20 + delay, 21 + delay, 21 + delay, 35 + late),
                (40 + delay, 45 + delay, 45 + delay, 58 + late),
            ]
            events += step_events(
                number, 100 * number, buckets, (10, 50 + delay), 60 + late, plan=1
            )
        ranks.append(record(rank, events, error * rank))
    plan = (BucketInfo(tuple(names), 1 << 20, "float32"), BucketInfo(("head",), 1 << 20, "float32"))
    return Run("Net", 2, "gloo", "cpu", "2", (plan,), tuple(ranks))


def unit_events(number, start, moves, backward=(12, 30), end=36):
    """One step's marks with units.

    Args:
        moves: (unit, kind, started, done, wanted, arrived) of each.
    """
    marks = [("forward_start", 0, 0), ("forward_end", 0, 10), ("backward_start", 0, backward[0])]
    for unit, kind, *times in moves:
        names = ("started", "done", "wanted", "arrived")
        marks += [(f"{kind}_{n}", unit, t) for n, t in zip(names, times, strict=True)]
    marks += [("backward_end", 0, backward[1]), ("step_end", 0, end)]
    return [
        (number, mark, index, 1 << 20 if mark.endswith("started") else 0, int((start + at) * MS))
        for mark, index, at in marks
    ]


def made_up_units(late=0, steps=3):
    """Two ranks and two units; rank 1 starts the second gather `late` ms after rank 0."""
    ranks = []
    for rank in (0, 1):
        begun = 3 + late * rank
        moves = [
            (0, "gather", 0, 2, 0, 2),
            (1, "gather", begun, 5 + late, 4 + late * rank, 6 + late),
            (1, "reduction", 24, 33, 28, 34),
        ]
        events = [e for n in range(steps) for e in unit_events(n, 100 * n, moves)]
        ranks.append(record(rank, events))
    units = (
        UnitInfo("root", ("embed.weight",), 1 << 20, "float32"),
        UnitInfo("blocks.0", ("blocks.0.weight", "blocks.0.bias"), 1 << 20, "bfloat16"),
    )
    return Run("Net", 2, "gloo", "cpu", "2", (), tuple(ranks), units=units)
