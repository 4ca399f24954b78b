"""Settings of modes, steps of fragments and cuts: no process group."""

import math

import pytest

from fastsync import Delayed, DiLoCo, ElasticPolicy, LocalSGD, TopK, Wire
from fastsync.config.sync_modes import sync_mode
from fastsync.sync.schedule import Schedule, cut

REFUSED = {
    "every below 1": (lambda: LocalSGD(0), "every must be at least 1, but is 0"),
    "every of DiLoCo": (lambda: DiLoCo(-1), "every must be at least 1"),
    "every that is no number": (lambda: LocalSGD(2.5), "every must be a whole number"),
    "warmup": (lambda: LocalSGD(2, warmup=-1), "warmup must be at least 0"),
    "warmup of DiLoCo": (lambda: DiLoCo(2, warmup=-1), "warmup must be at least 0"),
    "steps": (lambda: Delayed(0), "steps must be at least 1"),
    "fragments": (lambda: DiLoCo(4, fragments=5), "fragments must be at most every=4"),
    "overlap": (lambda: DiLoCo(4, overlap=4), "overlap must be below every=4"),
    "outer_lr": (lambda: DiLoCo(4, outer_lr=0), "outer_lr must be a positive number"),
    "outer_lr of infinity": (lambda: DiLoCo(4, outer_lr=math.inf), "outer_lr must be a positive"),
    "outer_momentum": (lambda: DiLoCo(4, outer_momentum=1.0), "outer_momentum must be at least 0"),
    "alpha": (lambda: DiLoCo(4, alpha=1.5), "alpha must be at least 0 and below 1"),
    "within": (lambda: DiLoCo(4, within=0), "within must be at least 1"),
    "warmup within parts": (lambda: LocalSGD(4, warmup=1, within=2), "warmup averages gradients"),
    "wire": (lambda: DiLoCo(4, wire="int3"), "unknown wire format 'int3'"),
    "wire without feedback": (
        lambda: DiLoCo(4, wire=Wire("int8", error_feedback=False)),
        "has no error feedback",
    ),
    "form of the wire": (lambda: DiLoCo(4, wire=Wire("int8", "gather")), "knows no form"),
    "overrides": (
        lambda: DiLoCo(4, wire=Wire("int8", overrides={"0.*": "fp32"})),
        "knows no overrides",
    ),
    "text": (lambda: sync_mode("diloco"), "sync must be one of 'local:STEPS', 'diloco:STEPS'"),
    "another text": (lambda: sync_mode("gossip:3"), "but is 'gossip:3'"),
    "object": (lambda: sync_mode(64), "sync must be None, a LocalSGD"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_sense(case):
    make, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=r"sync|wire") as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("patience", [0, -1.0, math.inf, math.nan, "1"])
def test_patience_that_makes_no_sense(patience):
    with pytest.raises((TypeError, ValueError), match="elastic: patience must be"):
        ElasticPolicy(patience=patience)


def test_modes_by_name():
    assert sync_mode("local:8") == LocalSGD(8)
    assert sync_mode("diloco:64") == DiLoCo(64)
    assert sync_mode("delayed:1") == Delayed()
    assert sync_mode(None) is None
    assert DiLoCo(4, wire=TopK(0.1)).describe() != DiLoCo(4, wire=TopK(0.2)).describe()


@pytest.mark.parametrize("every", range(1, 8))
def test_each_fragment_is_sent_once_in_a_round(every):
    for fragments in range(1, every + 1):
        schedule = Schedule(every, fragments)
        sent = [
            (step, f)
            for step in range(1, 2 * every + 1)
            for f in range(fragments)
            if schedule.sends(step, f)
        ]
        assert [f for _, f in sent] == 2 * list(range(fragments))
        assert len({step for step, _ in sent}) == len(sent)
        assert sent[fragments - 1][0] == every and schedule.ends_round(every)
        assert not any(schedule.sends(step, f) for step in (-every, 0) for f in range(fragments))


def test_cuts_are_of_similar_sizes():
    assert cut([4, 4, 4, 4], 2) == [range(0, 2), range(2, 4)]
    assert cut([100, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]
    assert cut([5], 3) == [range(0, 0), range(0, 1), range(1, 1)]
    assert cut([], 2) == [range(0, 0), range(0, 0)]
    for parts in range(1, 9):
        sizes = [7, 1, 30, 2, 2, 9, 30, 4, 11]
        ranges = cut(sizes, parts)
        assert [i for part in ranges for i in part] == list(range(len(sizes)))
        assert max(sum(sizes[i] for i in part) for part in ranges) <= sum(sizes) / parts + 30
