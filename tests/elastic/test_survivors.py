"""Agreement of the survivors of a death, and their meetings."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from fastsync.faults.join_gate import ENDED, JoinGate, Waiting
from fastsync.faults.survivors import Decision, Patience, RankState, Survivors, decide
from fastsync.faults.sync_fault import SyncFault

LACKS, HAS = False, True


@pytest.mark.parametrize(
    ("states", "steps", "takes"),
    [
        ({0: (7, LACKS), 2: (7, LACKS)}, 7, False),
        # No rank can have finished step 8, rank 2 included: rank 0 has not voted.
        ({0: (7, LACKS), 2: (7, HAS)}, 7, False),
        # One of the dead may have.
        ({0: (7, HAS), 2: (7, HAS)}, 8, True),
        ({0: (8, LACKS), 2: (7, HAS), 3: (7, HAS)}, 8, True),
        ({1: (7, HAS)}, 8, True),
        ({1: (0, LACKS)}, 0, False),
    ],
)
def test_decisions(states, steps, takes):
    told = {rank: RankState(*standing) for rank, standing in states.items()}
    assert decide(told) == Decision(tuple(states), steps, takes)


@pytest.mark.parametrize("ahead", [(8, LACKS), (9, LACKS)])
def test_who_is_ahead_of_ranks_that_lack_averages_does_not_agree(ahead):
    behind = (7, LACKS) if ahead[0] == 8 else (7, HAS)
    with pytest.raises(SyncFault, match=rf"ranks \[1\] have finished step {ahead[0]}"):
        decide({0: RankState(*behind), 1: RankState(*ahead)})


def test_all_get_one_decision_and_the_dead_are_not_waited_for():
    store, dead = HashStore(), {0, 3}
    places = {rank: Survivors(store, "here", rank) for rank in (1, 2, 4)}

    def meet(rank):
        standing = RankState(5, rank != 4)
        return places[rank].meet(1, range(5), standing, lambda: dead, timeout=20)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(meet, places))
    assert found == [Decision((1, 2, 4), 5, False)] * 3


def test_a_death_while_others_wait_passes_the_decision_on():
    """Rank 0 never speaks; it is the lowest until it is known to be dead."""
    store, dead = HashStore(), set()
    place = Survivors(store, "here", 1)
    timer = threading.Timer(0.1, dead.add, [0])
    timer.start()
    decision = place.meet(1, range(2), RankState(3, LACKS), lambda: dead, timeout=20)
    timer.join()
    assert decision == Decision((1,), 3, False)


def test_who_does_not_come_is_named():
    place = Survivors(HashStore(), "here", 0)
    with pytest.raises(SyncFault, match=r"rank 0 waited for ranks \[1\]"):
        place.meet(1, range(2), RankState(3, LACKS), set, timeout=0.05)


def test_what_was_decided_first_holds():
    """Check that a rank that comes late, with another view of the dead, follows
    the first decision.
    """
    store = HashStore()
    first, late = Survivors(store, "here", 0), Survivors(store, "here", 1)
    decided = first.meet(1, range(2), RankState(3, LACKS), lambda: {1}, timeout=20)
    assert late.meet(1, range(2), RankState(3, LACKS), set, timeout=20) == decided
    assert decided.ranks == (0,)


def test_who_decides_later_than_another_goes_by_that():
    """Each has taken the other for dead, and neither has seen a decision when it makes one."""
    store = HashStore()
    first, late = Survivors(store, "here", 0), Survivors(store, "here", 1)

    def dies_meanwhile():
        first.meet(1, range(2), RankState(3, LACKS), lambda: {1}, timeout=20)
        return {0}

    assert late.meet(1, range(2), RankState(3, LACKS), dies_meanwhile, timeout=20).ranks == (0,)


@pytest.mark.parametrize("between", [True, False])
def test_ranks_that_come_back_wait_until_all_are_between_two_steps(between):
    told = {0: RankState(7, LACKS, True), 2: RankState(7, LACKS, between)}
    ranks, back = ((0, 1, 2), ((1, 4),)) if between else ((0, 2), ())
    decision = decide(told, {1: 4, 2: 3})
    assert decision == Decision(ranks, 7, False, back)
    assert decision.survivors == (0, 2)


def test_who_has_stopped_counting_is_not_seen():
    """Check that it is not seen: the ranks that train would wait for it when they connect."""
    store = HashStore()
    doorway, waiting = JoinGate(store), Waiting(store, 1, timeout=20)
    with ThreadPoolExecutor(1) as pool:
        epoch = pool.submit(waiting.admitted)
        while not doorway.somebody_waits((0, 2)):
            pass
        assert not doorway.somebody_waits((0, 1, 2))
        doorway.admit(doorway.waiting((0, 2)), 5)
        assert epoch.result() == 5
    store.set(f"rank/{store.add('announced', 1)}", "2")
    deadline = time.monotonic() + 0.7
    while time.monotonic() < deadline:
        assert not doorway.somebody_waits((0, 1))


def test_who_waits_for_a_training_that_has_ended_is_told():
    store = HashStore()
    store.set(ENDED, "")
    with pytest.raises(SyncFault, match="has ended before it had taken rank 1 in"):
        Waiting(store, 1, timeout=20).training()


def test_all_know_alike_whether_all_have_come():
    """Check that a rank that looks later, and has seen a death since, decides like the others."""
    store, ranks = HashStore(), (0, 1)
    first, late = Survivors(store, "here", 0), Survivors(store, "here", 1)
    dead = set()

    def dies_meanwhile():
        with ThreadPoolExecutor(1) as pool:
            came = pool.submit(first.gather, "ready", ranks, set)
            assert came.result(timeout=20)
        dead.add(0)
        return dead

    assert late.gather("ready", ranks, dies_meanwhile)
    assert dead == {0}


def test_who_ends_before_has_not_come():
    store, ranks = HashStore(), (0, 1)
    assert not Survivors(store, "here", 0).gather("ready", ranks, lambda: {1})
    # As for one that comes once that is known.
    assert not Survivors(store, "here", 1).gather("ready", ranks, set)


def test_ranks_that_are_too_few_say_once_that_they_wait():
    store, ranks = HashStore(), (0, 1, 2, 3)
    places = [Survivors(store, "here", rank) for rank in ranks]
    patience = Patience(0.05, least=3)

    def come(rank):
        return places[rank].gather("ready", ranks, set, patience)

    with ThreadPoolExecutor() as pool, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = [pool.submit(come, 0)]
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        first.append(pool.submit(come, 1))
        time.sleep(0.2)
        assert not any(each.done() for each in first)
        third = pool.submit(come, 2)
        assert not any(each.result(timeout=30) for each in (*first, third))
    (only,) = said
    text = str(only.message)
    assert "rank 0 has waited 0.05 s" in text
    assert "1 of 4 have come: fewer than min_ranks=3" in text
