"""How trainings with a fault may end: what `check` demands of a job of fault_script.py."""

import json
import re
from itertools import pairwise
from pathlib import Path

from tests.faults.fault_script import AT, FAULTY, LAYERS, STEPS

WARN_AFTER = 1.0  # seconds: FASTSYNC_STALL_WARN of the jobs
# A rank that is ahead with its optimizer first lets the others read its state: a wait of its own.
WARNED = re.compile(r"fastsync: rank (\d+) has waited ([\d.]+) s (?!in the next change)")
UNITS = ("zero3", "fsdp", "blind3")
STALLS = ("stop", "sleep")
# What the error calls the place where the others wait, and the phase of the rank that is late.
TOGETHER = {
    "wrap": ("the wrapping of the model", "wrapping"),
    "groups": ("the making of a process group (codes)", "wrapping"),
    "vote": ("the vote on a plan", "planning"),
    "skips": (f"the count of the ranks that do not skip step {AT + 1}", "backward"),
}


def name_of(job):
    return "-".join(map(str, job))


class Ending:
    """Results of the ranks of a job, by rank.

    Attributes:
        stuck: ranks that had to be ended.
        ranks: their results and errors; None where one could not say.
        notes: what they noted as they went.
    """

    def __init__(self, folder, job, stuck):
        self.stuck = stuck
        files = [Path(folder, f"{name_of(job)}-{rank}.json") for rank in range(job[3])]
        self.ranks = [json.loads(f.read_text()) if f.exists() else None for f in files]
        self.logs = [f.with_suffix(".log").read_text(errors="replace") for f in files]
        self.notes = [_lines(f.with_suffix(".notes")) for f in files]
        self.others = [seen for rank, seen in enumerate(self.ranks) if rank != FAULTY]

    def __str__(self):
        return "\n".join(f"{seen}\n{log}" for seen, log in zip(self.ranks, self.logs, strict=True))

    def weights(self):
        """By rank, a digest of them after each step that it has finished."""
        return [[n["weights"] for n in notes if "weights" in n] for notes in self.notes]

    def struck(self):
        """When the fault began; None where nothing says."""
        times = [n["struck"] for n in self.notes[FAULTY] if "struck" in n]
        return times[0] if times else None

    def warnings(self):
        """Seconds after which the rank that speaks for all has warned."""
        return [[float(found[2]) for found in WARNED.finditer(log)] for log in self.logs]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(job, ending):
    """Raise AssertionError where a job has ended in another way than it should."""
    check_text(job, ending)
    check_place(job, ending)
    check_state(ending)


def check_text(job, ending):
    """The errors are those of the fault, and name the rank."""
    fault, place, wrapper, _ = job
    check_hangs(job, ending)
    if wrapper == "blind3":
        check_blind(job, ending)
    elif fault in STALLS and place == "nonfinite":
        check_meeting(job, ending)
    elif fault in ALIKE:
        check_alike(job, ending)
    elif fault == "store":
        check_store(job, ending)
    else:
        check_named(ending)
        kind = check_absence if place == "before" else KINDS[fault]
        kind(job, ending)


def check_place(job, ending):
    """The others wait for a bucket that the faulty rank has not sent, or not wholly."""
    if job[2] in UNITS:
        for seen in ending.others:
            parameters = check_unit(job, seen, ending)
            assert job[2] == "blind3" or seen["parameters"] == parameters, str(ending)
        return
    awaited = buckets_of(job)
    for seen in ending.others if awaited is not None else ():
        if seen["error"] == "RuntimeError":  # whose text has all that is known
            assert any(f"bucket {b} of {LAYERS} " in seen["text"] for b in awaited), str(ending)
            continue
        assert seen["bucket"] in awaited, str(ending)
        if seen["bucket"] >= 0:
            layer = f"layers.{LAYERS - 1 - seen['bucket']}"
            assert set(seen["parameters"]) == {f"{layer}.weight", f"{layer}.bias"}, str(ending)
            assert f"KiB) of step {step_of(job)}." in seen["text"], str(ending)
            size = "16.3 KiB" if job[2] == "fp32" else " KiB"  # a layer's, or some of it
            assert size in seen["text"], str(ending)


def sharded(job):
    return job[2].startswith("zero")


