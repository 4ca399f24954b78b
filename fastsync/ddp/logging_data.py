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
from fastsync.reducer.engine import Engine
from fastsync.reducer.reports import StepReport

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


def construction_data(
    model: Front, engine: Engine, cap_bytes: int, static_graph: bool
) -> LoggingData:
    """Return the data that is known once the engine of a model has been built."""
    params = [p.tensor for p in engine.params if p.tensor.requires_grad]
    group, data = model.process_group, LoggingData()
    backend, threads = backend_name(group), gloo_threads(group)
    data.strs_map.update(
        module_name=type(model.module).__name__,
        backend_name=backend,
        device_ids=_join(model.device_ids or ()),
        dtypes=", ".join(sorted({_dtype_name(p.dtype) for p in params})),
        bucket_sizes=_join(_bucket_sizes(engine)),
        **ddp_environment(backend),
    )
    data.ints_map.update(
        world_size=group.size(),
        rank=group.rank(),
        iteration=0,
        is_multi_device_module=int(len({p.device for p in params}) > 1),
        num_parameter_tensors=len(params),
        total_parameter_size_bytes=sum(map(_nbytes, params)),
        output_device=-1 if model.output_device is None else model.output_device,
        broadcast_buffers=int(model.broadcast_buffers),
        has_sync_bn=int(any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules())),
        bucket_cap_bytes=cap_bytes,
        find_unused_parameters=int(model.find_unused_parameters),
        gradient_as_bucket_view=int(engine.policy.views),
    )
    if static_graph:
        data.ints_map["static_graph"] = 1
    if threads > 0:
        data.ints_map["gloo_num_threads"] = threads
    return data


class DDPLogger:
    """Replacement for torch's `torch.distributed.Logger`.

    It adds to the data what steps do: the first ten, and one in `rate` from then on.
    """

    def __init__(self, engine: Engine, data: LoggingData, find_unused: bool) -> None:
        self._data, self._engine, self._find_unused = data, engine, find_unused
        trained = [i for i, p in enumerate(engine.params) if p.tensor.requires_grad]
        self._numbers = {index: number for number, index in enumerate(trained)}  # DDP's
        self._samples = 0
        self._iteration = 0  # synchronised forwards so far
        self._last_error = ""
        self.rate = _SAMPLE_RATE

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def set_error_and_log(self, message: str) -> None:
        """Note an error that is raised next."""
        self._data.ints_map["has_error"] = 1
        self._data.ints_map["iteration"] = self._iteration
        self._data.strs_map["error"] = message

    def _get_ddp_logging_data(self) -> LoggingData:
        step = self._engine.core.last_step()
        if step["error"] != self._last_error:
            self._last_error = step["error"]
            self.set_error_and_log(self._last_error)
        if step["used"]:
            self._data.ints_map["can_set_static_graph"] = int(step["same_so_far"])
        return self._data

    def set_runtime_stats_and_log(self) -> None:
        """Log the step that has just ended, if it is one to log, and count the next.

        torch calls it at the start of a forward that will synchronise.
        """
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


def _bucket_sizes(engine: Engine) -> list[int]:
    params = engine.params
    return [sum(_nbytes(params[i].tensor) for i in b.params) for b in engine.plan.buckets]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype_name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _join(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
