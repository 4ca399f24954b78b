"""Scripts around rounds: accumulation, AMP, several optimizers, buffers, checkpoints."""

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from fastsync import (
    Delayed,
    DiLoCo,
    ElasticPolicy,
    FastDDP,
    Faults,
    LocalSGD,
    RankMismatchError,
    testing,
)
from fastsync.wire.formats import FORMATS
from tests.helpers.teams import run_ranks
from tests.sync.test_modes import batch, loop, net


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def average_of(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def sent_between_rounds(rank, world):
    model = FastDDP(net(), sync=LocalSGD(4))
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    alone = net()
    alone_step = loop(rank, alone, torch.optim.SGD(alone.parameters(), 0.1))
    for _ in range(3):
        step()
        alone_step()
    same = all(map(torch.equal, model.parameters(), alone.parameters()))
    grads = [p.grad for p in model.parameters()]
    same_grads = all(torch.equal(g, p.grad) for g, p in zip(grads, alone.parameters(), strict=True))
    before = model.sync_stats()
    step()
    after = model.sync_stats()
    return same and same_grads, (before.collectives, before.rounds), after, values(model).numel()


def test_nothing_is_sent_between_rounds():
    for same, before, after, numel in run_ranks(sent_between_rounds, 2):
        assert same
        assert before == (0, 0)
        assert (after.collectives, after.rounds, after.round_bytes) == (0, 1, 4 * numel)
        assert "round_bytes" in str(after)


def accumulated(rank, world):
    """Steps count, not backwards; gradients accumulate and are clipped as without a wrapper."""
    model, alone = FastDDP(net(), sync=LocalSGD(2)), net()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    for step in range(4):
        for micro in range(3):
            x = batch(rank, 10 * step + micro)
            if micro < 2:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
            alone(x).square().mean().backward()
        norm = model.clip_grad_norm_(0.05)
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        assert torch.allclose(norm, wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                for p in alone.parameters():
                    p.copy_(average_of(p))
    return torch.allclose(values(model), values(alone), atol=1e-7), model.sync_stats().rounds


def test_accumulated_and_clipped_gradients():
    assert run_ranks(accumulated, 2) == [(True, 2)] * 2


def scaled(rank, world, overflow):
    """A GradScaler that leaves out a step on one rank, at the end of a round or before."""
    model = FastDDP(net(), sync=LocalSGD(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rounds = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        scaler.scale(loss * (float("inf") if (rank, step) in overflow else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        dist.all_reduce(loss.detach())  # as a script logs: a rank in a round would hang here
        rounds.append(model.sync_stats().rounds)
    return rounds, values(model)


def test_a_step_that_a_scaler_skips_on_one_rank_counts():
    for overflow in ({(0, 0)}, {(1, 2), (0, 5)}):
        (first, mine), (second, its) = run_ranks(scaled, 2, overflow)
        assert first == second == [0, 0, 1, 1, 1, 2]
        assert torch.equal(mine, its) and mine.isfinite().all()


def two_optimizers(rank, world):
    """Train with two optimizers, of which one steps at every second batch only."""
    model = FastDDP(net(), sync=LocalSGD(2))
    first, second = (list(part.parameters()) for part in (model.module[0], model.module[4]))
    middle = list(model.module[2].parameters())
    one = torch.optim.AdamW([{"params": first}, {"params": middle, "lr": 0.1}], 0.01)
    two = torch.optim.SGD(second, 0.1)
    alike = []
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        one.step()
        if step % 2:
            two.step()
        model.zero_grad()
        alike.append([_alike(params) for params in (first, middle, second)])
    return alike


def _alike(params):
    flat = torch.cat([p.detach().flatten() for p in params])
    return torch.equal(average_of(flat), flat)


def test_each_optimizer_has_rounds_of_its_own():
    first, second = run_ranks(two_optimizers, 2)
    assert first == second
    assert [row[0] for row in first] == [row[1] for row in first] == [False, True, False, True]
    assert [row[2] for row in first] == [True, False, False, True]


def grown(rank, world):
    """A parameter group that is added, and a layer that is unfrozen, join the rounds."""
    model = FastDDP(net(), sync=DiLoCo(2, wire="int8"))
    last = list(model.module[4].parameters())
    for p in model.module[2].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.module[0].parameters(), *model.module[2].parameters()], 0.1)
    step = loop(rank, model, optimizer)
    for _ in range(3):
        step()
    for p in model.module[2].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": last})
    for _ in range(3):
        step()
    return _alike(model.parameters()), model.sync_stats().rounds


def test_parameters_that_come_later():
    assert run_ranks(grown, 2) == [(True, 3)] * 2


def averaged_state(rank, world, whether):
    model = FastDDP(net(), sync=LocalSGD(2, optimizer_state=whether))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = loop(rank, model, optimizer)
    for _ in range(4):
        step()
    return _alike([optimizer.state[p]["exp_avg_sq"] for p in model.parameters()])


def test_the_state_of_optimizers_is_averaged_if_asked_for():
    assert run_ranks(averaged_state, 2, True) == [True] * 2
    assert run_ranks(averaged_state, 2, False) == [False] * 2


def with_buffers(rank, world, broadcast):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = FastDDP(module, sync=LocalSGD(2), broadcast_buffers=broadcast)
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    means = []
    for _ in range(2):
        step()
        means.append(module[1].running_mean.clone())
    return means


def test_buffers_are_rank_0s_at_the_end_of_a_round():
    first, second = run_ranks(with_buffers, 2, True)
    assert not torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    first, second = run_ranks(with_buffers, 2, False)
    assert not torch.equal(first[1], second[1])


ROUND_MODES = {
    "local": LocalSGD(4, warmup=1),
    "diloco": DiLoCo(4, fragments=2, overlap=2, wire="int4"),
    "delayed": Delayed(2),
    "parts": DiLoCo(4, fragments=2, overlap=2, wire="int4", within=2),
}


def resumed(rank, world, mode):
    """A training that is saved within a round, and goes on in new objects."""
    whole, history = None, []
    for saved in (None, 3, 5):
        model = FastDDP(net(), sync=mode)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for step in range(11):
            if step == saved:
                file = io.BytesIO()
                parts = (model.module.state_dict(), optimizer.state_dict(), model.sync_state_dict())
                torch.save(parts, file)
                file.seek(0)
                weights, inner, rounds = torch.load(file, weights_only=True)
                model = FastDDP(net(), sync=mode)
                model.module.load_state_dict(weights)
                optimizer = torch.optim.AdamW(model.parameters(), 0.01)
                optimizer.load_state_dict(inner)
                model.load_sync_state_dict(rounds)
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        whole = values(model) if whole is None else whole
        history.append(torch.equal(values(model), whole))
    return history


@pytest.mark.parametrize("mode", ROUND_MODES)
def test_a_checkpoint_within_a_round_goes_on_with_the_same_bits(mode):
    world = 2 * ROUND_MODES[mode].part_size
    assert run_ranks(resumed, world, ROUND_MODES[mode]) == [[True, True, True]] * world


def other_world(rank, world, states, weights):
    """Take the states of two ranks on four."""
    model = FastDDP(net(), sync=DiLoCo(2, wire="int8"))
    if states is None:
        step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(3):
            step()
        model.end_round()
        return model.sync_state_dict(), model.module.state_dict()
    model.module.load_state_dict(weights)
    model.load_sync_state_dict(states)
    kept = model.sync_state_dict()["rounds"]["optimizers"][0]["kept"]
    return kept["residual"]["0.weight"], kept["outer"]["0.weight"]


@pytest.mark.slow
def test_states_of_other_numbers_of_ranks():
    saved = run_ranks(other_world, 2, None, None)
    states, weights = [state for state, _ in saved], saved[0][1]
    found = run_ranks(other_world, 4, states, weights)
    owed = sum(s["rounds"]["optimizers"][0]["kept"]["residual"]["0.weight"] for s in states) / 2
    assert torch.allclose(sum(residual for residual, _ in found) / 4, owed)
    assert torch.equal(found[3][1], weights["0.weight"])


def mixed(rank, world):
    """Parameters in fp32 that compute in bf16, and parameters of bf16."""
    mixed = _MixedPrecision(param_dtype=torch.bfloat16)
    model = FastDDP(net(), sync=LocalSGD(2), mixed_precision=mixed)
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    step()
    apart = _alike(model.parameters())
    step()
    dtypes = {p.dtype for p in model.parameters()}
    return apart, _alike(model.parameters()), dtypes


def test_mixed_precision():
    for apart, alike, dtypes in run_ranks(mixed, 2):
        assert not apart and alike and dtypes == {torch.float32}


def unchanged_outer(rank, world):
    """Rounding outer parameters to bf16 is no change: without inner steps nothing moves."""
    model = FastDDP(net().bfloat16(), sync=DiLoCo(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    before = model.sync_state_dict()["rounds"]["optimizers"][0]["kept"]["outer"]
    state = copy.deepcopy(model.sync_state_dict())
    for held in state["rounds"]["optimizers"][0]["kept"]["outer"].values():
        held.mul_(1 + 2**-12)
    model.load_sync_state_dict(state)
    optimizer.step()
    after = model.sync_state_dict()["rounds"]["optimizers"][0]["kept"]["outer"]
    wanted = {name: held * (1 + 2**-12) for name, held in before.items()}
    return all(torch.equal(after[name], wanted[name]) for name in wanted)


def test_outer_parameters_are_fp32_beside_parameters_of_bf16():
    assert run_ranks(unchanged_outer, 2) == [True] * 2


def in_parts(rank, world):
    """Parts of two ranks, whose gradients travel in int8 at every step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = FastDDP(module, wire="int8", sync=DiLoCo(3, within=2))
    step = loop(rank, model, torch.optim.AdamW(model.parameters(), 0.01))
    rows = []
    for _ in range(3):
        step()
        rows.append((values(model), module[1].running_mean.clone()))
    stats = model.sync_stats()
    step()
    model.end_round()
    return rows, stats, _alike(model.parameters())


def in_given_parts(rank, world):
    """Ranks 0 and 3 average gradients, and 1 and 2; both against the parts of `in_parts`."""
    groups = [dist.new_group(ranks) for ranks in ([3, 0], [1, 2])]
    model = FastDDP(net(), sync=DiLoCo(3, wire="int4", within=groups[rank in (1, 2)]))
    step = loop(rank, model, torch.optim.AdamW(model.parameters(), 0.01))
    rows = []
    for _ in range(4):
        step()
        rows.append(values(model))
    return rows, model.sync_stats().round_bytes


def in_other_order(rank, world):
    """The same training, where the parts are of ranks that follow each other."""
    order = [0, 3, 1, 2]  # place of each rank's batches
    model = FastDDP(net(), sync=DiLoCo(3, wire="int4", within=2))
    step = loop(order[rank], model, torch.optim.AdamW(model.parameters(), 0.01))
    rows = []
    for _ in range(4):
        step()
        rows.append(values(model))
    return rows, model.sync_stats().round_bytes


def test_parts_are_the_groups_that_are_given():
    given, following = run_ranks(in_given_parts, 4), run_ranks(in_other_order, 4)
    for rank, same in enumerate([0, 2, 3, 1]):
        rows, sent = given[rank]
        wanted, wanted_sent = following[same]
        assert sent == wanted_sent
        assert all(map(torch.equal, rows, wanted)), rank


def wrongly_given(rank, world):
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    alone = dist.new_group([rank], use_local_synchronization=True)
    elsewhere = {
        "overlapping": pairs[2] if rank in (0, 2) else pairs[rank // 2],
        "not a member": pairs[0],
        "no group": None if rank == 3 else pairs[rank // 2],
        "a number on one": 2 if rank == 3 else pairs[rank // 2],
        "sizes": alone if rank == 2 else pairs[rank // 2],
    }
    return {
        case: caught(lambda group=group: FastDDP(net(), sync=LocalSGD(2, within=group)))
        for case, group in elsewhere.items()
    }


WRONGLY_GIVEN = {
    "overlapping": "sync: within= of rank",
    "not a member": "sync: within= is a group that this rank is not in",
    "no group": "sync: within= is a group that this rank is not in",
    "a number on one": "within=2",
    "sizes": "within='a group of 1 ranks'",
}


def test_groups_that_are_no_parts_are_refused_on_every_rank():
    for found in run_ranks(wrongly_given, 4):
        for case, words in WRONGLY_GIVEN.items():
            assert words in found[case], f"{case}: {found[case]}"


def test_parts_of_ranks():
    ranks = run_ranks(in_parts, 4)
    for step in range(3):
        weights, means = zip(*(rows[step] for rows, *_ in ranks), strict=True)
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
        assert torch.equal(weights[0], weights[2]) == (step == 2)
        assert not torch.equal(means[0], means[1]) or step == 2
        assert torch.equal(means[0], means[3]) == (step == 2)
    for rank, (_, stats, alike) in enumerate(ranks):
        assert alike and stats.steps == 3 and stats.collectives > 0
        assert (stats.round_bytes > 0) == (rank in (0, 2))  # one of each part sends


def held_in_parts(rank, world):
    """Return the bytes of tensors that Python has after a round, and those of one flat buffer."""
    model = FastDDP(net(), sync=DiLoCo(2, wire="int8", within=2))
    step = loop(rank, model, torch.optim.SGD(model.parameters(), 0.1))
    step()
    step()
    gc.collect()
    tensors = [held for held in gc.get_objects() if isinstance(held, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    state = model.sync_state_dict()["rounds"]["optimizers"][0]
    block = FORMATS["int8"].block
    flat = sum(4 * block * -(-p.numel() // block) for p in model.parameters())
    return sum(storages.values()), sorted(state["kept"]), flat


def test_one_rank_of_a_part_holds_the_outer_state():
    ranks = run_ranks(held_in_parts, 4)
    for (held, kinds, flat), (less, none, _) in zip(ranks[::2], ranks[1::2], strict=True):
        assert kinds == ["momentum", "outer", "residual"] and none == []
        assert held - less == 3 * flat


def caught(fn):
    try:
        fn()
    except (RankMismatchError, ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differing(rank, world, case):
    model = FastDDP(net(), sync=DiLoCo(3, overlap=int(case == "left out, overlapped")))
    parameters = list(model.parameters())
    if case == "frozen":
        parameters[2].requires_grad_(rank != 1)
    optimizer = torch.optim.SGD(parameters[rank:] if case == "fewer" else parameters, 0.1)
    if case == "class" and rank == 1:
        optimizer = torch.optim.AdamW(parameters, 0.1)
    step = loop(rank, model, optimizer)
    before = values(model)

    def train():
        for number in range(6):
            if case.startswith("left out") and (rank, number) == (1, 1):
                model(batch(rank, number)).square().mean().backward()
                continue
            step()

    text = caught(train)
    state = model.sync_state_dict()["rounds"]["optimizers"]
    outer = [held for part in state for held in part["kept"]["outer"].values()]
    moved = outer and not torch.equal(torch.cat([held.flatten() for held in outer]), before)
    return text, bool(moved)


DIFFERENCES = {
    "frozen": "has requires_grad False there but True on rank 0",
    "fewer": "has name '0.bias' there but '0.weight' on rank 0",
    "class": "the optimizer is AdamW, number 0, there but SGD, number 0, on rank 0",
    "left out, overlapped": "the number of forwards outside no_sync() is 4 there but 3 on rank 0",
    "left out": "the number of forwards outside no_sync() is 4 there but 3 on rank 0",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_would_silently_differ(case):
    for text, moved in run_ranks(differing, 2, case):
        assert text.startswith("RankMismatchError: rank 1 differs from rank 0"), text
        assert DIFFERENCES[case] in text
        assert not moved


def refused(rank, world):
    def wrap(sync):
        return FastDDP(net(), sync=sync)

    def step_of(model, optimizer):
        return loop(rank, model, optimizer)

    lbfgs = wrap(Delayed(1))
    optimizer = torch.optim.LBFGS(lbfgs.parameters())
    wide = FastDDP(net().double(), sync=DiLoCo(2, wire="int8"))
    inner = torch.optim.SGD(wide.parameters(), 0.1)
    for p in wide.parameters():
        p.grad = torch.zeros_like(p)
    local = wrap(LocalSGD(2))
    state = wrap(DiLoCo(2)).sync_state_dict()
    plain = FastDDP(net())
    return {
        "modes": caught(lambda: wrap(LocalSGD(2 + rank))),
        "one rank": caught(lambda: wrap(None if rank else "diloco:2")),
        "lbfgs": caught(lambda: optimizer.step(lambda: torch.tensor(0.0))),
        "fp64": caught(inner.step),
        "other state": caught(lambda: local.load_sync_state_dict(state)),
        "no state": caught(lambda: local.load_sync_state_dict(plain.sync_state_dict())),
        "state of a mode": caught(lambda: plain.load_sync_state_dict(state)),
        "parts": caught(lambda: wrap(LocalSGD(2, within=3))),
        "group": caught(lambda: local._update_process_group(dist.group.WORLD)),
        "delayed parameters": caught(
            lambda: FastDDP(
                (module := net()),
                sync="local:2",
                delay_all_reduce_named_params=[("4.bias", module[4].bias)],
                param_to_hook_all_reduce=module[0].weight,
            )
        ),
    }


REFUSALS = {
    "modes": "sync is LocalSGD(every=3) there but LocalSGD(every=2) on rank 0",
    "one rank": "sync is every step there but DiLoCo(every=2",
    "lbfgs": "torch.optim.lbfgs.LBFGS may remember where it left them",
    "fp64": "differences are coded in fp32, but '0.weight' is torch.float64; use wire='fp32'",
    "other state": "the state is one of sync=DiLoCo(every=2",
    "no state": "the state holds no rounds, but the model has sync=LocalSGD",
    "state of a mode": "but the model averages gradients at every step; wrap it with that mode",
    "parts": "within=3 needs groups of equal size, but there are 2 ranks",
    "group": "sync= averages parameters over the ranks of the old process group",
    "delayed parameters": "delay_all_reduce_named_params averages gradients at every step",
}


def test_requests_that_are_refused_on_every_rank():
    for found in run_ranks(refused, 2):
        for case, words in REFUSALS.items():
            assert words in found[case], f"{case}: {found[case]}"


def without_catch_up(rank, world):
    patient = Faults(elastic=ElasticPolicy(patience=1))
    alone = caught(lambda: FastDDP(net(), faults=patient))
    model = FastDDP(net(), sync=LocalSGD(1), faults=patient)
    return alone, caught(loop(rank, model, torch.optim.SGD(model.parameters(), 0.1)))


def test_patience_needs_rounds_and_a_way_back():
    for alone, step in testing.run_ranks(without_catch_up, 2):  # not ranks that others share
        assert "patience=1 leaves slow ranks out of averages of parameters" in alone
        assert "leaves slow ranks out until they come back, which needs model.catch_up" in step
