"""Slow models of what the engine does, in plain torch: a line there is many in the engine."""

import torch


def slot_of(like, dtype=None):
    """An uninitialised run of memory, and a tensor of `like`'s sizes laid over it as a slot is.

    A slot follows the parameter's own memory order where that has no gaps, else row-major order.
    """
    memory = torch.empty(like.numel(), dtype=dtype or like.dtype)
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return memory, memory.as_strided(like.shape, like.stride())
    return memory, memory.view(like.shape)


def as_real(memory):
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory


def product(values, scale, other):
    """values * scale in the arithmetic of the kernels: fp32, or fp64 where either side is that."""
    wide = torch.float64 if torch.float64 in (values.dtype, other.dtype) else torch.float32
    return values.to(wide) * torch.tensor(scale, dtype=wide)


def pack(tensors, like, offsets, flat, scale):
    """Return what the flat buffer holds after packing. Undefined tensors leave zeros."""
    result = flat.clone()
    for tensor, shape, offset in zip(tensors, like, offsets, strict=True):
        memory, slot = slot_of(shape, None if tensor is None else tensor.dtype)
        slot.copy_(torch.zeros(()) if tensor is None else tensor)
        run = as_real(memory)
        result[offset : offset + run.numel()] = product(run, scale, flat).to(flat.dtype)
    return result


def unpack(tensors, offsets, flat, scale, accumulate):
    """Return what each tensor holds after unpacking, as new tensors."""
    results = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        memory, slot = slot_of(tensor)
        slot.copy_(tensor)
        run = as_real(memory)
        update = product(flat[offset : offset + run.numel()], scale, run)
        run.copy_((run.to(update.dtype) + update) if accumulate else update)
        results.append(slot)
    return results


def same(one, other):
    """Bit for bit equal, but any NaN equals any NaN."""
    plain = (t.detach().resolve_conj().resolve_neg() for t in (one, other))
    one, other = (as_real(t.contiguous().view(-1)) for t in plain)
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0.5, 1e30, -1e30), other.nan_to_num(0.5, 1e30, -1e30)
    )
