"""Every wire format between ranks with CUDA tensors, over NCCL and over Gloo."""

import pytest

from fastsync import Wire
from fastsync.wire.formats import FORMATS
from tests.helpers.devices import TRANSPORTS, needs_gpu, run_cuda_ranks
from tests.wire.reference_codes import Halves
from tests.wire.test_wire import TOLERANCE, errors_of_steps

pytestmark = needs_gpu
FORMS = ("two_shot", "gather")


def errors_of_wires(rank, world, wires):
    """By wire, the largest error of a few steps. That ranks hold the same bits is checked there."""
    return [max(errors_of_steps(rank, world, wire, device="cuda")[0]) for wire in wires]


def check(world, transport, wires):
    """`wires` are pairs of a wire and the largest error allowed."""
    for found in run_cuda_ranks(errors_of_wires, world, [w for w, _ in wires], transport=transport):
        for error, (wire, limit) in zip(found, wires, strict=True):
            assert error < limit, wire
            assert limit == TOLERANCE["fp32"] or error > limit / 100, f"{wire}: it was not coded"


@pytest.mark.slow(but=("2-nccl",))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_format_in_every_form(world, transport):
    coded = [
        (Wire(name, form=form, error_feedback=False), TOLERANCE[name])
        for name in FORMATS
        for form in FORMS
    ]
    check(world, transport, coded)


@pytest.mark.slow("gloo")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_defaults_and_other_wires(transport):
    """Check what `wire=` alone chooses; the backend sums bfloat16, in its own precision."""
    narrow = [name for name in FORMATS if name not in ("fp32", "bf16", "int4")]
    wires = [(name, 1.5 * TOLERANCE[name]) for name in narrow]
    wires += [("bf16", 4 * TOLERANCE["bf16"]), (Halves(), 2e-3)]
    wires += [(Wire("int8", stochastic=True), 2 * TOLERANCE["int8"])]
    wires += [(Wire("int8", form="two_shot", piece_bytes=3000), 1.5 * TOLERANCE["int8"])]
    check(2, transport, wires)


@pytest.mark.slow("gloo")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wires_that_send_a_part(transport):
    check(2, transport, [("topk", 1.5), (Wire("int4"), 0.5)])
