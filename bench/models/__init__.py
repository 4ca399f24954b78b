"""The models that benchmarks train.

Weights are the same on every rank (`build` seeds them); data differ from rank to rank. `scale`
multiplies the number of parameters, and 1 is a model's true size; the default suits two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.models.classic import conv, ops400, small, transformer, wide
from bench.models.dlrm import dlrm, dlrm_sparse
from bench.models.images import resnet50, vit
from bench.models.language import gpt2, llama_layer, lstm
from bench.models.waiting import paced, waiting
from bench.models.workload import WEIGHT_SEED, Workload, data_generator

__all__ = ["WAITING", "WEIGHT_SEED", "WORKLOADS", "Workload", "data_generator"]

# Each takes `scale` and has a default for it.
WORKLOADS: dict[str, Callable[..., Workload]] = {
    "small": small,
    "transformer": transformer,
    "wide": wide,
    "conv": conv,
    "resnet50": resnet50,
    "gpt2": gpt2,
    "llama_layer": llama_layer,
    "vit": vit,
    "lstm": lstm,
    "dlrm": dlrm,
    "dlrm_sparse": dlrm_sparse,
    "ops400": ops400,
    "waiting": waiting,
    "paced": paced,
}

WAITING = ("paced", "waiting")  # those whose backward takes as many `seconds` as one likes
