"""docs/api.md says what the code says: names, arguments, defaults, counters."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.parallel.distributed import _MixedPrecision

import fastsync
import fastsync.testing
from fastsync.testing import run_ranks
from fastsync.wire.formats import wire_formats

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()


def section(heading):
    """The text below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/api.md has no heading {heading!r}"
    return found[1]


def rows(heading):
    return [
        [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        for line in section(heading).splitlines()
        if line.startswith("| `")
    ]


def parameters(function):
    """Return the parameters that a caller may name; FastDDP accepts others only to report them."""
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD]


def documented(function, name):
    """Whether a heading shows a function's parameters in their order."""
    shown = [f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in parameters(function)]
    return f"### `{name}({', '.join(shown)})`\n" in PAGE


def test_arguments_and_defaults():
    wanted = [
        [p.name, "required" if p.default is p.empty else repr(p.default)]
        for p in parameters(fastsync.FastDDP.__init__)
        if p.kind is not p.VAR_KEYWORD  # which takes former arguments, for their error
    ]
    assert [row[:2] for row in rows("Arguments")] == wanted
    assert all(len(row) == 3 and row[2] for row in rows("Arguments"))


def another_value(name, group):
    """A layer, and an argument with another value than its default, where there is one."""
    layer = torch.nn.Linear(2, 2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    delayed = layer.bias
    values = {
        "module": {},
        "device_ids": {"device_ids": []},
        "output_device": {"output_device": None},
        "dim": {"dim": 1},
        "process_group": {"process_group": group},
        "bucket_cap_mb": {"bucket_cap_mb": 1},
        "mixed_precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        "device_mesh": {"device_mesh": mesh},
        "bucket_cap_mb_list": {"bucket_cap_mb_list": [1, 2]},
        "delay_all_reduce_named_params": {
            "delay_all_reduce_named_params": [("bias", delayed)],
            "param_to_hook_all_reduce": layer.weight,
        },
        "timeline": {"timeline": True},
        "zero": {"zero": 1},
        "faults": {"faults": fastsync.Faults(nonfinite="raise", on_preemption=lambda: None)},
    }
    values["param_to_hook_all_reduce"] = values["delay_all_reduce_named_params"]
    flag = inspect.signature(fastsync.FastDDP).parameters[name].default
    return layer, values.get(name, {name: not flag})


def trained(layer, arguments):
    model = fastsync.FastDDP(layer, **arguments)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def accepted(rank, world, names, wires):
    group = torch.distributed.new_group()
    arguments = {name: trained(*another_value(name, group)) for name in names}
    return arguments | {wire: trained(torch.nn.Linear(2, 2), {"wire": wire}) for wire in wires}


def test_what_is_described_is_accepted():
    """Every argument, with another value than its default, and every wire format."""
    described = {row[0]: row[2] for row in rows("Arguments")}
    assert not [name for name, meaning in described.items() if "not supported" in meaning]
    formats = next(row[2] for row in rows("fastsync.Wire") if row[0] == "format")
    assert set(wire_formats()) <= set(re.findall(r"\w+", formats))
    names = [name for name in described if name != "wire"]
    trained_with = run_ranks(accepted, 1, names, wire_formats())[0]
    assert trained_with == dict.fromkeys([*names, *wire_formats()], True)


def test_methods_of_its_own():
    own = {n: f for n, f in vars(fastsync.FastDDP).items() if not n.startswith("_")}
    assert own
    for name, method in own.items():
        assert documented(method, name), f"docs/api.md lacks {name}{inspect.signature(method)}"


def plain_name(name):
    return name.replace("_", r"\_")


@pytest.mark.parametrize("name", fastsync.__all__)
def test_public_names(name):
    section(f"fastsync.{plain_name(name)}")


@pytest.mark.parametrize("name", fastsync.testing.__all__)
def test_names_for_tests(name):
    value = getattr(fastsync.testing, name)
    if inspect.isclass(value):
        section(name)
    else:
        assert documented(value, name), f"docs/api.md lacks {name}{inspect.signature(value)}"


def counters(rank, world):
    model = fastsync.FastDDP(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return list(model.sync_stats())


def test_counters():
    described = [row[0] for row in rows("`sync_stats(one_rank_step)`")]
    assert sorted(described) == sorted(run_ranks(counters, 1)[0])
