"""Deaths while others rebuild, deaths between two votes, and two elastic models in one training."""

import pytest

from tests.elastic.elastic_script import STEPS
from tests.elastic.test_elastic import check, outcomes_of, run
from tests.helpers.scripts import cases_asked_for

SCRIPT = "tests.elastic.elastic_races"
# Rank 1 dies in step 2, and another while it rebuilds.
REBUILDS = {
    "meets": (4, [(1, 2, "between"), (3, 2, "meets")], {}),
    "meets-first-gloo": (4, [(1, 2, "between"), (0, 2, "meets")], {"memory": False}),
    "connects": (4, [(1, 2, "forward"), (3, 2, "connects")], {}),
    "connects-gloo": (4, [(1, 2, "after"), (0, 2, "connects")], {"memory": False}),
    "connected": (4, [(1, 2, "between"), (2, 2, "connected")], {}),
    "plans": (4, [(1, 2, "between"), (0, 2, "plans")], {}),
    "plans-gloo": (4, [(1, 2, "between"), (3, 2, "plans")], {"memory": False}),
    "gathers": (4, [(1, 2, "between"), (3, 2, "gathers")], {}),
    "all-but-one": (3, [(1, 2, "between"), (2, 2, "plans")], {}),
}
# Rank 1 dies when the others have all averages of step 3, and none has their votes.
TAKES = {
    "sent": (3, [(1, 3, "sent")], {}),
    "sent-gloo": (3, [(1, 3, "sent")], {"memory": False}),
    "sent-to-one": (2, [(0, 3, "sent")], {}),
    "sent-then-connects": (4, [(1, 3, "sent"), (2, 3, "connects")], {}),
}
# What rank 1 dies in, and from which step on the models are trained without it.
TWINS = {
    "copy": ("between", (3, 3)),
    "copy-in-twin": ("twin", (4, 3)),
    "alike": ("between", (3, 3)),
    "alike-in-twin": ("twin", (4, 3)),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Return the outcome of each case that a test of this run asks for."""
    wanted = cases_asked_for(request, {**REBUILDS, **TAKES})
    return outcomes_of(tmp_path_factory.mktemp("races"), wanted, SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("case", REBUILDS)
def test_a_death_while_others_rebuild_is_survived(outcomes, case):
    outcome = outcomes[case]
    check(outcome)
    assert outcome.changes[-1] == [3, outcome.left], outcome.said


@pytest.mark.slow
@pytest.mark.parametrize("case", TAKES)
def test_averages_that_all_survivors_have_are_taken(outcomes, case):
    """The dead rank may have stepped with them."""
    outcome = outcomes[case]
    check(outcome)
    assert outcome.changes == [[5, outcome.left]], outcome.said


def twins(name, **differing):
    kind, _, _ = name.partition("-")
    return {"world": 3, "options": {"twin": kind}, **differing}


@pytest.fixture(scope="module")
def twin_runs(tmp_path_factory):
    """Return what the ranks have seen, with deaths and without, and how they ended."""
    folder = tmp_path_factory.mktemp("twins")
    jobs = []
    for name, (place, since) in TWINS.items():
        jobs.append((name, twins(name, deaths=[(1, 2, place)], elastic=True)))
        changes = [(step, [0, 2]) for step in since]
        jobs.append((f"{name}-reference", twins(name, changes=changes)))
    return run(folder, jobs, SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_two_models_survive_the_same_death(twin_runs, name):
    codes, seen = twin_runs
    assert [codes[name][rank] for rank in (0, 2)] == [0, 0], seen[name]
    changed = [[since, [0, 2]] for since in TWINS[name][1]]
    for rank in (0, 2):
        assert [members[-1] for members in seen[name][rank]["members"]] == changed
        expected = seen[f"{name}-reference"][rank]["weights"]
        assert len(expected) == STEPS
        assert seen[name][rank]["weights"] == expected
