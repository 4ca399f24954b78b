"""Gradients of DTensors: of each rank's local tensors, which travel as those of any parameter.

The reducer averages the gradients of plain tensors, in their memory. So it gets the local tensors,
and their gradients are those of the DTensors, local too: a hook sees to that whenever autograd has
accumulated one. No rank has to know how the others of a mesh have cut a tensor: the ranks that
average hold the same part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fastsync._torch import local_gradient, local_of, make_dtensor, spec_of, taking_hooks


class LocalGradients:
    """Local tensors of parameters, with the gradients of these.

    Args:
        params: parameters, DTensors or not.

    Attributes:
        tensors: the tensor of each that the reducer averages the gradient of.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._pairs: list[tuple[DTensor, torch.Tensor]] = []
        for param in params:
            if not isinstance(param, DTensor):
                self.tensors.append(param)
                continue
            local = local_of(param).detach()  # wrappers of one model have their own
            self.tensors.append(local)
            self._pairs.append((param, local))
            if param.is_floating_point() or param.is_complex():
                weakref.finalize(self, _hook(param, local).remove).atexit = False

    def move(self) -> None:
        """Let the parameters lie where their local tensors have been moved to."""
        for param, local in self._pairs:
            local_of(param).data = local.data

    def begin(self) -> None:
        """Take the gradients that the parameters have as a backward, or a step, begins: scripts may
        have changed them since the forward.
        """
        for param, local in self._pairs:
            _take(param, local)

    def finish(self) -> None:
        """Give averages that came into other memory to their parameters, and keep none alive."""
        for param, local in self._pairs:
            grad, local.grad = local.grad, None
            if grad is not None and (param.grad is None or local_of(param.grad) is not grad):
                param.grad = make_dtensor(grad, spec_of(param))


def _hook(param: DTensor, local: torch.Tensor) -> RemovableHandle:
    with taking_hooks(param):
        hook: RemovableHandle = param.register_post_accumulate_grad_hook(
            lambda accumulated: _take(accumulated, local)
        )
    return hook


def _take(param: torch.Tensor, local: torch.Tensor) -> None:
    """Let the local tensor have the local gradient, placed as the parameter. Maybe a sum over the
    mesh.
    """
    if param.grad is None:
        local.grad = None
        return
    spec, grad = spec_of(param), param.grad
    own = local_gradient(grad, spec)
    if own is not local_of(grad):
        param.grad = make_dtensor(own, spec)
    local.grad = own
