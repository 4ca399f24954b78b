"""What waiting ranks ask: which ranks are late. All hear it, so that one may ask for all."""

import time

import pytest

from fastsync._build.extension import load

WAITING, WARN_AFTER = 12, 0.1  # the last rank is late


@pytest.fixture
def watches():
    """Watches of so many ranks in this process."""
    kind = load().FaultWatch
    made = [kind("127.0.0.1", WARN_AFTER, 30.0, -1, 0, RuntimeError) for _ in range(WAITING + 1)]
    addresses = [(*watch.address(), 0, str(rank)) for rank, watch in enumerate(made)]
    for rank, watch in enumerate(made):
        assert watch.connect(addresses, rank) == []
    yield made
    for watch in made:
        watch.close()


def look_until(scope, condition):
    """Look, as a waiting rank does, at least once."""
    end = time.monotonic() + 30
    scope.look()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
        scope.look()


def wait_in(watch):
    return watch.wait_scope("together", "the first exchange", range(WAITING + 1))


def test_ranks_that_have_heard_a_question_do_not_ask_it_again(watches):
    first, *others, _ = watches
    scope = wait_in(first)
    look_until(scope, lambda: all(watch.questions() == 1 for watch in watches))
    scopes = [wait_in(watch) for watch in others]
    begun = time.monotonic()
    for other in scopes:  # each in turn, until it would have asked
        look_until(other, lambda: time.monotonic() > begun + 6 * WARN_AFTER)
    assert [watch.questions() for watch in watches] == [1] * len(watches)
