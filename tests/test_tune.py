"""The search for sizes, without ranks or clocks: drawn times in, choices out."""

import os
import random
from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest
import torch

from fastsync.plan.policy import BucketPolicy
from fastsync.plan.sizes import Sizes
from fastsync.plan.topology import Network
from fastsync.tune import store
from fastsync.tune.moves import Bounds, moves
from fastsync.tune.policy import TunePolicy
from fastsync.tune.search import CLEAR, GAIN, SLOWER, Rules, Search, typical
from fastsync.wire.formats import Wire

MIB = 1 << 20
CPU = torch.device("cpu")


def towards(step):
    return lambda place: place + step


MOVES = [towards(-1), towards(1), towards(7), towards(40)]


def searched(costs, noise=lambda: 1.0, rules=None, change=0.0):
    """The outcome, and of each step what it ran with and the seconds that it was said to take."""
    search = Search(0, MOVES, lambda place: place, rules or Rules())
    trace, before = [], 0
    while search.outcome is None:
        place = search.current
        seconds = costs(place) * noise()
        trace.append((place, seconds))
        search.observe(seconds, seconds + change * (place != before))
        before = place
    assert search.current == search.outcome.choice
    return search.outcome, trace


def drawn(rng):
    """A cost for every place, the default's among them."""
    table = {}
    return lambda place: table.setdefault(place, rng.uniform(0.5, 1.5))


def some_seeds(count):
    """Others each time; a failing one is printed."""
    start = int.from_bytes(os.urandom(4), "big")
    for seed in range(start, start + count):
        print(f"seed {seed}")
        yield random.Random(seed)


def test_it_follows_what_helps():
    outcome, trace = searched(lambda place: 1 + abs(place + 3) / 20)
    assert outcome.choice == -3
    assert (outcome.seconds, outcome.default_seconds) == (1.0, 1.15)
    assert [place for place, _ in trace[-8:]] == [0] * 4 + [-3] * 4, "a second comparison"


def test_what_is_no_faster_is_not_chosen():
    long = Rules(steps=70)
    outcome, trace = searched(lambda place: 1.0 if place == 0 else 1 - 0.9 * GAIN, rules=long)
    assert outcome.choice == 0
    assert outcome.seconds == outcome.default_seconds == 1.0
    assert {place for place, _ in trace} == {0, -1, -2, 1, 2, 7, 14, 40, 80}, "each move twice"


def test_steps_that_each_gain_too_little_are_found_together():
    outcome, trace = searched(lambda place: 1 + 0.7 * GAIN * min(4, abs(place + 4)))
    assert outcome.choice == -4
    assert [place for place, _ in trace[6::4]][:5] == [-1, -2, -3, -4, -5]


def test_it_looks_ahead_once_and_not_where_something_is_slower():
    _, trace = searched(lambda place: 1 + GAIN * 0.5 * abs(place))
    assert {place for place, _ in trace} == {0, -1, -2, 1, 2, 7, 40}


def test_with_noise_below_half_the_gain_nothing_slower_is_ever_chosen():
    for rng in some_seeds(300):
        costs = drawn(rng)
        outcome, _ = searched(costs, partial(rng.uniform, 1 - 0.45 * GAIN, 1 + 0.45 * GAIN))
        assert costs(outcome.choice) <= costs(0)


def stretches(trace):
    """Runs of steps with the same: the place, and the seconds of those that are timed."""
    for place, steps in groupby(trace, key=lambda step: step[0]):
        yield place, [seconds for _, seconds in steps][1:]


