"""The data behind `_get_ddp_logging_data()`, with the keys that DistributedDataParallel uses.

Values are what they say, with these differences in meaning:

* indices number the parameters that needed a gradient when the model was wrapped, as in DDP;
* times are the host's, in nanoseconds; DDP reads device events where the model is on a GPU. The
  forward's time ends with the forward, not with the loss;
* `has_rebuilt_buckets` tells of buckets made from the order in which gradients arrived. With
  `find_unused_parameters=True`, where DDP never rebuilds, only buckets that came out different
  count;
* `can_set_static_graph` is there at all times, not only in usage logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fastsync._build.env import ddp_environment
from fastsync._torch import Front, backend_name, gloo_threads
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.reducer.engine import Engine
from fastsync.reducer.reports import StepReport

__all__ = ["LoggingData", "StepLogger", "WrapFacts", "construction_data", "wrap_facts"]

_EAGER_ITERATIONS = 10
_SAMPLE_RATE = 100
_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


@dataclass
class LoggingData:
    """Data with the attributes of torch's class for DDP's logging data."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WrapFacts:
    """Facts that the constructor knows.

    Attributes:
        gloo_threads: threads of a Gloo group, or -1.
    """

    module_name: str
    rank: int
    world_size: int
    backend: str
    gloo_threads: int
    device_ids: Sequence[int]
    output_device: int
    broadcast_buffers: bool
    has_sync_bn: bool
    static_graph: bool
    bucket_cap_bytes: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool


def wrap_facts(
    model: Front, buckets: BucketPolicy, policy: SyncPolicy, static_graph: bool
) -> WrapFacts:
    """Return the facts of a model whose engine has just been built."""
    group = model.process_group
    return WrapFacts(
        module_name=type(model.module).__name__,
        rank=group.rank(),
        world_size=group.size(),
        backend=backend_name(group),
        gloo_threads=gloo_threads(group),
        device_ids=model.device_ids or (),
        output_device=-1 if model.output_device is None else model.output_device,
        broadcast_buffers=model.broadcast_buffers,
        has_sync_bn=any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules()),
        static_graph=static_graph,
        bucket_cap_bytes=buckets.caps[-1],
        find_unused_parameters=model.find_unused_parameters,
        gradient_as_bucket_view=policy.views,
    )


def construction_data(facts: WrapFacts, engine: Engine) -> LoggingData:
    """Return the data that is known once the model is wrapped."""
    params = [p.tensor for p in engine.params if p.tensor.requires_grad]
    data = LoggingData()
    data.strs_map.update(
        module_name=facts.module_name,
        backend_name=facts.backend,
        device_ids=_join(facts.device_ids),
        dtypes=", ".join(sorted({_dtype_name(p.dtype) for p in params})),
        bucket_sizes=_join(_bucket_sizes(engine)),
        **ddp_environment(facts.backend),
    )
    data.ints_map.update(
        world_size=facts.world_size,
        rank=facts.rank,
        iteration=0,
        is_multi_device_module=int(len({p.device for p in params}) > 1),
        num_parameter_tensors=len(params),
        total_parameter_size_bytes=sum(map(_nbytes, params)),
        output_device=facts.output_device,
        broadcast_buffers=int(facts.broadcast_buffers),
        has_sync_bn=int(facts.has_sync_bn),
        bucket_cap_bytes=facts.bucket_cap_bytes,
        find_unused_parameters=int(facts.find_unused_parameters),
        gradient_as_bucket_view=int(facts.gradient_as_bucket_view),
    )
    if facts.static_graph:
        data.ints_map["static_graph"] = 1
    if facts.gloo_threads > 0:
        data.ints_map["gloo_num_threads"] = facts.gloo_threads
    return data


class StepLogger:
    """Adds to the data what steps do: the first ten, and one in `rate` from then on."""

    def __init__(self, data: LoggingData, engine: Engine, find_unused: bool) -> None:
        self._data = data
        self._engine = engine
        self._find_unused = find_unused
        self._numbers = _ddp_numbers(engine)
        self._samples = 0
        self._iteration = 0
        self.rate = _SAMPLE_RATE

    @property
    def iteration(self) -> int:
        """Synchronised forwards so far."""
        return self._iteration

    def before_forward(self) -> None:
        """Log the step that has just ended, if it is one to log, and count the next."""
        iteration = self._iteration
        self._iteration += 1
        if iteration == 0 or (iteration > _EAGER_ITERATIONS and iteration % self.rate):
            return
        step = self._engine.core.last_step()
        self._samples += 1
        self._data.ints_map["iteration"] = iteration
        self._data.ints_map["num_buckets_reduced"] = step["buckets"]
        self._log_unused(step)
        self._log_buckets()
        self._log_times(step)

    def _log_unused(self, step: StepReport) -> None:
        pairs = zip(self._engine.params, step["used"], strict=False)
        unused = [p.tensor for p, used in pairs if p.tensor.requires_grad and not used]
        if unused or self._find_unused:
            self._data.ints_map["unused_parameter_size"] = sum(map(_nbytes, unused))

    def _log_buckets(self) -> None:
        data, engine = self._data, self._engine
        rebuilt = engine.regrouped if self._find_unused else engine.core.stats()["plans"] > 1
        data.ints_map["has_rebuilt_buckets"] = int(rebuilt)
        order = engine.core.ready_order()
        data.strs_map["prev_iteration_grad_ready_order_indices"] = _join(self._numbered(order))
        if not rebuilt:
            return
        data.strs_map["rebuilt_bucket_sizes"] = _join(_bucket_sizes(engine))
        data.strs_map["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, self._numbered(bucket.params))) for bucket in engine.plan.buckets
        )

    def _log_times(self, step: StepReport) -> None:
        ints = self._data.ints_map
        spans = {
            "forward_compute_time": (step["forward_start"], step["forward_end"]),
            "backward_compute_time": (step["backward_start"], step["backward_end"]),
            "backward_comm_time": (step["first_send"], step["received"]),
            "backward_compute_comm_overlap_time": (step["first_send"], step["backward_end"]),
        }
        for key, (start, end) in spans.items():
            ints[key] = max(0, end - start) if start > 0 and end > 0 else 0
            seen = ints.get(f"avg_{key}", 0) * (self._samples - 1)
            ints[f"avg_{key}"] = (seen + ints[key]) // self._samples
        ints["forward_compute_time_start"] = step["forward_start"]
        ints["backward_compute_time_start"] = step["backward_start"]
        ints["backward_compute_time_end"] = step["backward_end"]
        ints["backward_comm_time_start"] = step["first_send"]
        ints["backward_comm_time_end"] = step["received"] if step["first_send"] else 0

    def _numbered(self, indices: Sequence[int]) -> list[int]:
        return [self._numbers[i] for i in indices if i in self._numbers]


def _ddp_numbers(engine: Engine) -> dict[int, int]:
    trained = [i for i, p in enumerate(engine.params) if p.tensor.requires_grad]
    return {index: number for number, index in enumerate(trained)}


def _bucket_sizes(engine: Engine) -> list[int]:
    params = engine.params
    return [sum(_nbytes(params[i].tensor) for i in b.params) for b in engine.plan.buckets]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype_name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _join(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
