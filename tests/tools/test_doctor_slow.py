"""The doctor's rules for pairs and ranks: which are measured, which are slow, how that is shown."""

import json

import pytest

from fastsync.doctor import rates, report
from fastsync.doctor.facts import Facts
from fastsync.doctor.finding import Level, warn
from fastsync.doctor.rates import Pairs, PairTime, SizeTime, Slow


@pytest.mark.parametrize("world", [2, 3, 5, 16])
def test_few_ranks_meet_all_others_one_pair_at_a_time(world):
    rounds = rates.pair_rounds(world)
    assert all(len(pairs) == 1 for pairs in rounds)
    assert len({pairs[0] for pairs in rounds}) == len(rounds) == world * (world - 1) // 2


@pytest.mark.parametrize("world", [17, 24, 63, 64, 1000])
def test_many_ranks_meet_some_at_once(world):
    rounds = rates.pair_rounds(world)
    pairs = [pair for its in rounds for pair in its]
    assert len(set(pairs)) == len(pairs), "none twice"
    for its in rounds:
        assert len({rank for pair in its for rank in pair}) == 2 * len(its), "none in two pairs"
    for rank in (0, world // 2, world - 1):
        met = {sum(pair) - rank for pair in pairs if rank in pair}
        for distance in (1, 2, 4, 8):
            assert {(rank + distance) % world, (rank - distance) % world} <= met
    assert len(rounds) <= 4 * world.bit_length(), "few rounds"


def pair_times(world, slow_pairs=(), rate=1e9, latency=1e-4):
    """Every pair of `world` ranks; some have a tenth of the rate."""
    return {
        (a, b): PairTime(latency, rate / 10 if (a, b) in slow_pairs else rate)
        for a in range(world)
        for b in range(a + 1, world)
    }


def pairs_with(rank, world):
    return [(min(rank, r), max(rank, r)) for r in range(world) if r != rank]


def test_even_pairs_are_fine():
    assert rates.find_slow(pair_times(4), [0] * 4) == Slow()


def test_one_pair_is_not_compared():
    assert rates.find_slow({(0, 1): PairTime(1, 1)}, [0, 0]) == Slow()


def test_a_slow_pair_is_marked():
    found = rates.find_slow(pair_times(4, [(1, 3)]), [0] * 4)
    assert found == Slow((), ((1, 3),))


@pytest.mark.parametrize("world", [3, 4, 5, 9])
def test_a_slow_rank_is_marked_and_its_pairs_are_not(world):
    """Among three ranks two of three pairs are slow then, so that the median pair is."""
    times = pair_times(world, pairs_with(1, world))
    assert rates.find_slow(times, [0] * world) == Slow((1,), ())


def test_a_slow_rank_and_a_slow_pair_elsewhere():
    times = pair_times(6, [*pairs_with(0, 6), (2, 5)])
    assert rates.find_slow(times, [0] * 6) == Slow((0,), ((2, 5),))


def test_machines_are_compared_apart():
    """A network is slower than memory, which is no fault."""
    machines = [0, 0, 0, 1, 1, 1]
    between = [(a, b) for a in range(3) for b in range(3, 6)]
    assert rates.find_slow(pair_times(6, between), machines) == Slow()
    times = pair_times(6, between)
    times[1, 4] = PairTime(1e-4, 1e7)
    assert rates.find_slow(times, machines) == Slow((), ((1, 4),))


@pytest.mark.parametrize(
    ("latency", "machines", "bad"),
    [
        (1e-4, [0, 1, 2, 3], False),
        (2.9e-4, [0, 1, 2, 3], False),
        (3.1e-4, [0, 1, 2, 3], True),
        (1e-2, [0, 1, 2, 3], True),
        (2e-3, [0, 0, 0, 0], False),
        (2.2e-3, [0, 0, 0, 0], True),
    ],
)
def test_a_late_pair_is_slow(latency, machines, bad):
    """Within a machine threads that wait for a core are later than links."""
    times = pair_times(4)
    times[0, 2] = PairTime(latency, 1e9)
    assert rates.find_slow(times, machines).pairs == (((0, 2),) if bad else ())


def test_microseconds_are_noise():
    times = pair_times(4, latency=2e-6)
    times[0, 2] = PairTime(3e-5, 1e9)
    assert rates.find_slow(times, [0] * 4) == Slow()


@pytest.mark.slow
def test_thousands_of_ranks_are_compared_at_once():
    world = 4096
    pairs = [pair for its in rates.pair_rounds(world) for pair in its]
    slow_ones = {pair for pair in pairs if 77 in pair} | {(5, 6)}
    times = {p: PairTime(1e-4, 1e8 if p in slow_ones else 1e9) for p in pairs}
    assert rates.find_slow(times, [0] * world) == Slow((77,), ((5, 6),))


def test_slow_pairs_and_ranks_are_named():
    found = rates.check_pairs(Slow((2,), ((0, 1),)), 6)
    assert [f.level for f in found] == [Level.WARN] * 2
    assert "rank 2" in found[0].text and "0-1" in found[1].text
    assert rates.check_pairs(Slow(), 6)[0].text == "no slow pair among 6"


@pytest.mark.parametrize(
    ("seconds", "ranks"),
    [
        ([1.0, 1.0], None),
        ([1.0, 1.25], None),
        ([1.0, 2.0], "rank 1"),
        ([2.0, 1.0, 1.0], "rank 0"),
        ([1.0, 2.0, 2.0, 1.0, 1.0], "ranks 1, 2"),
    ],
)
def test_the_rank_that_computes_slowly(seconds, ranks):
    (found,) = rates.check_compute(seconds)
    assert (found.level == Level.WARN) == (ranks is not None)
    assert ranks is None or found.text.endswith(f"as {ranks}")


def measured(world, slow_pairs=()):
    times = {p: t for its in rates.pair_rounds(world) for p in its for t in [PairTime(1e-4, 1e9)]}
    times |= {pair: PairTime(1e-4, 1e7) for pair in slow_pairs}
    found = rates.find_slow(times, [0] * world)
    sizes = [SizeTime(8, 1e-4, 1e5), SizeTime(1 << 26, 0.1, 6e8)]
    pairs = Pairs(times, len(times))
    return rates.Measured(sizes, pairs, found, [1e11] * world)


@pytest.mark.parametrize("world", [3, 40])
def test_a_report_of_any_size_marks_what_is_slow(world):
    facts = dict.fromkeys(range(world), Facts("node1", "one"))
    findings = [warn("links", "slow", "Mend it")]
    one = report.Report(world, "gloo", facts, findings, measured(world, [(0, 1)]))
    text = report.report_text(one)
    assert "* is slow" in text and "*     0 - 1" in text
    assert "A pair is slow if its rate is below 0.5 of the median" in text
    assert "1 WARN" in text and "-> Mend it" in text
    assert max(map(len, text.splitlines())) <= 112
    assert len(text.splitlines()) < 40, "also with many ranks"
    entries = json.loads(json.dumps(report.report_json(one)))
    assert entries["passed"] is True
    assert entries["measured"]["pairs"]["times"][0]["ranks"] == [0, 1]
    assert entries["findings"][0]["level"] == "WARN"
