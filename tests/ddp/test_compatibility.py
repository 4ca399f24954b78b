"""The table of what does not combine: every row is refused, by every rank, with its reason."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_module
from torch.nn.parallel.distributed import _MixedPrecision

from fastsync import ElasticPolicy, FastDDP, Group, LocalSGD, Wire
from fastsync.config.arguments import grouped
from fastsync.config.compatibility import FEATURES, ROWS, Row
from fastsync.testing import run_ranks
from tests.helpers.scripts import ROOT

BF16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
# What a script passes to have a feature. Hooks, joins and weights come after the model is built.
ASKED = {
    "communication hook": {},
    "device_mesh": {},
    "DTensors": {},
    "elastic": {"elastic": True},
    "elastic on GPUs": {"elastic": True},
    "elastic with rescale": {"elastic": ElasticPolicy(rescale="sum_of_start")},
    "find_unused_parameters=False": {"find_unused_parameters": False},
    "groups": {},
    "groups of other divisors": {},
    "hierarchical wire": {"wire": Wire("int8", "hierarchical")},
    "join": {},
    "mixed_precision": {"mixed_precision": BF16},
    "nonfinite": {"nonfinite": "skip"},
    "on_preemption": {"on_preemption": lambda: None},
    "on_skip": {"on_skip": "average_others"},
    "reduce_dtype": {"mixed_precision": BF16},
    "replicas": {"replicas": True},
    "shard_by": {"zero": 1, "shard_by": "element"},
    "skip_all_reduce_unused_params": {"skip_all_reduce_unused_params": True},
    "static_graph": {"static_graph": True},
    "sync": {"sync": "local:4"},
    "sync between groups": {"sync": LocalSGD(4, within=2)},
    "sync of local gradients": {"sync": "diloco:4"},
    "sync with something on its way": {"sync": "delayed:1"},
    "sync without within": {"sync": "local:4"},
    "timeline": {"timeline": True},
    "weights": {},
    "wire": {"wire": "int8"},
    "wire with a memory": {"wire": Wire("int8", "hierarchical")},
    "coded wire": {"wire": "int8"},
    "coded wire with zero": {"wire": "int8", "zero": 1},
    "zero=1 or 2": {"zero": 1},
    "zero=1 to 3": {"zero": 1},
    "zero=2 or 3": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero with masters": {"zero": 1, "parameter_wire": "bf16"},
}


def built(features):
    """Build a model with these features, as a script would."""
    options = {}
    for feature in features:
        options |= ASKED[feature]
    if "device_mesh" in features:
        options["device_mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    if "groups" in features:
        options["groups"] = {"weight": torch.distributed.group.WORLD}
    if "groups of other divisors" in features:
        options["groups"] = {"weight": Group(torch.distributed.group.WORLD, 3)}
    device = "meta" if "elastic on GPUs" in features else "cpu"
    module = nn.Linear(2, 2, device=device)
    if "DTensors" in features:
        distribute_module(module, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    model = FastDDP(module, **grouped(options))
    if "communication hook" in features:
        model.register_comm_hook(None, lambda state, bucket: None)
    if "join" in features:
        model.join()
    if "weights" in features:
        model.add_weight(1)
    return model


def refusals(rank, world, rows):
    found = []
    for row in rows:
        try:
            built((row.first, row.second))
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_every_row_is_refused_with_its_reason():
    every = run_ranks(refusals, 2, ROWS)
    assert every[0] == every[1]
    for row, text in zip(ROWS, every[0], strict=True):
        assert f"{row.reason}; {row.remedy}" in text, f"{row.first}, {row.second}: {text!r}"


def test_features_alone_are_accepted():
    alone = [name for name in FEATURES if name not in ("elastic on GPUs",)]
    run_ranks(alone_on_ranks, 2, alone)


def alone_on_ranks(rank, world, names):
    for name in names:
        if name not in ("wire with a memory", "hierarchical wire"):  # two ranks have no nodes
            model = built((name,))
            torch.distributed.barrier()  # no group ends while another rank connects to it
            del model


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.first}, {row.second}")
def test_reasons_read_as_sentences(row):
    assert row.first in FEATURES and row.second in FEATURES
    assert not re.search(r"\.$|^[A-Z]", row.reason)


def test_the_documents_have_every_row():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    table = page.partition("## What does not combine\n")[2].partition("\n## ")[0]
    shown = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    seconds = {}
    for row in ROWS:
        alone = row.remedy == Row._field_defaults["remedy"]
        text = row.reason if alone else f"{row.reason}; {row.remedy}"
        seconds.setdefault((row.first, text), []).append(row.second)
    assert shown[1:] == [
        f"| {first} | {', '.join(others)} | {text} |" for (first, text), others in seconds.items()
    ]