def buckets_of(job):
    """Return the buckets in which the others may wait; -1: elsewhere; None: not the same for all.

    A rank that has its fault instead of collecting its optimizer's state is missed in the next
    step: as long as its process runs, a thread of it gives the others what they collect.

    In a backward the faulty rank fails between the buckets 1 and 2. With two collectives per bucket
    the worker of each other rank waits for the first of bucket 2 before it begins the second of
    bucket 1, if it has come to bucket 2 by then.
    """
    fault, place, wrapper, world = job
    halves = wrapper == "int8" and world > 2
    if fault not in KINDS or fault == "thaw" or place == "nonfinite":
        return None
    if place == "between" and sharded(job):
        return {-1}
    if place == "fetch":  # or in the next step, where a rank has got its answer before
        return {-1, 0}
    if place in ("forward", "between", "checkpoint", "loop", "wrapped"):
        return {0}
    if place == "backward":
        return {1, 2} if halves else {2}
    if place == "pieces":
        coded = {0} if fault == "sleep" or wrapper == "codec" else {1, 2}
        return {-1} if sharded(job) else coded
    return {-1}


def step_of(job):
    """The step whose bucket the others wait for."""
    fault, place = job[:2]
    if place == "wrapped":
        return 1
    if fault == "fewer" or (fault == "skip" and place == "forward"):
        return STEPS
    after = place in ("between", "checkpoint", "fetch") or (fault, *job[1:3]) == (
        "sleep",
        "pieces",
        "int8",
    )
    return AT + 2 if after else AT + 1


def check_state(ending):
    """Ranks that have finished as many steps have the same weights after each of them."""
    for one, other in pairwise(sorted(ending.weights(), key=len)):
        assert one == other[: len(one)], f"unequal weights\n{ending}"


def check_hangs(job, ending):
    allowed = {FAULTY} if job[0] in STALLS else set()
    assert set(ending.stuck) <= allowed, f"ranks {ending.stuck} hang\n{ending}"


def check_named(ending):
    """Every other rank raised the error that names the faulty one."""
    for seen in ending.others:
        assert seen.get("error") == "SyncFault", str(ending)
        assert seen["ranks"] == [FAULTY], str(ending)
        assert f"rank {FAULTY}" in seen["text"], str(ending)


def check_death(job, ending):
    how = "was killed by SIGKILL" if job[0] == "kill" else "exited with code 3"
    for seen in ending.others:
        assert how in seen["reason"] or "ended without a word" in seen["reason"], str(ending)
        ended = rf"rank {FAULTY} ({how}|ended without a word)"
        assert re.search(ended, seen["text"]), str(ending)


def check_raise(job, ending):
    for seen in ending.others:
        assert "BadBatch: bad batch (fault_script.py:" in seen["text"], str(ending)
        assert f"rank {FAULTY} raised" in seen["text"], str(ending)


def check_leaving(job, ending):
    for seen in ending.others:
        assert f"rank {FAULTY} ended its script" in seen["text"], str(ending)
        assert ("join()" in seen["text"]) == (job[2] not in UNITS), "which zero=3 does not have"


def check_skip(job, ending):
    """Check that the next forward reports a backward that was left half-way."""
    if job[1] == "forward":
        check_leaving(job, ending)
        return
    for seen in ending.others:
        assert f"rank {FAULTY} raised" in seen["text"], str(ending)
        assert "the previous backward stopped half-way" in seen["text"], str(ending)


def check_stall(job, ending):
    """One rank warns for all, again after three times as long, and all name the rank at the end.

    A rank that waits for shards of an optimizer's state does so alone, and warns for itself.
    """
    fault, place, wrapper, _ = job
    alone = place == "fetch" or (place == "between" and wrapper in ("zero1", "zero2"))
    warned, *more = [log for log in ending.logs if WARNED.search(log)]
    assert not more or alone, str(ending)
    assert f"rank {FAULTY} is {'stopped' if fault == 'stop' else 'late'}" in warned, str(ending)
    assert fault == "stop" or "in fail" in warned, "the stack of the rank that sleeps"
    coding = "; its codec has been at work for " in warned
    assert coding == ((fault, wrapper) == ("sleep", "codec")), str(ending)
    waits = next(waits for waits in ending.warnings() if waits)
    assert len(waits) == 2, str(ending)
    assert waits[0] >= WARN_AFTER and waits[1] >= 3 * WARN_AFTER, str(ending)
    text, phase = TOGETHER.get(place, ("", None))
    text = "of unit 'layers." if wrapper in UNITS else text
    for seen in ending.others:
        assert text in seen["text"] and text in warned, str(ending)
        assert phase in (None, seen["phase"]), str(ending)
        assert fault == "stop" or "in fail" in seen["text"], str(ending)


