"""Planned peaks against those of real steps: at stage 3, with masters, recomputed, convolutions."""

import pytest
import torch
from torch import nn

from docs.planner_peaks import Case, measured, planned, traced
from examples.common.ranks import Group
from fastsync.planner.formulas import adam_by_formula, transformer_of
from fastsync.planner.group_memory import Units, unit_sizes
from fastsync.planner.memory import peak_of, phases_of
from fastsync.planner.strategy import Carrier, Strategy, engine_plan, named, shard_units
from fastsync.planner.trace import trace_model, units_of
from fastsync.testing import run_ranks


def peaks(rank, world, case):
    torch.set_num_threads(1)
    return measured(case, Group(rank, world, torch.device("cpu")))


CASES = [
    Case("conv", 0),
    Case("wide", 1, masters=True),
    Case("wide", 3),
    Case("transformer", 3),
    Case("wide", 0, masters=True),
    Case("gpt2", 3, checkpointing=True, masters=True),
    Case("gpt2", 0, wire="int8"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_that_of_a_real_step(case):
    real = run_ranks(peaks, 2, case, timeout=600.0)[0]
    if real is None:
        pytest.skip("the allocator cannot be asked")
    # Where ranks share, a step may hold less, as gradients arrive early, or more, as others read
    # late what was written for them. A processor for which oneDNN has no better way than a product
    # of matrices holds more while it convolves.
    least, most = (0.98, 1.02) if case.stage == 0 else (0.93, 1.1)
    least *= 0.88 if case.model == "conv" else 1
    assert least * real <= planned(case).total <= most * real


def chain(layers=4, width=512):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def test_units_come_and_go_in_the_order_of_the_step():
    record = trace_model(chain, (2, 512))
    kinds = ("enter", "leave", "return", "through")
    marks = [(m.kind, m.place) for m in record.marks if m.kind in kinds]
    forward = [(kind, unit) for unit in range(1, 5) for kind in ("enter", "leave")]
    backward = [(kind, unit) for unit in range(3, 0, -1) for kind in ("return", "through")]
    ends = [("return", 4), ("return", 0), ("through", 4)]
    assert marks == [("enter", 0), *forward, ("leave", 0), *ends, *backward[:-1]]
    # The gradient of the input is not needed, so the first unit ends with the backward.
    assert ("through", 1) not in marks


def test_units_are_those_that_the_wrapper_chooses():
    model = chain()
    assert units_of(model) == [[model], *([layer] for layer in model)]
    record = traced("transformer")
    assert {param.unit for param in record.params if "encoder" in param.name} == set(range(1, 7))
    assert {param.unit for param in record.params if "encoder" not in param.name} == {0}


def replayed(record, strategy, carrier=Carrier.MEMORY):
    units, most = Units(record, strategy, carrier), 0
    for _ in range(2):
        units.begin()
        for at, mark in enumerate(record.marks):
            if mark.kind == "grad":
                units.gradient(mark.place, mark.size)
            units.reaches(at, mark)
            most = max(most, units.held)
        units.end()
    return units, most


def test_at_most_two_units_are_whole_and_nothing_stays():
    record, layer = trace_model(lambda: chain(8), (2, 512)), 4 * (512 * 512 + 512)
    units, most = replayed(record, named("3", 2, 2), Carrier.MESSAGES)
    # Two whole units, their packed messages, and the gradients of two.
    assert 4 * layer <= most <= 4.2 * layer
    assert units.left == 0
    assert units.gradients == pytest.approx(record.nbytes / 2, rel=0.01)
    _, on_gpu = replayed(record, named("3", 2, 2), Carrier.DEVICES)
    # One whole unit, the packed shares of the next, gradients that are sent, and those that come.
    assert 4 * layer <= on_gpu <= 4.2 * layer


def test_one_unit_is_whole_where_ranks_share_memory():
    record, layer = trace_model(lambda: chain(8), (2, 512)), 4 * (512 * 512 + 512)
    most = replayed(record, named("3", 2, 2))[1]
    # It and its gradients, and halves of two that have been written for others.
    assert 3.0 * layer <= most <= 3.1 * layer


def test_gradients_that_accumulate_are_there_from_the_beginning():
    record = trace_model(chain, (2, 512))
    units = Units(record, Strategy(3, 2, 2, accumulate=2), Carrier.MESSAGES)
    assert units.gradients == pytest.approx(record.nbytes / 2, rel=0.01)


def test_gradients_of_coded_buckets_come_with_the_backward_or_are_added_to():
    record = trace_model(chain, (4096, 512))  # activations take more than gradients
    once, often = (
        phases_of(record, how, engine_plan(record, how), adam_by_formula)
        for how in (Strategy(0, 2, 2, "int8", accumulate=times) for times in (1, 2))
    )
    assert once[0].items["gradients"] < 0.5 * record.nbytes
    assert often[0].items["gradients"] == record.nbytes
    assert once[1].items["gradients"] == often[1].items["gradients"] == record.nbytes


def test_shares_of_narrow_parameters_are_wide_with_masters():
    record = trace_model(chain, (2, 512), dtype=torch.bfloat16)
    by_unit = unit_sizes(record, Strategy(3, 2, 2, masters=True), Carrier.MEMORY)
    plain = unit_sizes(record, named("3", 2, 2), Carrier.MEMORY)
    assert set(by_unit) == {1, 2}  # two narrow layers share a unit: one would be too small
    for unit in by_unit:
        [wide], [narrow] = by_unit[unit], plain[unit]
        assert wide.shard == 2 * narrow.shard and wide.whole == narrow.whole
        # A flag for each parameter travels with sums, which are the gradients then.
        assert wide.gradients == wide.sums >= 2 * narrow.gradients


def test_layers_of_a_formula_are_gathered_one_by_one():
    record = transformer_of(10**9, torch.bfloat16, (1, 128))
    units, most = replayed(record, named("3", 8, 8), Carrier.DEVICES)
    assert most < 0.5 * record.nbytes and units.left == 0


def test_the_largest_piece_may_belong_to_a_later_rank():
    def build():
        return nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 60, bias=False)])

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.parts = nn.Linear(64, 8), build()

        def forward(self, x):
            return self.first(x).sum() + sum(part(x).sum() for part in self.parts)

    record = trace_model(Both, (2, 64))
    plan, _ = engine_plan(record, named("1", 2, 2))
    for unit in shard_units(record, plan, 2):
        assert sum(unit.first) >= sum(unit.largest)
        assert max(unit.largest) >= max(unit.first)
    assert any(max(unit.largest) > max(unit.first) for unit in shard_units(record, plan, 2))


