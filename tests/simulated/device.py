"""Loads the simulated device as `torch.sim`, and the extension that was built for it.

Import this module before fastsync: a process has one extension.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import types

import torch
import torch.distributed as dist

from fastsync._build import extension
from tests.simulated import build

NAME, BACKEND = "sim", "simccl"
GROUP = f"cpu:gloo,{NAME}:{BACKEND}"
TIMEOUT = "SIMCCL_TIMEOUT"  # seconds until the watchdog ends the process
LETS_LIVE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # 0: the watchdog ends nothing


def _load(name):
    path = build.library(name)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _use_built_engine():
    if "fastsync._C" in sys.modules:
        raise RuntimeError("fastsync was loaded before the simulated device")
    path = build.library(build.ENGINE)
    extension._prebuilt = lambda: path


def _stream(device=None, priority=0):
    return torch.Stream(device=_device_of(device), priority=priority)


def _event(enable_timing=False, **_):
    return torch.Event(NAME, enable_timing=enable_timing)


def _device_of(index):
    found = torch.device(NAME) if index is None else torch.device(index)
    if found.index is not None:
        return found
    return torch.device(NAME, torch.accelerator.current_device_index())


@contextlib.contextmanager
def _on_stream(stream):
    former = torch.accelerator.current_stream()
    if stream is not None:
        torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(former)


@contextlib.contextmanager
def _on_device(index):
    former = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index if isinstance(index, int) else _device_of(index).index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(former)


def _module():
    """Return what `torch.cuda` is to CUDA, as far as torch and the tests ask."""
    module = types.ModuleType(f"torch.{NAME}")

    def seed_all(seed):
        low.seed_operators(seed & 0xFFFF)

    functions = {
        "Stream": _stream,
        "Event": _event,
        "stream": _on_stream,
        "device": _on_device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_device_of(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: low.synchronize(),
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: torch.zeros(8, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "memory_allocated": lambda device=None: low.report().allocated,
        "max_memory_allocated": lambda device=None: low.report().peak,
        "empty_cache": lambda: None,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


def _make_backend(options, _):
    from datetime import timedelta

    limit = float(os.environ.get(TIMEOUT) or options.timeout.total_seconds())
    # A process cannot end before its Gloo has given up what an abort has left behind.
    longest = timedelta(seconds=limit + 2)
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, longest)
    return low.make_backend(gloo, limit, os.environ.get(LETS_LIVE) != "0")


_OTHERS = (os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(contextlib.__file__))


def _lines(frame, count=2):
    """Return where a frame is, outside torch and Python's library: innermost first."""
    found = []
    while frame is not None and len(found) < count:
        file = frame.f_code.co_filename
        if not file.startswith(_OTHERS) and not file.startswith("<") and file != __file__:
            found.append(f"{'/'.join(file.split(os.sep)[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _where(node):
    """Return the lines that enqueue now; a thread of autograd names its node and the main line."""
    found = _lines(sys._getframe().f_back)
    if not found:
        import threading

        found = _lines(sys._current_frames().get(threading.main_thread().ident))
    of_node = f" ({node})" if node else ""
    return f" at {' < '.join(found)}{of_node}" if found else of_node


def _name_parameters(model):
    """Give parameters, gradients and the buckets that gradients lie in their names in reports."""
    for name, param in model.named_parameters():
        local = getattr(param, "_local_tensor", param)
        low.name_memory(local.data_ptr(), local.nbytes, name)
        if param.grad is not None:
            grad = getattr(param.grad, "_local_tensor", param.grad)
            low.name_memory(grad.data_ptr(), grad.nbytes, f"gradient of {name}")


def placed(model, device=NAME):
    """Move a model as `model.to()` does on CUDA, where parameters that are tied stay tied."""
    moved = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in moved:
                moved[param] = torch.nn.Parameter(param.detach().to(device), param.requires_grad)
            module._parameters[name] = moved.get(param)
    return model.to(device)


@contextlib.contextmanager
def detecting(found, model=None):
    """Look for races; they are appended to `found`. Names those of `model`, if it is given."""
    low.report(reset=True)
    low.ask_where(_where)
    low.start_detecting()
    if model is not None:
        _name_parameters(model)
    try:
        yield
    finally:
        low.stop_detecting()
        low.ask_where(None)
        found += low.report(reset=True).races


@functools.cache
def _register():
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(BACKEND, _make_backend, extended_api=True, devices=[NAME])
    return True


low = _load(build.DEVICE)
_use_built_engine()
_register()
