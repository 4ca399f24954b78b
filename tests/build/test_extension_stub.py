"""The typed boundary: what `_C.pyi` promises is what the compiled extension holds."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastsync
from fastsync._build import extension
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.reducer import core, reports
from fastsync.reducer.engine import Engine, NamedParam
from fastsync.testing import run_ranks

STUB = Path(fastsync.__file__).parent / "_C.pyi"


def stub_arguments(function):
    """(name, has a default) of each argument but self."""
    args = function.args
    first_default = len(args.args) - len(args.defaults)
    named = [(arg.arg, place >= first_default) for place, arg in enumerate(args.args)]
    return [pair for pair in named if pair[0] != "self"]


def promised():
    """From names, dotted inside classes, to arguments; None: not called."""
    found = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = stub_arguments(node)
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = None
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
            found |= {f"{node.name}.{name}": args for name, args in members(node)}
    return found


def members(node):
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            yield member.target.id, None
        elif isinstance(member, ast.FunctionDef):
            yield member.name, None if member.decorator_list else stub_arguments(member)


def split_arguments(text):
    """Cut at the commas outside all brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def real_arguments(function):
    """Return the arguments that pybind11 writes into the first line of a docstring."""
    signature = function.__doc__.splitlines()[0]
    inside = re.fullmatch(r"\w+\((.*)\) -> .*", signature)[1]
    named = [(part.split(":")[0], "=" in part) for part in split_arguments(inside)]
    return [pair for pair in named if pair[0] != "self"]


def compiled():
    """Return what the extension holds, in the form of `promised`."""
    found = {}
    module = extension.load()
    for name, thing in vars(module).items():
        if name.startswith("_"):
            continue
        is_class = inspect.isclass(thing)
        found[name] = real_arguments(thing) if callable(thing) and not is_class else None
        for member, inner in vars(thing).items() if is_class else ():
            can_be_made = member == "__init__" and "-> None" in inner.__doc__
            if can_be_made or not member.startswith("_"):
                is_property = isinstance(inner, property)
                found[f"{name}.{member}"] = None if is_property else real_arguments(inner)
    return found


def test_the_stub_and_the_extension_agree():
    stub, real = promised(), compiled()
    assert len(real) > 80
    assert sorted(stub) == sorted(real)
    assert {name: args for name, args in stub.items() if args != real[name]} == {}


def test_the_comparison_sees_arguments():
    real = compiled()
    assert real["unpack"][0] == ("tensors", False) and real["unpack"][-1] == ("accumulate", False)
    assert real["Reducer.set_plan"] == [("specs", False), ("until", True), ("keep", True)]
    assert real["CodedSpec.seed"] is None


def a_reducer(rank, world):
    param = NamedParam("p", torch.zeros(4, requires_grad=True))
    reducer = Engine([param], dist.group.WORLD, BucketPolicy((1,)), SyncPolicy()).core
    return reducer.stats(), reducer.last_step()


def test_dictionaries_have_the_keys_that_are_promised():
    kinds = (reports.Counters, reports.StepReport)
    for found, kind in zip(run_ranks(a_reducer, 1)[0], kinds, strict=True):
        assert set(found) == set(kind.__annotations__), kind.__name__


def refuse_plans(rank, world):
    params = [NamedParam(name, torch.zeros(4, requires_grad=True)) for name in "opq"]
    first, last = params[0].tensor, params[2].tensor
    engine = Engine(params, dist.group.WORLD, BucketPolicy((1,)), SyncPolicy())
    reducer, sender = engine.core, core.Sender(engine.wire, rank)

    def specs(*orders):
        buckets = [bucket for order in orders for bucket in engine._plan(order).buckets]
        return [core.bucket_spec(i, bucket, sender) for i, bucket in enumerate(buckets)]

    def facts():
        first.requires_grad_(True)
        thawed_is_planned = not reducer.prepare_forward().regrouped
        first.requires_grad_(False)
        kept = [reducer.keeps_plan(number) for number in range(5)]
        return kept, thawed_is_planned, reducer.stats(), reducer.last_step()

    last.requires_grad_(False)
    reducer.set_plan(specs([0, 1]), keep=True)
    last.requires_grad_(True)
    reducer.set_plan(specs([0, 1, 2]), keep=True)
    before = facts()
    refused = {
        "lacks parameter 'q'": lambda: reducer.set_plan(specs([1]), keep=True),
        "holds a parameter twice": lambda: reducer.set_plan(specs([0, 1], [1, 2])),
        "plan lacks parameter 'q'": lambda: reducer.restore_plan(2),
    }
    for words, change in refused.items():
        with pytest.raises(ValueError, match=words):
            change()
        assert facts() == before, words
    return before


def test_a_refused_plan_changes_nothing():
    for kept, thawed_is_planned, *_ in run_ranks(refuse_plans, 2):
        assert kept == [False, True, True, False, False]
        assert thawed_is_planned
