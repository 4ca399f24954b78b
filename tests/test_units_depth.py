"""How far ahead units are to be gathered: as late as no time is lost, and within memory."""

import random

import pytest

from fastsync.units.depth import Stop, depths, length, limit_of

PLENTY = 10**9
LONG, SMALL = Stop(10.0, 1.0, 10), Stop(0.1, 1.0, 1)


def one_ahead(stops):
    return tuple(min(1, len(stops) - 1 - at) for at in range(len(stops)))


def taken(stops, chosen):
    return length(stops, [at + ahead for at, ahead in enumerate(chosen)])


@pytest.mark.parametrize("compute", [0.0, 0.5, 1.0, 3.0])
def test_equal_units_gain_nothing_from_more_than_one(compute):
    stops = [Stop(compute, 1.0, 10)] * 9
    assert depths(stops, PLENTY) == one_ahead(stops)


def test_small_units_after_a_long_one_come_while_that_computes():
    stops = [LONG, *[SMALL] * 6]
    chosen = depths(stops, PLENTY)
    assert chosen[0] == 6
    assert taken(stops, chosen) == pytest.approx(10.6)
    assert taken(stops, one_ahead(stops)) == pytest.approx(15.1)


def test_only_so_many_as_come_in_time():
    stops = [LONG, *[SMALL] * 20]
    chosen = depths(stops, PLENTY)
    assert chosen[0] == 10, "as many as the link brings meanwhile"
    assert chosen[-9:] == one_ahead(stops)[-9:], "the link is busy from there on"
    assert taken(stops, chosen) == taken(stops, [len(stops) - 1 - at for at in range(len(stops))])


def test_a_long_unit_far_ahead_begins_in_time():
    stops = [LONG, SMALL, SMALL, Stop(1.0, 5.0, 10)]
    chosen = depths(stops, PLENTY)
    assert chosen[0] == 3
    assert taken(stops, chosen) == pytest.approx(10.2 + 1.0)


def test_units_that_need_no_gather_take_no_time_of_the_link():
    stops = [Stop(1.0, 0.0, 0), Stop(1.0, 1.0, 5), Stop(1.0, 0.0, 0), Stop(1.0, 1.0, 5)]
    assert depths(stops, PLENTY) == one_ahead(stops)
    assert taken(stops, one_ahead(stops)) == 4.0


def test_memory_bounds_what_is_there():
    stops = [LONG, *[SMALL] * 6]
    for limit, ahead in ((11, 1), (12, 2), (13, 3), (16, 6), (15.9, 5)):
        assert depths(stops, limit)[0] == ahead
    # What is held while a later one computes counts, too.
    heavy = [LONG, SMALL, Stop(0.1, 1.0, 1, besides=100), *[SMALL] * 4]
    assert depths(heavy, 50)[:2] == (3, 2), "one ahead of the one that holds so much"


def test_the_limit_is_what_one_ahead_takes():
    assert limit_of([Stop(1, 1, 10, 3), Stop(1, 1, 20, 5), Stop(1, 1, 7)]) == 33
    assert limit_of([Stop(1, 1, 10, 3)]) == 13
    assert limit_of([]) == 0 and depths([], 5) == ()


def drawn(rng):
    count = rng.randint(1, 12)
    pick = lambda *of: rng.choice(of)  # noqa: E731
    return [
        Stop(pick(0.0, 0.1, 1.0, 10.0) * rng.random(), pick(0.0, 0.1, 1.0, 5.0), rng.randint(0, 9))
        for _ in range(count)
    ]


def most_held(stops, chosen):
    """Bytes at each place, where that is more than one ahead takes there."""
    last, most = 0, 0
    for at, ahead in enumerate(chosen):
        last = max(last, at + ahead)
        if last > at + 1:
            most = max(most, sum(s.nbytes for s in stops[at : last + 1]) + stops[at].besides)
    return most


def test_what_is_chosen_loses_nothing_and_keeps_to_the_limit():
    rng = random.Random(5)
    deeper = 0
    for _ in range(3000):
        stops = drawn(rng)
        limit = rng.choice([limit_of(stops), 30, PLENTY])
        chosen = depths(stops, limit)
        reached = [at + ahead for at, ahead in enumerate(chosen)]
        assert reached == sorted(reached) and reached[-1] == len(stops) - 1
        assert all(ahead >= 1 for ahead in chosen[:-1])
        alone = taken(stops, one_ahead(stops))
        assert taken(stops, chosen) <= alone + 1e-9
        assert most_held(stops, chosen) <= limit
        every = taken(stops, [len(stops) - 1 - at for at in range(len(stops))])
        if limit == PLENTY:
            assert taken(stops, chosen) <= 1.06 * every
        deeper += chosen != one_ahead(stops)
    assert deeper > 500