def check_absence(job, ending):
    """Check a rank that has not begun to wrap the model: only the store knows of it."""
    for seen in ending.others:
        assert f"rank {FAULTY}, which has not begun to wrap a model" in seen["text"], str(ending)
        assert (seen["phase"], seen["reason"]) == ("", "has not come"), str(ending)
    before = [log.partition("Traceback")[0] for log in ending.logs]
    warned = [text for text in before if "fastsync: rank 0 has waited" in text]
    assert len(warned) == (job[0] != "kill"), str(ending)


def check_meeting(job, ending):
    """Check the errors where the rendezvous store knows which ranks have come."""
    for seen in ending.others:
        assert (seen["error"], seen["ranks"]) == ("SyncFault", [FAULTY]), str(ending)
        assert f"ranks [{FAULTY}] did not come" in seen["text"], str(ending)
    if job[0] == "sleep":
        assert f"fastsync:   rank {FAULTY} is late" in ending.logs[0], str(ending)
        assert "in fail" in ending.logs[0], str(ending)


def check_alike(job, ending):
    """Check that all ranks raise the same error where all can know the same."""
    assert {seen["error"] for seen in ending.ranks} == {ALIKE[job[0]]}, str(ending)
    assert all("rank" in s["text"] and str(FAULTY) in s["text"] for s in ending.ranks), str(ending)
    if job[0] == "flip":
        both = [0, 1]  # no rank can say which one is right
        for seen in ending.ranks:
            assert seen["ranks"] == [both if job[3] == 2 else [FAULTY]], str(ending)
            assert seen["parameters"] == ["layers.0.weight"], str(ending)


def check_thaw(job, ending):
    assert "did not come" in ending.ranks[FAULTY]["text"], str(ending)
    for seen in ending.others:
        assert "to train the same parameters" in seen["text"], str(ending)


def check_store(job, ending):
    """By the rank that needs it, and the others repeat it. A training in between needs none, but to
    write what zero shares."""
    if job[1] in ("backward", "checkpoint") and not sharded(job):
        assert all(seen["weights"] == ending.ranks[0]["weights"] for seen in ending.ranks)
        assert all(len(weights) == STEPS for weights in ending.weights()), str(ending)
        return
    for seen in ending.ranks:
        assert "cannot reach the rendezvous store at 127.0.0.1:" in seen["text"], str(ending)


def check_unit(job, seen, ending):
    """An error tells which unit was waited for, when, and its parameters."""
    step = AT + 1 if job[1] in ("forward", "backward") else AT + 2
    if job[1] not in ("forward", "backward", "between", "loop"):
        return seen["parameters"]
    moment = "backward" if job[1] == "backward" else "forward"
    kind = "gather|reduction" if moment == "backward" else "gather"
    params = r"2 parameters, 'layers\.\2\.weight' to 'layers\.\2\.bias', 16\.2 KiB"
    layer = rf"unit 'layers\.(\d)' \({params}\)"
    if job[0] == "fewer":
        step = STEPS
    found = re.search(rf"the ({kind}) of {layer} in the {moment} of step {step}\b", seen["text"])
    assert found, str(ending)
    return [f"layers.{found[2]}.{part}" for part in ("weight", "bias")]


def check_blind(job, ending):
    """The backend's errors name the unit, too."""
    for seen in ending.others:
        assert seen["error"] == "RuntimeError", str(ending)
        assert seen["text"].startswith("fastsync: rank 0, the "), str(ending)


KINDS = {
    **dict.fromkeys(("kill", "exit", "fade"), check_death),
    **dict.fromkeys(STALLS, check_stall),
    **dict.fromkeys(("leave", "fewer"), check_leaving),
    "raise": check_raise,
    "skip": check_skip,
    "thaw": check_thaw,
}
ALIKE = {
    **dict.fromkeys(("settings", "shapes", "order"), "RankMismatchError"),
    "nan": "NonFiniteGradientError",
    "flip": "ReplicaError",
}
