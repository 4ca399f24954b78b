"""What ranks have after each step of a mode, in plain torch and blocking collectives."""

import torch
import torch.distributed as dist

from fastsync import Delayed, DiLoCo, LocalSGD
from fastsync.reducer import core
from fastsync.wire.formats import Format


def everyones(tensor):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return rows


def mean(tensors):
    """The averages over the ranks, as one all-reduce of one buffer gives them."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def coded(codec, tensors):
    """What tensors become in a format of blocks, each by itself."""
    results = [torch.zeros_like(t) for t in tensors]
    for tensor, result in zip(tensors, results, strict=True):
        numel = -(-tensor.numel() // codec.block) * codec.block
        payload = torch.zeros(-(-codec.coded_bytes(numel) // 16) * 16, dtype=torch.uint8)
        core.encode([tensor], [0], payload, (codec.name, numel))
        core.decode([result], [0], payload, (codec.name, numel))
    return results


def largest(codec, tensors):
    """What top-k keeps of tensors that it sees side by side."""
    flat = torch.cat([t.flatten() for t in tensors])
    order = flat.abs().argsort(descending=True, stable=True)[: codec.kept(flat.numel())]
    kept = torch.zeros_like(flat).index_copy(0, order, flat[order])
    parts = kept.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def train(mode, params, cuts, local_step, steps):
    """Return the parameters after each step.

    Args:
        cuts: positions of the parameters of each fragment.
        local_step: makes a step of the inner optimizer; given whether gradients are averaged first.
    """
    lossy = isinstance(mode, DiLoCo) and mode.codec is not None
    outer = [torch.nn.Parameter(p.detach().clone()) for p in params]
    residual = [torch.zeros_like(p) for p in params]
    outer_optimizer = None
    if isinstance(mode, DiLoCo):
        settings = {"lr": mode.outer_lr, "momentum": mode.outer_momentum}
        outer_optimizer = torch.optim.SGD(outer, nesterov=mode.outer_momentum > 0, **settings)
    waiting, history = {}, []  # fragment -> (step of its merge, average, what was sent)
    overlap = getattr(mode, "overlap", mode.every if isinstance(mode, Delayed) else 0)
    for step in range(1, steps + 1):
        local_step(step <= mode.warmup)
        with torch.no_grad():
            for number, cut in enumerate(cuts):
                place = (number + 1) * mode.every // len(cuts)
                due = number in waiting and waiting[number][0] == step
                if due:
                    merge(mode, params, cut, waiting.pop(number), outer, outer_optimizer)
                if step > mode.warmup and (step - mode.warmup - place) % mode.every == 0:
                    mine = [params[i].clone() for i in cut]
                    sent = mine
                    if isinstance(mode, DiLoCo):
                        sent = [outer[i] - m for i, m in zip(cut, mine, strict=True)]
                    if lossy:
                        owed = [residual[i] + s for i, s in zip(cut, sent, strict=True)]
                        code = coded if isinstance(mode.codec, Format) else largest
                        kept = code(mode.codec, owed)
                        for i, o, k in zip(cut, owed, kept, strict=True):
                            residual[i] = o - k
                        rows = [everyones(k) for k in kept]
                        average = [sum(r[1:], r[0]) / len(r) for r in rows]
                    else:
                        average = mean(sent)
                    waiting[number] = (step + overlap, average, mine)
                    if overlap == 0:
                        merge(mode, params, cut, waiting.pop(number), outer, outer_optimizer)
        history.append([p.detach().clone() for p in params])
    return history


def merge(mode, params, cut, arrived, outer, outer_optimizer):
    _, average, sent = arrived
    if isinstance(mode, DiLoCo):
        outer_optimizer.zero_grad()
        for i, a in zip(cut, average, strict=True):
            outer[i].grad = a
        outer_optimizer.step()
    for i, a, s in zip(cut, average, sent, strict=True):
        if isinstance(mode, LocalSGD):
            params[i].copy_(a)
        elif isinstance(mode, Delayed):
            params[i].copy_((params[i] - s) + a)
        else:
            params[i].copy_((mode.kept * params[i]).add(outer[i], alpha=1 - mode.kept))
