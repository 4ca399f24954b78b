"""Errors of `FastDDP(zero=3)` name what the script has called, and no other class."""

import copy
import re

import pytest
import torch
from torch import nn

import fastsync
from tests.conformance.stages import net
from tests.helpers.teams import run_ranks


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def copies_the_model():
    copy.deepcopy(fastsync.FastDDP(net(), zero=3))


def copies_the_module():
    copy.deepcopy(fastsync.FastDDP(net(), zero=3).module)


def has_a_scalar():
    fastsync.FastDDP(Scalar(), zero=3)


def trains_complex_numbers():
    fastsync.FastDDP(nn.Linear(2, 2, dtype=torch.complex64), zero=3)


def loads_other_sizes():
    model = fastsync.FastDDP(nn.Linear(2, 2), zero=3)
    model.module.load_state_dict(nn.Linear(2, 3).state_dict(), assign=True)


MISTAKES = [
    copies_the_model,
    copies_the_module,
    has_a_scalar,
    trains_complex_numbers,
    loads_other_sizes,
]


def text_of(rank, world, mistake):
    try:
        mistake()
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_do_not_name_fsdp(mistake):
    for text in run_ranks(text_of, 2, mistake):
        assert text
        assert not re.search("fully_shard|FSDP(?!Linear)", text), text