def test_masters_of_a_unit_step_alone():
    record = transformer_of(10**9, torch.bfloat16, (1, 128))
    strategy = Strategy(1, 8, 8, masters=True)
    planned_units = engine_plan(record, strategy, carrier=Carrier.DEVICES)
    phases = phases_of(record, strategy, planned_units, adam_by_formula, Carrier.DEVICES)
    largest = max(4 * sum(unit.first) for unit in planned_units[1])
    assert phases[1].items["optimizer workspace"] == largest
    assert largest < 4 * record.numel / 8
    assert peak_of(phases).total > 0


@pytest.mark.parametrize(("channels", "forward"), [(16, 16 * 10 * 10), (3, 8 * 8 * 8)])
def test_a_cpus_convolutions_hold_copies(channels, forward):
    def build():
        return nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 8, 3))

    record = trace_model(build, (2, channels, 10, 10))
    sizes = [mark.size for mark in record.marks if mark.kind == "scratch"]
    weight = 4 * 9 * 8 * channels
    image, gradient = 4 * 2 * channels * 100, 4 * 2 * 8 * 64
    assert sizes[1] == weight + 4 * 2 * forward
    assert sizes[2] == max(weight, image + gradient)

    def most(carrier):
        strategy = named("0", 2, 2)
        plan = engine_plan(record, strategy, carrier=carrier)
        return phases_of(record, strategy, plan, adam_by_formula, carrier)[0].total

    # Where few channels come in, the peak lies elsewhere.
    assert (most(Carrier.MESSAGES) > most(Carrier.DEVICES)) == (channels == 16)
