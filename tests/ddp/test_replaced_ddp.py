"""FastDDP put in DDP's place: copies and pickles; and whom errors and warnings speak to."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import FastDDP, integrations
from fastsync.testing import run_ranks
from tests.helpers.scripts import ROOT, environment


def trained(model, rank):
    model.zero_grad()
    model(torch.full((1, 2), float(rank))).sum().backward()
    return model.module.weight.grad.tolist()


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies(rank, world):
    with integrations.in_place_of_ddp(wire="bf16"):
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    ways = (copy.deepcopy, saved_whole, lambda m: pickle.loads(pickle.dumps(m)))
    made = [way(model) for way in ways]
    kinds = {type(m) for m in made}
    return kinds == {FastDDP}, [(m._policy.wire.format, trained(m, rank)) for m in made]


def test_models_in_place_of_ddp_are_copied_and_pickled():
    assert run_ranks(copies, 2) == [(True, [("bf16", [[0.5, 0.5]])] * 3)] * 2


@pytest.mark.slow
def test_integrations_need_no_import_of_their_own():
    program = (
        "import sys, fastsync; assert 'fastsync.integrations' not in sys.modules; "
        "fastsync.integrations.in_place_of_ddp; assert 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fastsync.nothing


def message(kind, make):
    try:
        make(kind)
    except Exception as error:
        return type(error), str(error)
    return None, "no error"


def frozen():
    return nn.Linear(2, 1).requires_grad_(False)


# What DDP says, in part; ours says it too, in an error of the same type.
WORDS = {
    "Default process group has not been initialized": None,
    "Modules with uninitialized parameters": lambda k: k(nn.LazyLinear(2)),
    "is not needed when a module doesn't have any parameter": lambda k: k(frozen()),
    "device_ids can only be None or contain a single element": lambda k: k(
        nn.Linear(2, 1), device_ids=[0, 1]
    ),
    "device_ids and output_device arguments only work with single-device/multiple-device GPU": (
        lambda k: k(nn.Linear(2, 1), device_ids=[0])
    ),
    "input module must be on the same type of devices": lambda k: k(
        nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1, device="meta")])
    ),
    "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set": lambda k: k(
        nn.Linear(2, 1), param_to_hook_all_reduce=nn.Parameter(torch.ones(1))
    ),
    "Cannot specify both process_group and device_mesh": lambda k: k(
        nn.Linear(2, 1), process_group=torch.distributed.group.WORLD, device_mesh=object()
    ),
    "Communication hook must be callable": lambda k: k(nn.Linear(2, 1)).register_comm_hook(None, 1),
    "bucket annotation should be dist.GradBucket": lambda k: k(nn.Linear(2, 1)).register_comm_hook(
        None, annotated
    ),
    "Expected to have finished reduction in the prior iteration": lambda k: half_used(k),
    "should be called before training loop starts and after": lambda k: late_static(k),
    "sample rate should be equal or greater than 1": lambda k: k(
        nn.Linear(2, 1)
    )._set_ddp_runtime_logging_sample_rate(0),
}


def annotated(state: object, bucket: int) -> None:
    """Not a hook."""


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


def half_used(kind):
    model = kind(Half(), find_unused_parameters=False)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def late_static(kind):
    model = kind(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    model._set_static_graph()


def speak(rank, world):
    warnings.simplefilter("ignore")
    found = {}
    for words, make in WORDS.items():
        if make is not None:
            found[words] = [message(kind, make) for kind in (DistributedDataParallel, FastDDP)]
    return found


def agree(words, theirs, ours):
    return words in theirs[1] and words in ours[1] and theirs[0] is ours[0]


def test_errors_have_ddps_words_and_types():
    (found,) = run_ranks(speak, 1)
    assert len(found) > 10
    found["Default process group has not been initialized"] = [
        message(kind, lambda k: k(nn.Linear(2, 1))) for kind in (DistributedDataParallel, FastDDP)
    ]
    told = {words: pair for words, pair in found.items() if not agree(words, *pair)}
    assert not told


def warned(rank, world):
    model = FastDDP(Half())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
    return [w.filename for w in caught if "got no gradient" in str(w.message)]


def test_warnings_name_the_callers_line():
    assert run_ranks(warned, 2) == [[__file__]] * 2
