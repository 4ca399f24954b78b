"""The modes of `sync=` in plain torch, with blocking collectives."""

import torch
import torch.distributed as dist

from fastsync import ChunkedTopK, Delayed, DiLoCo
from fastsync.reducer import core
from fastsync.wire.formats import Format
from tests.wire.reference_codes import chunked_topk


def everyones(tensor, group=None):
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor, group=group)
    return rows


def mean(tensors, group=None):
    """The averages over the ranks, as one all-reduce of one buffer gives them."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)
    parts = (flat / dist.get_world_size(group)).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def coded(codec, tensors):
    """Code and decode tensors in a format of blocks, each by itself."""
    results = [torch.zeros_like(t) for t in tensors]
    for tensor, result in zip(tensors, results, strict=True):
        numel = -(-max(1, tensor.numel()) // codec.block) * codec.block
        payload = torch.zeros(-(-codec.coded_bytes(numel) // 16) * 16, dtype=torch.uint8)
        core.encode([tensor], [0], payload, (codec.name, numel), 1.0)
        core.decode([result], [0], payload, (codec.name, numel))
    return results


def largest(codec, tensors):
    """Keep the largest elements of tensors that lie side by side; the others become zero."""
    flat = torch.cat([t.flatten() for t in tensors])
    order = flat.abs().argsort(descending=True, stable=True)[: codec.kept(flat.numel())]
    kept = torch.zeros_like(flat).index_copy(0, order, flat[order])
    parts = kept.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def arrived(codec, tensors):
    """Return what tensors are once they have been coded and decoded."""
    if isinstance(codec, ChunkedTopK):
        return [chunked_topk(t, codec.kept) for t in tensors]
    return (coded if isinstance(codec, Format) else largest)(codec, tensors)


def train(mode, params, cuts, local_step, steps, ends=(), group=None):
    """Return the parameters after each step.

    Args:
        cuts: positions of the parameters of each fragment.
        local_step: makes a step of the inner optimizer; given whether gradients are averaged first.
        ends: steps after which all ranks end the round.
        group: the ranks that average; None: all.
    """
    outer = [torch.nn.Parameter(p.detach().clone()) for p in params]
    residual = [torch.zeros_like(p) for p in params]
    settings = {"lr": getattr(mode, "outer_lr", 1), "momentum": getattr(mode, "outer_momentum", 0)}
    optimizer = torch.optim.SGD(outer, nesterov=settings["momentum"] > 0, **settings)
    overlap = getattr(mode, "overlap", mode.every if isinstance(mode, Delayed) else 0)
    waiting, history, origin = {}, [], mode.warmup
    kept = getattr(mode, "kept", 0)

    def send(cut):
        mine = [params[i].clone() for i in cut]
        if not isinstance(mode, DiLoCo):
            return mean(mine, group), mine
        differences = [outer[i] - m for i, m in zip(cut, mine, strict=True)]
        if mode.codec is None:
            return mean(differences, group), mine
        owed = [residual[i] + d for i, d in zip(cut, differences, strict=True)]
        codes = arrived(mode.codec, owed)
        for i, o, c in zip(cut, owed, codes, strict=True):
            residual[i] = o - c
        rows = [everyones(code, group) for code in codes]
        return [sum(its[1:], its[0]) / len(its) for its in rows], mine

    def merge(cut, average, sent, alpha):
        optimizer.zero_grad()
        for i, a in zip(cut, average, strict=True):
            outer[i].grad = a
        if isinstance(mode, DiLoCo):
            optimizer.step()
        for i, a, s in zip(cut, average, sent, strict=True):
            if isinstance(mode, DiLoCo):
                params[i].copy_((alpha * params[i]).add(outer[i], alpha=1 - alpha))
            else:
                params[i].copy_(params[i] - s + a if isinstance(mode, Delayed) else a)

    def settle(numbers, alpha):
        for number in numbers:
            merge(cuts[number], *waiting.pop(number)[1:], alpha)

    for step in range(1, steps + 1):
        local_step(step <= mode.warmup)
        with torch.no_grad():
            if step == mode.warmup:
                for o, p in zip(outer, params, strict=True):
                    o.copy_(p)
            settle([n for n in range(len(cuts)) if n in waiting and waiting[n][0] == step], kept)
            for number, cut in enumerate(cuts):
                place = (number + 1) * mode.every // len(cuts)
                if cut and step > origin and (step - origin - place) % mode.every == 0:
                    waiting[number] = (step + overlap, *send(cut))
                    settle([number] if overlap == 0 else [], kept)
            if step in ends and step > origin:
                settle([n for n in range(len(cuts)) if n in waiting], kept)
                for number, cut in enumerate(cuts):
                    waiting.update({number: (step, *send(cut))} if cut else {})
                settle(sorted(waiting), 0)
                origin = step
        history.append([p.detach().clone() for p in params])
    return history
