"""Changes that mixed precision makes to a module itself; the engine exchanges the parameters.

As in DistributedDataParallel, buffers are cast for good, and parameters carry two attributes that
tell of their precisions.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

__all__ = ["announce_mixed_precision", "cast_buffers"]


def cast_buffers(module: nn.Module, ignored: Collection[str], dtype: torch.dtype | None) -> None:
    """Cast floating-point buffers of `module` to `dtype`, but for those named in `ignored`.

    Counters, such as those of batch normalisation, stay integers. DistributedDataParallel casts
    them too, against its documentation.
    """
    if dtype is None:
        return
    for name, buffer in module.named_buffers():
        if name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


def announce_mixed_precision(
    module: nn.Module, ignored: Collection[str], dtype: torch.dtype | None
) -> None:
    """Give parameters DistributedDataParallel's attributes `_mp_param` and `_fp_param`.

    The first has the dtype and shape in which a parameter takes part in forward and backward, and
    no memory of its own: the engine keeps the values. The second is the parameter as it is stored.
    """
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        low = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        one = torch.zeros((), dtype=low, device=parameter.device)
        extras = {"_mp_param": one.expand(parameter.shape), "_fp_param": parameter.data}
        for attribute, tensor in extras.items():
            setattr(parameter, attribute, tensor)
