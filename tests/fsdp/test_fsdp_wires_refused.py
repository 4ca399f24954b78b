"""Wires that units cannot have, and ranks that mean different ones: errors everywhere."""

import pytest

from fastsync import FastDDP, RankMismatchError, TopK, Wire, Zero, fully_shard
from fastsync.config.arguments import grouped
from tests.fsdp.fsdp_models import apply, mesh_of, net, words
from tests.helpers.teams import run_ranks

REFUSED = {
    "topk": (TopK(0.1), "whole gradients"),
    "int4": ("int4", "error feedback"),
    "feedback": (Wire("int8", error_feedback=True), "error feedback"),
    "overrides": (Wire("int8", overrides={"*norm*": "fp32"}), "know no overrides"),
    "warm-up": (Wire("int8", warmup_steps=3), "know no warmup_steps"),
    "native": (Wire("bf16", form="native"), "know no form"),
    "hierarchical": (Wire("int8", form="hierarchical"), "know no form"),
    "nothing": ("int7", "int7"),
}


def refuse(rank, world):
    found = []
    for wire, text in REFUSED.values():
        for wrap in (
            fully_shard,
            lambda module, **options: FastDDP(module, **grouped({"zero": 3, **options})),
        ):
            with pytest.raises(ValueError, match=text) as error:
                wrap(net(), wire=wire)
            found.append(str(error.value))
    for wrap in (
        fully_shard,
        lambda module, **options: FastDDP(module, **grouped({"zero": 3, **options})),
    ):
        with pytest.raises(ValueError, match="too much of a weight"):
            wrap(net(), parameter_wire="int4")
    with pytest.raises(ValueError, match="makes none of the parameters smaller"):
        FastDDP(net().double(), zero=Zero(3, parameter_wire="int8"))
    return found


def test_what_units_cannot_send_is_an_error_on_every_rank():
    first, second = run_ranks(refuse, 2)
    assert first == second


WIRES = ({"wire": "int8"}, {"parameter_wire": "int8"}, {"wire": Wire("int8", seed=1)}, {})


def differ(rank, world, rows, one, other, wrap):
    options = WIRES[other] if rank == world - 1 else WIRES[one]
    try:
        if wrap:
            FastDDP(net(), **grouped({"zero": 3, **options}))
        else:
            model = apply(fully_shard, net(), mesh=mesh_of(world, rows), **options)
            model(words(rank, 0))
    except RankMismatchError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 3), (3, 1), (0, 2)])
@pytest.mark.parametrize(("world", "rows"), [(2, None), (3, None), (4, 2)])
def test_ranks_that_mean_different_wires(world, rows, one, other):
    for text in run_ranks(differ, world, rows, one, other, False):
        assert text is not None and "what travels of unit" in text
    if rows is None:
        assert None not in run_ranks(differ, world, rows, one, other, True)
