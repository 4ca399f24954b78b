"""Recordings made up for tests: times in milliseconds, one step after the other."""

from fastsync.timeline.data import BucketInfo, RankRecord, Run

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
                number, 200 * number, buckets, (10, 50 + delay), 60 + late, plan=1
            )
        ranks.append(record(rank, events, error * rank))
    plan = (BucketInfo(tuple(names), 1 << 20, "float32"), BucketInfo(("head",), 1 << 20, "float32"))
    return Run("Net", 2, "gloo", "cpu", "2", (plan,), tuple(ranks))
