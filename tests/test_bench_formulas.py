"""The formulas that counted bytes are set against, with numbers worked out by hand."""

import pytest
import torch

from bench.measure.bare import BareList
from bench.report.formulas import HELD, held_table, variant_bytes, wire_bytes
from examples.common.variants import VARIANTS
from fastsync import FastDDP, Wire
from fastsync.testing import run_ranks
from fastsync.wire.formats import wire_formats

CPU = torch.device("cpu")
SHAPES = [(64, 128), (128,), (16, 32, 4)]  # 8192 + 128 + 2048 elements
NUMEL = 8192 + 128 + 2048
PER_ELEMENT = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2 + 1 / 256,
    "fp8_e4m3": 1 + 1 / 256,
    "fp8_e5m2": 1 + 1 / 256,
    "int8": 1 + 2 / 128,
    "int4": 1 / 2 + 2 / 64,
}


@pytest.mark.parametrize("wire", PER_ELEMENT)
@pytest.mark.parametrize(("world", "factor"), [(2, 1), (4, 1.5)])
def test_block_formats_send_codes_and_scales(wire, world, factor):
    found = wire_bytes(wire, SHAPES, world, CPU)
    assert found == pytest.approx(factor * PER_ELEMENT[wire] * NUMEL, rel=2e-3)


@pytest.mark.parametrize("world", [2, 4])
def test_top_k_sends_positions_and_values_to_all_others(world):
    assert wire_bytes("topk", SHAPES, world, CPU) == (world - 1) * 8 * round(0.01 * NUMEL)


def test_every_variant_has_a_formula():
    """But the hierarchical ones, whose bytes follow from how the ranks lie on machines."""
    for name, variant in VARIANTS.items():
        found = variant_bytes(variant, SHAPES, 2, CPU)
        assert (found is None) == name.startswith("fastsync_nodes"), name
        assert found is None or found > 0, name
    assert variant_bytes(VARIANTS["ddp_fp16"], SHAPES, 4, CPU) == 1.5 * 2 * NUMEL
    assert set(PER_ELEMENT) | {"topk"} <= set(wire_formats())


def counted(rank, world, wires):
    """The bytes that the engine counts for a backward, by wire format."""
    found = {}
    for wire in wires:
        module = BareList([(64, 128), (64, 128)], CPU)
        model = FastDDP(module, wire=Wire(wire, shared_memory=False))
        for _ in range(3):
            module.ready += [torch.randn_like(p) for p in module.list]
            model().backward()
        stats = model.sync_stats()
        found[wire] = stats.sent_bytes / stats.steps
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_engine_counts_what_the_formula_says(world):
    """Flags and padding come on top."""
    for sent in run_ranks(counted, world, wire_formats()):
        for wire, found in sent.items():
            formula = wire_bytes(wire, [(64, 128), (64, 128)], world, CPU)
            assert 1 <= found / formula < 1.12, wire


def test_what_a_rank_holds_in_each_stage():
    """70 billion parameters on 8 ranks, in GB; with master weights 4Ψ + 12Ψ/N and 2Ψ + 14Ψ/N."""
    plain, master = HELD["bf16, states in fp32"], HELD["bf16, states and master weights in fp32"]
    assert [70 * plain.per_rank(stage, 8) for stage in range(4)] == [840, 350, 227.5, 105]
    for world in (2, 4, 8):
        assert master.per_rank(1, world) == pytest.approx(4 + 12 / world)
        assert master.per_rank(2, world) == pytest.approx(2 + 14 / world)
    assert "227.5 GB" in held_table()
