"""Tuning in real trainings: all ranks do the same, and results stay what they were."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, RankMismatchError, TunePolicy, Wire
from fastsync.plan.sizes import Sizes
from fastsync.plan.topology import Network
from fastsync.testing import run_ranks
from fastsync.tune import store
from fastsync.tune.tuner import other_forms, subject

# Small models have many plans in reach, and every change of plan costs them far more than a step.
EAGER = TunePolicy(steps=100_000, trial=1, least=1, remember=False)
SHORT = replace(EAGER, steps=7)
KEPT = Sizes(500, 600, 100)


def wrap(tune, width=16, **options):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    model = FastDDP(module, tune=tune, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, number, rank, backward=True):
    optimizer.zero_grad()
    torch.manual_seed(1000 * number + rank)
    width = next(model.parameters()).shape[0]
    loss = model(torch.randn(3, width)).square().mean()
    if backward:
        loss.backward()
        optimizer.step()


def plan_of(model):
    """Everything about it that ranks must have in common."""
    return repr(
        [
            (b.params, b.layout, b.format_name, b.coded and (b.coded.form, b.coded.layout))
            for b in model._engine.plan.buckets
        ]
    )


def train(rank, world, tune, steps, options):
    model, optimizer = wrap(tune, **options)
    plans = []
    for number in range(steps):
        step(model, optimizer, number, rank)
        plans.append(plan_of(model))
    weights = [p.detach().clone() for p in model.parameters()]
    return weights, plans, model.sync_stats()["plans"]


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_two_ranks_get_the_weights_that_they_get_without(shared_memory):
    options = {"shared_memory": shared_memory}
    tuned = run_ranks(train, 2, EAGER, 25, options)
    plain = run_ranks(train, 2, False, 25, options)
    assert tuned[0][1:] == tuned[1][1:], "the same plan on both ranks after each step"
    assert len(set(tuned[0][1])) >= 2, "others were tried"
    assert plain[0][2] == 2
    for ours, theirs in zip(tuned, plain, strict=True):
        assert all(map(torch.equal, ours[0], theirs[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wire", ["fp32", "bf16", Wire("int8", overrides={"0.*": "fp32"}), "int4", "topk", "powersgd"]
)
def test_three_ranks_hold_one_plan_and_one_model(wire):
    results = run_ranks(train, 3, EAGER, 25, {"wire": wire})
    for weights, plans, count in results:
        assert (plans, count) == results[0][1:]
        assert all(map(torch.equal, weights, results[0][0]))
    assert len(set(results[0][1])) >= 2


def gathered(rank, world):
    """Averages of one step in each form that a tuning may choose, and what it may."""
    model, _ = wrap(EAGER, wire="int8")
    engine, found = model._engine, []
    default = engine.sizing.default(engine.wire, engine.network)
    for sizes in (None, *(replace(default, form=form) for form in other_forms(engine))):
        engine.use(sizes)
        model.zero_grad()
        step(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, rank)
        forms = {bucket.coded.form for bucket in engine.plan.buckets}
        found.append((forms, torch.cat([p.grad.flatten() for p in model.parameters()])))
    return found


@pytest.mark.slow
def test_the_gather_form_may_be_chosen_and_rounds_once_less():
    exact = run_ranks(train_once, 3)[0]
    results = run_ranks(gathered, 3)
    assert [forms for forms, _ in results[0]] == [{"two_shot"}, {"gather"}]
    errors = [(average - exact).norm() for _, average in results[0]]
    assert 0 < errors[1] < errors[0]
    for found in results:
        assert all(torch.equal(a[1], b[1]) for a, b in zip(found, results[0], strict=True))


def train_once(rank, world):
    model, optimizer = wrap(False)
    step(model, optimizer, 1, rank)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def forms(rank, world):
    wires = ["fp32", "bf16", Wire("int8", "two_shot"), Wire("int8", overrides={"0.*": "topk"})]
    engines = [wrap(EAGER, wire=wire)[0]._engine for wire in wires]
    return [other_forms(engine) for engine in engines]


@pytest.mark.slow
def test_other_wires_keep_their_form():
    assert run_ranks(forms, 3)[0] == [(), ("gather",), (), ()]
    assert run_ranks(forms, 2)[0] == [(), (), (), ()]
    assert run_ranks(forms, 5)[0] == [(), (), (), ()]


def end_early(rank, world, how):
    """Something comes in between while sizes are tried; what follows is an ordinary training."""
    model, optimizer = wrap(EAGER)
    model.module[2].requires_grad_(how is not thaw)
    engine = model._engine
    for number in range(5):
        step(model, optimizer, number, rank)
    tuning = engine.sizing.tuner is not None and len(engine.plans) > 2
    how(model, rank)
    for number in range(5, 9):
        step(model, optimizer, number, rank)
    torch.use_deterministic_algorithms(False)
    plans = engine.core.stats()["plans"]
    for number in range(9, 14):
        step(model, optimizer, number, rank)
    ended = engine.sizing.tuner is None and engine.sizing.chosen is None
    weights = [p.detach().clone() for p in model.parameters()]
    return tuning, ended, engine.core.stats()["plans"] == plans, plan_of(model), weights


def become_deterministic(model, rank):
    torch.use_deterministic_algorithms(rank == 1)


def thaw(model, rank):
    model.module[2].requires_grad_(True)


def change_wire(model, rank):
    model.set_wire("int8")


def change_group(model, rank):
    model._update_process_group(dist.new_group())


@pytest.mark.slow
@pytest.mark.parametrize("how", [become_deterministic, thaw, change_wire, change_group])
def test_tuning_ends_on_all_ranks_where_something_comes_in_between(how):
    results = run_ranks(end_early, 2, how)
    for tuning, ended, still, plan, weights in results:
        assert tuning, "it had begun"
        assert ended, "it is over, on ranks that have nothing against it too"
        assert still, "and nobody plans any more"
        assert plan == results[0][3]
        assert all(map(torch.equal, weights, results[0][4]))


def join(rank, world):
    model, optimizer = wrap(EAGER)
    plans = []
    with model.join():
        for number in range(6 + 4 * rank):
            step(model, optimizer, number, rank)
            plans.append(plan_of(model))
    last = [None] * world
    dist.all_gather_object(last, plan_of(model))
    return plans, last


@pytest.mark.slow
def test_ranks_that_run_out_of_inputs_take_part():
    results = run_ranks(join, 3)
    longest = results[2][0]
    for plans, last in results:
        assert plans == longest[: len(plans)]
        assert last == [longest[-1]] * 3
    assert len(set(longest)) >= 2


def told_again(rank, world):
    model, optimizer = wrap(EAGER)
    for number in range(2):
        step(model, optimizer, number, rank)
    tuner = model._engine.sizing.tuner
    return tuner._received > 0, tuner._seconds(model._engine)


def test_a_rank_tells_each_of_its_own_steps_once():
    """Where others make a step without it, it has no time to tell."""
    assert run_ranks(told_again, 2) == [(True, 0.0)] * 2


def uneven(rank, world):
    """Ranks differ in forwards under no_sync(), in ones without backward, in what they use."""
    model, optimizer = wrap(EAGER, find_unused_parameters=True)
    plans = []
    for number in range(20):
        with model.no_sync():
            for _ in range((number + rank) % 3):
                step(model, optimizer, 50, rank)
        if number % 5 == rank:
            step(model, optimizer, 60, rank, backward=False)
        step(model, optimizer, number, rank)
        plans.append(plan_of(model))
    return plans


@pytest.mark.slow
def test_only_steps_that_all_ranks_make_count():
    results = run_ranks(uneven, 3)
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) >= 2


def keep(model, folder, found):
    """As if an earlier run had found that."""
    path = store.path_of(folder, subject(model._engine))
    if dist.get_rank() == 0:
        store.write(path, found)
    dist.barrier()
    return path


def begin_with_kept(rank, world, folder, network, width):
    """Rank 0 alone has the file."""
    model, _ = wrap(replace(EAGER, remember=True, folder=str(folder / "none")))
    keep(model, folder, store.Found(KEPT, network or Network()))
    mine = folder if rank == 0 else folder / f"of rank {rank}"
    model, optimizer = wrap(replace(EAGER, remember=True, folder=str(mine)), width)
    engine = model._engine
    begins, plans = engine.sizing.chosen, []
    for number in range(6):
        step(model, optimizer, number, rank)
        plans.append(plan_of(model))
        if number == 0 and network is None:  # the same as now, which no file can foretell
            engine.sizing.tuner._found = store.Found(KEPT, engine.network)
    return begins, engine.sizing.chosen, engine.sizing.tuner is None, plans


@pytest.mark.slow
def test_a_run_begins_with_what_was_found_and_goes_on_with_it(tmp_path):
    results = run_ranks(begin_with_kept, 2, tmp_path, None, 16)
    assert results[0] == results[1]
    begins, chosen, ended, plans = results[0]
    assert begins == chosen == KEPT
    assert ended
    assert len(set(plans)) == 1


@pytest.mark.slow
def test_what_was_found_on_another_network_is_looked_for_anew(tmp_path):
    results = run_ranks(begin_with_kept, 2, tmp_path, Network(1e-3), 16)
    assert results[0] == results[1]
    begins, chosen, ended, _ = results[0]
    assert begins == KEPT
    assert chosen != KEPT
    assert not ended


def test_what_was_found_for_another_model_is_not_used(tmp_path):
    results = run_ranks(begin_with_kept, 2, tmp_path, Network(1e9), 17)
    assert results[0] == results[1]
    assert results[0][0] is None


def begin_elsewhere(rank, world, folder):
    """On other ranks than those that found it."""
    model, _ = wrap(replace(EAGER, remember=True, folder=str(folder)))
    return model._engine.sizing.chosen, len(list(folder.iterdir()))


@pytest.mark.slow
def test_what_was_found_by_other_ranks_is_not_used(tmp_path):
    run_ranks(begin_with_kept, 2, tmp_path, Network(1e9), 16)
    assert [chosen for chosen, _ in run_ranks(begin_elsewhere, 2, tmp_path)] == [KEPT] * 2
    assert [chosen for chosen, _ in run_ranks(begin_elsewhere, 3, tmp_path)] == [None] * 3


def twice(rank, world, folder):
    """A tuning to its end, and a second run; what rank 0 said."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fastsync")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    policy = replace(SHORT, remember=True, folder=str(folder))
    model, optimizer = wrap(policy)
    first, counts = model._engine, set()
    for number in range(12):
        step(model, optimizer, number, rank)
        if first.sizing.tuner is None:
            counts.add(model.sync_stats()["plans"])
    files = [store.read(path) for path in folder.iterdir()]
    dist.barrier()
    second = wrap(policy)[0]._engine
    words = [text for text in said if "tuned in" in text]
    ended = len(counts) == 1  # plans no more, from the end of the tuning on
    return ended, first.sizing.chosen, first.network, files, second.sizing.chosen, words


