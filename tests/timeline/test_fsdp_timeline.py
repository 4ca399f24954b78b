"""Timelines and counters of units: what real ranks gather, reduce and wait for."""

import re
import time

import pytest
import torch
from torch import nn

from fastsync import FastDDP, TimelinePolicy, UnitTiming, Zero, fully_shard
from fastsync.timeline.data import by_step, find_slow_ranks, load, steps_of
from fastsync.timeline.moves import moves_of
from fastsync.timeline.page import html_page
from fastsync.timeline.views import perfetto_trace, summary_text
from tests.fsdp.fsdp_models import apply, loss_of, mesh_of, net, words
from tests.helpers.teams import run_ranks
from tests.timeline.recordings import MS, made_up_units, unit_events

UNITS = ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def wrap(way, timeline=False, **options):
    """A unit per block, and the root's."""
    if way == "zero3":
        return FastDDP(net(4, 256), zero=Zero(3, units=[type(net().blocks[0])]), timeline=timeline)
    model = apply(fully_shard, net(4, 256), **options)
    if timeline:
        model.record_timeline(timeline)
    return model


def train(model, rank, steps):
    for step in range(steps):
        loss_of(model, words(rank, step)).backward()


def record(rank, world, way, policy):
    train(wrap(way, policy), rank, 6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero3", "fully_shard"])
def test_units_are_recorded_and_shown(way, tmp_path):
    path = tmp_path / "run.json"
    run_ranks(record, 2, way, TimelinePolicy(str(path), skip=2, steps=3))
    run = load(path)
    assert (run.model, run.plans, run.missing) == ("Net", (), ())
    assert [info.name for info in run.units] == UNITS
    assert run.units[1].parameters[0] == "blocks.0.norm.weight"
    assert run.units[1].bytes == 4 * sum(p.numel() for p in net(4, 256).blocks[0].parameters())
    assert list(by_step(run)) == [2, 3, 4]
    for ranks in by_step(run).values():
        for step in ranks:
            check_step(step)
    text = summary_text(run)
    assert re.search(r"MiB in 9 gathers, 5 reductions; \d+% behind computation", text)
    assert re.search(r"exposed .* of it waits for gathers", text)
    assert re.search(r"^  blocks\.3 +1\.5 MiB( +\d+\.\d\d){4}$", text, re.MULTILINE)
    page = html_page(run)
    assert "<span>unit blocks.3</span>" in page and 'class="reduction"' in page
    events = perfetto_trace(run)["traceEvents"]
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {"compute", *(f"unit {name}" for name in UNITS)}
    gathers = [e for e in events if e["name"] == "gather"]
    assert len(gathers) == 2 * 3 * 9
    assert gathers[0]["args"]["parameters"] == ["embed.weight"]
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def check_step(step):
    """Every unit but the root's is gathered twice, in the order of forward and against it."""
    gathers = [m.unit for m in step.moves if m.kind == "gather"]
    assert gathers == [0, 1, 2, 3, 4, 4, 3, 2, 1]
    assert [m.unit for m in step.moves if m.kind == "reduction"] == [4, 3, 2, 1, 0]
    for move in step.moves:
        assert step.start <= move.started <= move.done <= move.arrived <= step.end
        assert move.started <= move.wanted <= move.arrived
    ahead = [m for m in step.moves if m.kind == "gather" and m.unit in (2, 3, 4)]
    assert all(m.started < m.wanted for m in ahead)
    last = step.end - step.backward_end
    assert last * 1e-9 <= step.exposed <= (step.end - step.start) * 1e-9
    assert step.exposed + step.computing <= (step.end - step.start) * 1e-9 + 1e-6


def sleep_in_block(rank, world, path):
    model = wrap("fully_shard", TimelinePolicy(path, skip=1, steps=4))
    if rank == 1:
        model.blocks[1].register_forward_hook(lambda *_: time.sleep(0.3))
    train(model, rank, 6)


@pytest.mark.slow
def test_a_rank_that_sleeps_exposes_the_gathers_of_others(tmp_path):
    path = tmp_path / "run.json"
    run_ranks(sleep_in_block, 2, str(path))
    run = load(path)
    steps = by_step(run)
    assert find_slow_ranks(steps).ranks == (1,)
    # Rank 1 sleeps before it starts the forward's gather of the last block.
    late = [m for waiting, _ in steps.values() for m in waiting.moves if (m.unit, m.turn) == (4, 0)]
    assert max(m.arrived - m.wanted for m in late if m.kind == "gather") > 50 * MS
    assert "waits for another rank" in html_page(run)


def windows(rank, world, folder):
    model = wrap("fully_shard", True)
    train(model, rank, 4)
    model.set_requires_gradient_sync(False)
    train(model, rank, 2)
    with torch.no_grad():
        loss_of(model, words(rank, 9))
    model.set_requires_gradient_sync(True)
    train(model, rank, 1)
    model.write_timeline(f"{folder}/run.json")
    stats = model.sync_stats()
    return stats.steps, stats.recorded_steps


@pytest.mark.slow
def test_what_accumulates_belongs_to_the_step_and_what_evaluates_does_not(tmp_path):
    assert run_ranks(windows, 2, str(tmp_path)) == [(5, 2)] * 2
    steps = by_step(load(tmp_path / "run.json"))
    assert list(steps) == [3, 4]
    for step in steps[4]:
        assert len(step.forwards) == 3
        assert len(step.accumulating) == 2
        assert sum(m.kind == "gather" for m in step.moves) == 3 * 9
        assert sum(m.kind == "reduction" for m in step.moves) == 5


def bytes_of_a_step(rank, world, way, options):
    model = wrap(way, **options)
    train(model, rank, 2)
    before = model.sync_stats()
    train(model, rank, 1)
    after = model.sync_stats()
    names = ("steps", "gathers", "reductions", "gathered_bytes", "reduced_bytes", "sent_bytes")
    took = {name: after[name] - before[name] for name in names}
    return took, 4 * sum(p.numel() for p in net(4, 256).parameters()), str(after)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("way", "reshard"), [("zero3", None), ("fully_shard", True), ("fully_shard", False)]
)
def test_counters_tell_what_was_sent(world, way, reshard):
    options = {} if reshard is None else {"reshard_after_forward": reshard}
    results = run_ranks(bytes_of_a_step, world, way, options)
    unit = (world - 1) / world * results[0][1]
    for took, _, text in results:
        assert took["steps"] == 1 and took["reductions"] == 5
        assert took["gathers"] == {None: 9, True: 10, False: 5}[reshard]
        assert "gathers " in text and "gathered_bytes " in text and "None" not in text
    mean = {name: sum(took[name] for took, _, _ in results) / world for name in results[0][0]}
    gathers = 1 if reshard is False else 2
    assert mean["gathered_bytes"] == pytest.approx(gathers * unit, rel=0.01)
    assert mean["reduced_bytes"] == pytest.approx(unit, rel=0.01)
    assert mean["sent_bytes"] == mean["gathered_bytes"] + mean["reduced_bytes"]


