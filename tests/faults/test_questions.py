"""What waiting ranks ask: which ranks are late. All hear it, so that one may ask for all."""

import time

import pytest

from fastsync._build.extension import load

WAITING, WARN_AFTER = 12, 2.0  # the last rank is late


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


def wait_in(watch):
    return watch.wait_scope("together", "the first exchange", range(WAITING + 1))


def test_ranks_that_have_heard_a_question_do_not_ask_it_again(watches):
    first, *others = [wait_in(watch) for watch in watches[:-1]]
    begun = time.monotonic()
    while not all(watch.questions() == 1 for watch in watches):
        first.look()
        assert time.monotonic() < begun + 30
        time.sleep(0.01)
    while time.monotonic() < begun + WARN_AFTER + 0.2:  # the last would have asked by then
        time.sleep(0.01)
    for other in others:
        other.look()
    assert [watch.questions() for watch in watches] == [1] * len(watches)
