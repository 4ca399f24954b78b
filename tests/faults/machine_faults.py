"""Cells of faults outside of a rank's process: its machine's link is cut, or its disk is full."""

import tempfile

from fastsync.testing import run_ranks
from tests.faults.catching_script import LAYERS
from tests.faults.cut_link import train_apart
from tests.faults.fault_endings import TOGETHER, WARN_AFTER, WARNED
from tests.faults.test_full_disk import FULL, saved_in_vain, undisturbed

OPTIONS = {"fp32": {}, "int8": {"wire": "int8"}, "zero1": {"zero": 1}, "zero2": {"zero": 2}}


def cell_of(job):
    """Return what a cell has shown, in the form of tests/faults/fault_cells.py."""
    return {"cut": of_cut_link, "disk": of_full_disk}[job[0]](job)


def of_cut_link(job):
    """Run a job whose last rank cannot be reached, which the others say."""
    _, place, way, world = job
    seen, logs = train_apart(["cut", OPTIONS[way], place], patience(place, way), world=world)
    cut, struck = world - 1, seen[-1]["struck"]
    errors = [each for each in seen if each["error"]]
    named = [each["ranks"] == [cut] for each in seen[:-1]]
    named.append(says_whom_it_cannot_reach(seen[-1], place, way))
    placed = [_is_placed(each, place, way) for each in seen[:-1]]
    warned = [float(found[2]) for log in logs[:-1] for found in WARNED.finditer(log)][:1]
    late = [each for each in warned if not WARN_AFTER <= each <= WARN_AFTER + 1]
    wrong = {
        "rank": "" if len(errors) == world and all(named) else f"{seen}",
        "place": "" if all(placed) else f"{seen}",
        "warning": "" if warned and not late else f"{logs}",
        "weights": "" if _equal([each["weights"] for each in seen]) else "unequal weights",
    }
    return {
        "job": job,
        "wrong": {what: text for what, text in wrong.items() if text},
        "seconds": [round(_seconds(each, struck), 4) for each in seen[:-1]],
        "warned": warned,
        "steps": [len(each["weights"]) for each in seen],
    }


def _seconds(seen, struck):
    """From the cut to a rank's error, or from when it came to wait."""
    return min(seen["at"] - struck, seen["waited"] or seen["at"] - struck)


def needs_store(place, way):
    """Return whether ranks meet in the store when one is cut off, to collect what zero shares."""
    return place == "checkpoint" and way.startswith("zero")


def patience(place, way):
    """Variables that have a rank give up the store before the timeout of the test."""
    return {"FASTSYNC_LOST_AFTER": "5"} if needs_store(place, way) else {}


def says_whom_it_cannot_reach(seen, place, way):
    """The rank that is cut off: other ranks, or the store."""
    if needs_store(place, way):
        return "cannot reach the rendezvous store at " in seen["text"]
    others = seen["ranks"] or ()
    return seen["error"] == "SyncFault" and bool(others) and max(others) < seen["rank"]


def _is_placed(seen, place, way):
    """Return whether an error says where its rank waits."""
    if place in TOGETHER:
        return f"in {TOGETHER[place][0]}." in seen["text"]
    # What buckets before the cut have sent may still be under way.
    buckets = {"backward": {0, 1, 2}, "pieces": set(range(LAYERS))}.get(place, {0})
    return way.startswith("zero") or seen.get("bucket") in buckets


def of_full_disk(job):
    """Every rank gets the error of the one that cannot write, and trains on with equal weights."""
    _, _, way, world = job
    options = dict(OPTIONS[way])
    stage = options.pop("zero", 0)
    wanted = run_ranks(undisturbed, world, stage, options)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(saved_in_vain, world, stage, options, folder)
    wrong = {}
    for (text, weights, seems_whole, _), sound in zip(found, wanted, strict=True):
        if f"ranks:dict_keys([{FULL}])" not in text or "No space left" not in text:
            wrong["rank"] = text
        if seems_whole or not all((a == b).all() for a, b in zip(weights, sound, strict=True)):
            wrong["weights"] = "other weights, or what a reader could take for a checkpoint"
    seconds = [round(seconds, 4) for *_, seconds in found]
    return {"job": job, "wrong": wrong, "seconds": seconds, "warned": [], "steps": []}


def _equal(weights):
    shortest = min(map(len, weights))
    return all(each[:shortest] == weights[0][:shortest] for each in weights)