def test_a_tuning_says_once_what_it_found_and_keeps_it(tmp_path):
    results = run_ranks(twice, 2, tmp_path)
    for ended, chosen, network, files, again, _ in results:
        assert ended
        assert files == [store.Found(chosen, network)]
        assert again == chosen
    said = [words for *_, words in results]
    assert len(said[0]) == 1
    assert "ms a step" in said[0][0]
    assert said[1] == []


def deterministic(rank, world, folder):
    torch.use_deterministic_algorithms(True)
    keep(wrap(EAGER)[0], folder, store.Found(KEPT, Network()))
    results = train(rank, world, replace(EAGER, remember=True, folder=str(folder)), 6, {})
    torch.use_deterministic_algorithms(False)
    return results


@pytest.mark.slow
def test_deterministic_runs_neither_tune_nor_begin_with_what_was_found(tmp_path):
    for _, plans, count in run_ranks(deterministic, 2, tmp_path):
        assert count == 2
        assert len(set(plans)) == 1


def refused(rank, world, policies, options):
    torch.use_deterministic_algorithms(options.pop("deterministic", -1) == rank)
    try:
        wrap(policies[rank], **options)
    except (ValueError, RankMismatchError) as error:
        return type(error), str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return None, ""


@pytest.mark.parametrize(
    ("policies", "options"),
    [([True, False], {}), ([True, SHORT], {}), ([EAGER, EAGER], {"deterministic": 1})],
)
def test_ranks_that_differ_are_told(policies, options):
    for kind, text in run_ranks(refused, 2, policies, options):
        assert kind is RankMismatchError
        assert "rank 1 differs from rank 0: tune is" in text


@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 1}, {"bucket_cap_mb_list": [1, 2]}, {"zero": 1}, {"zero": 2}, {"zero": 3}],
)
def test_what_leaves_nothing_to_tune_is_refused(options):
    for kind, text in run_ranks(refused, 2, [True, True], options):
        assert kind is ValueError
        assert f"{next(iter(options))}" in text
        assert "tune" in text


def hooked(rank, world):
    model, _ = wrap(EAGER)
    with pytest.raises(ValueError, match="tune tries other buckets"):
        model.register_comm_hook(None, lambda state, bucket: None)


@pytest.mark.slow
def test_no_hook_beside_it():
    run_ranks(hooked, 2)


def alone(rank, world):
    model, optimizer = wrap(EAGER)
    step(model, optimizer, 0, rank)
    return model._engine.sizing.tuner


def test_one_rank_has_nothing_to_tune():
    assert run_ranks(alone, 1) == [None]