def test_with_any_noise_the_choice_was_faster_twice():
    chosen = 0
    for rng in some_seeds(300):
        costs = drawn(rng)
        outcome, trace = searched(costs, partial(rng.lognormvariate, 0, rng.choice((0.01, 0.1, 1))))
        if outcome.choice == 0:
            continue
        chosen += 1
        (_, baseline), *tried = stretches(trace)
        final = next(i for i, (place, _) in enumerate(tried) if place == 0)
        trial = next(times for place, times in tried if place == outcome.choice)
        assert typical(trial) <= (1 - GAIN) * typical(baseline)
        turns = tried[final:]
        assert [place for place, _ in turns] == [0, outcome.choice] * (len(turns) // 2)
        default, best = (typical([s for _, times in turns[i::2] for s in times]) for i in (0, 1))
        assert best <= (1 - GAIN) * default
    assert chosen > 30


def test_one_disturbed_step_decides_nothing():
    for rng in some_seeds(100):
        hit = rng.randrange(1, 50)
        factors = iter([1.0] * hit + [3.0] + [1.0] * 50)
        outcome, trace = searched(lambda place: 1 + abs(place + 3) / 20, partial(next, factors))
        was_timed = hit < len(trace) and trace[hit][0] == trace[hit - 1][0]
        assert outcome.choice == -3 or not was_timed


def test_a_final_goes_on_until_it_is_clear():
    _, short = searched(lambda place: 1 - 1.1 * CLEAR * (place == -1))
    _, long = searched(lambda place: 1 - 0.9 * CLEAR * (place == -1))
    assert [place for place, _ in stretches(short)][-4:].count(-1) == 1
    assert [place for place, _ in stretches(long)][-4:] == [0, -1, 0, -1]
    assert len(long) + Rules().turn > Rules().steps


def test_the_window_and_what_it_may_lose_are_bounded():
    for rng in some_seeds(300):
        rules = Rules(rng.randint(1, 80), rng.randint(1, 5))
        costs, change = drawn(rng), rng.choice((0.0, 0.1, 1.0))
        outcome, trace = searched(costs, partial(rng.lognormvariate, 0, 0.2), rules, change)
        assert len(trace) == outcome.steps <= rules.steps
        (_, baseline), *tried = stretches(trace)
        head, default, lost, places = 1 + len(baseline), typical(baseline), 0.0, set()
        for place, times in tried:
            ends = place == 0 or 0 in places
            another_turn = place == 0 and 0 in places
            has_overspent = lost > SLOWER * rules.steps * default
            assert not has_overspent or (ends and not another_turn)
            places.add(place)
            lost += change + trace[head][1] - default
            lost += len(times) * (typical(times) - default) if times else 0.0
            head += 1 + len(times)


def test_what_is_slower_is_given_up_after_its_second_timed_step():
    _, trace = searched(lambda place: 1 + 1.5 * SLOWER * (place != 0))
    assert [place for place, _ in trace] == [0] * 6 + [-1] * 3 + [1] * 3 + [7] * 3 + [40] * 3


def test_what_costs_more_than_the_window_may_lose_ends_the_trying():
    _, trace = searched(lambda place: 3.0 if place else 1.0)
    assert [place for place, _ in trace] == [0] * 6 + [-1] * 2


def test_changes_of_plan_count():
    outcome, trace = searched(lambda place: 0.98**-place if place < 0 else 1.0, change=0.6)
    assert min(place for place, _ in trace) > -4
    assert outcome.steps < 30


def test_steps_without_a_time_decide_nothing():
    outcome, trace = searched(lambda place: 0.0)
    assert (outcome.choice, outcome.seconds, len(trace)) == (0, 0.0, 50)


def test_what_comes_to_the_same_is_tried_once():
    search = Search(0, MOVES, lambda place: place % 2, Rules())
    seen = set()
    while search.outcome is None:
        seen.add(search.current)
        search.observe(1.0, 1.0)
    assert seen == {0, -1}


def sizes_of(rng):
    numbers = [rng.choice((1, 1000, 300_000, MIB, 25 * MIB)) for _ in range(4)]
    return Sizes(numbers[0], numbers[1], rng.choice((None, numbers[2])), numbers[3])


def test_moves_stay_within_bounds():
    for rng in some_seeds(300):
        sizes = sizes_of(rng)
        bounds = Bounds(rng.choice((1, 64 << 10)), rng.choice((500, 90 * MIB)), ("gather",))
        found = [move(sizes) for move in moves(bounds)]
        for new in filter(None, found[:-1]):
            assert min(new.first, new.cap, new.last or new.cap, new.piece) >= bounds.least
            assert new.cap <= 2 * max(sizes.cap, bounds.total)
        assert found[-1] == replace(sizes, form="gather")
        assert moves(bounds)[-1](found[-1]) is None


def test_default_sizes_are_those_of_the_default_plan():
    buckets, slow = BucketPolicy.from_mb(None), Network(100e6, 0.001)
    sizes = Sizes.of(buckets, Wire(), slow, CPU)
    sized = buckets.on(slow)
    assert sizes == Sizes(sized.caps[0], sized.caps[1], sized.last)
    assert sizes.buckets() == replace(sized, adaptive=False)
    assert sizes.wire(Wire()) == Wire()
    assert Sizes.of(buckets, Wire("int8"), slow, CPU).piece == 256 << 10
    assert Sizes.of(buckets, Wire("int8", piece_bytes=5), slow, CPU).piece is None
    assert Sizes.of(buckets, Wire("int8"), slow, torch.device("cuda")).piece is None


@pytest.mark.parametrize("wrong", [{"first": 0}, {"cap": -1}, {"last": 0}, {"piece": 1.5}])
def test_sizes_are_positive(wrong):
    with pytest.raises(ValueError, match="positive"):
        Sizes(**{"first": 1, "cap": 1, **wrong})


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"trial": 0}, {"least": 0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=f"tune: {next(iter(wrong))} must be at least 1"):
        TunePolicy(**wrong)


def test_an_argument_of_another_kind_is_refused():
    assert TunePolicy.of(False) is None
    assert TunePolicy.of(True) == TunePolicy()
    with pytest.raises(TypeError, match="tune must be True, False or a TunePolicy"):
        TunePolicy.of("false")


SUBJECT = {"parameters": [("w", (2, 3), "torch.float32", True, False)], "ranks": 2}


def test_what_is_kept_is_found_by_its_subject_alone(tmp_path):
    found = store.Found(Sizes(1, 2, 3, 4, "gather"), Network(5e8, 1e-4))
    path = store.path_of(tmp_path / "there", SUBJECT)
    assert store.read(path) is None
    store.write(path, found)
    assert store.read(path) == found
    store.write(path, store.Found(None, Network()))
    assert store.read(path) == store.Found(None, Network())
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    others = [{**SUBJECT, "ranks": 3}, {**SUBJECT, "parameters": []}]
    assert all(store.path_of(path.parent, other) != path for other in others)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: text.replace("tuning", "profile"),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"cap": 2', '"cap": -2'),
        lambda text: text.replace('"cap"', '"cup"'),
        lambda text: text.replace('"rate": 5.0', '"rate": null'),
        lambda text: "[]",
    ],
)
def test_a_file_of_another_kind_is_none(tmp_path, change):
    path = tmp_path / "kept.json"
    store.write(path, store.Found(Sizes(1, 2), Network(5.0)))
    text = path.read_text()
    assert store.read(path) is not None
    assert change(text) != text
    path.write_text(change(text))
    assert store.read(path) is None


def test_a_network_that_has_changed_is_seen():
    then = store.Found(None, Network(100.0))
    assert then.holds_on(Network(60.0))
    assert then.holds_on(Network(190.0))
    assert not then.holds_on(Network(45.0))
    assert not then.holds_on(Network(210.0))
    assert not then.holds_on(Network())
    assert store.Found(None, Network()).holds_on(Network())