class Uneven(nn.Module):
    """Layer of whose rows the last of three ranks has none, in a message by itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 100_000))

    def forward(self, x):
        return x * self.weight.sum()


def uneven(rank, world):
    model = fully_shard(Uneven())
    model(torch.ones(1)).sum().backward()
    stats = model.sync_stats()
    return stats.gathered_bytes // 400_000, stats.reduced_bytes // 400_000


@pytest.mark.slow
def test_only_what_leaves_a_rank_is_counted():
    """Rows: two, two and none; each sends its own to two others, and gradients of theirs."""
    assert run_ranks(uneven, 3) == [(4, 2), (4, 2), (0, 4)]


def odd_ones(rank, world):
    """Use replicas, parameters that are not trained, and a unit that is gathered before the root
    runs.
    """
    model = net(2, 128)
    model.table = nn.Parameter(torch.ones(64, 100, dtype=torch.int8), requires_grad=False)
    fully_shard(model, mesh=mesh_of(world, 2))
    loss_of(model, words(rank, 0)).backward()
    stats = model.sync_stats()
    trained = sum(p.numel() * 4 for p in net(2, 128).parameters())
    early = apply(fully_shard, net())
    early.blocks[0].unshard()
    loss_of(early, words(rank, 0)).backward()
    return stats, trained, early.sync_stats().gathers


@pytest.mark.slow
def test_all_that_units_send_is_counted():
    for stats, trained, gathers in run_ranks(odd_ones, 4):
        assert stats.gathers == 2 and stats.reductions == 1
        assert stats.gathered_bytes == pytest.approx(trained / 2 + 64 * 100 / 2, rel=0.02)
        summed = stats.sent_bytes - stats.gathered_bytes - stats.reduced_bytes
        assert summed == pytest.approx(trained / 2, rel=0.02)  # a half's sum over two ranks
        assert gathers == 1 + 2 * 3


def times(rank, world):
    model = wrap("fully_shard", True)
    train(model, rank, 6)
    return model.sync_stats(one_rank_step=1e-6)


@pytest.mark.slow
def test_times_of_units():
    for stats in run_ranks(times, 2):
        assert [unit.name for unit in stats.unit_times] == UNITS
        assert all(isinstance(unit, UnitTiming) for unit in stats.unit_times)
        assert stats.units == tuple(unit.bytes for unit in stats.unit_times)
        for unit in stats.unit_times:
            assert unit.gathering > 0 and unit.reducing > 0
        assert 0 < stats.exposed_time < stats.step_time
        assert 0 <= stats.overlap <= 1 and 0 < stats.scaling_efficiency < 1
        assert "name blocks.3 bytes 1.5 MiB gathering " in str(stats)


def refuse(rank, world):
    model = apply(fully_shard, net())
    with pytest.raises(RuntimeError, match="call record_timeline"):
        model.write_timeline("nowhere.json")
    model.record_timeline(True)
    with pytest.raises(RuntimeError, match="recorded already"):
        model.record_timeline("x.json")
    train(model, rank, 1)
    for call in (model.blocks[0].sync_stats, model.blocks[0].record_timeline):
        with pytest.raises(RuntimeError, match="is no root"):
            call()
    other = apply(fully_shard, net())
    other.blocks[0].record_timeline()
    with pytest.raises(RuntimeError, match="no root: call record_timeline"):
        loss_of(other, words(rank, 0))


@pytest.mark.slow
def test_only_roots_are_recorded_and_once():
    run_ranks(refuse, 2)


def marks(unit, *given, kind="gather"):
    return [(3, f"{kind}_{what}", unit, 8 if what == "started" else 0, t) for what, t in given]


def test_marks_become_movements():
    first = marks(1, ("started", 1), ("done", 4), ("wanted", 5), ("arrived", 6))
    again = marks(1, ("started", 7), ("wanted", 8), ("arrived", 9))
    unused = marks(2, ("started", 2), ("done", 3))
    other = marks(1, ("started", 6), ("wanted", 6), ("done", 8), ("arrived", 8), kind="reduction")
    one, two, three = moves_of([*first, *unused, *other, *again, (3, "ready", 1, 0, 4)])
    assert (one.unit, one.kind, one.turn, one.started, one.done) == (1, "gather", 0, 1, 4)
    assert (one.exposed, one.bytes) == ((5, 6), 8)
    assert (two.kind, two.done) == ("reduction", 8)
    assert (three.turn, three.done) == (1, 9)  # its time is unknown, but before it arrived


def test_waits_are_exposed_once_and_not_computed():
    moves = [(1, "gather", 1, 4, 2, 5), (1, "reduction", 24, 33, 28, 34)]
    events = unit_events(3, 0, moves)
    step = steps_of(0, events)[3]
    assert step.exposed == pytest.approx(0.003 + 0.008)  # 2 to 5, 28 to 36
    assert step.computing == pytest.approx(0.010 - 0.003 + 0.018 - 0.002)
    assert step.communicating == pytest.approx(0.003 + 0.009)
    assert step.overlapped == pytest.approx(0.001 + 0.004)
    assert step.waits("gather") == ((2 * MS, 5 * MS),)


def test_the_summary_says_what_units_cost():
    text = summary_text(made_up_units(late=2))
    assert "3.0 MiB in 2 gathers, 1 reduction; " in text
    # The first gather, 2 ms; the second, 4 on rank 0; from the reduction's wait to the end, 8.
    assert re.search(r"exposed +14\.00 ms +39% of the step; 6\.00 ms of it waits for gathers", text)
    assert re.search(r"blocks\.0 +1\.0 MiB +3\.00 +3\.00 +9\.00 +6\.00$", text, re.MULTILINE)


def test_the_page_holds_units():
    page = html_page(made_up_units())
    lanes = re.findall(r'<div class="lane"><span>(.*?)</span>', page)
    assert lanes == 2 * ["compute", "unit root", "unit blocks.0", "communication"]
    exposed = re.findall(r'class="exposed" style="left:([\d.]+)%;width:([\d.]+)%', page)[:3]
    spans = [(float(left) * 0.36, float(width) * 0.36) for left, width in exposed]  # of 36 ms
    assert spans == [pytest.approx(each, abs=1e-3) for each in ((0, 2), (4, 2), (28, 8))]
    assert "blocks.0.bias" in page
