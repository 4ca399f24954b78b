"""Trains until the last rank loses its link, or stops. Each rank catches its error, prints what it
has seen as JSON, and exits. See cut_link.py.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.config.arguments import grouped
from fastsync.reducer import engine
from fastsync.zero.delivery import Delivery

LAYERS = 4
FAILS_AT = 3  # steps after which
LATE = 1.0  # seconds by which rank 1 waits later than rank 0 for one that stops


def fail(rank, world, how, seen):
    if rank == 1 and how == "stop":
        time.sleep(LATE)
    if rank == world - 1 and how == "cut":
        seen["struck"] = time.time()
        subprocess.run(["ip", "link", "set", "fslink", "down"], check=True)
    if rank == world - 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def digest(net):
    state = hashlib.blake2b(digest_size=8)
    for param in net.parameters():
        state.update(param.detach().numpy().tobytes())
    return state.hexdigest()


def before(call, strike):
    """Wrap `call` so that `strike` happens before it."""

    def struck(*args, **kwargs):
        strike()
        return call(*args, **kwargs)

    return struck


def after_all(net, strike):
    """Call `strike` once all gradients of the next backward are there."""
    arrived = []

    def count(*_):
        arrived.append(None)
        if len(arrived) == 2 * LAYERS:
            strike()

    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]
    for node in nodes:
        node.register_hook(count)
    return nodes  # hooks last as long as these


def train(rank, world, job, seen):
    how, options, place = job
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    last, held = rank == world - 1, []

    def strike(*_):
        fail(rank, world, how, seen)

    if place == "wrap" and last:
        net.named_buffers = before(net.named_buffers, strike)
    if place == "vote" and last:
        engine.agree_on_plan = before(engine.agree_on_plan, strike)
    model = fastsync.FastDDP(net, bucket_cap_mb=0.01, **grouped(options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(100):
        x = torch.randn(4, 64)
        due = step == FAILS_AT
        if due:
            dist.barrier()
        if due and place == "forward":
            strike()
        if due and place == "pieces":
            held = between(net, rank, last, options, strike)
        optimizer.zero_grad()
        if due and place == "backward":  # when the gradients of two layers are there
            net[LAYERS - 3].register_forward_hook(
                lambda module, args, output: output.register_hook(strike) and None
            )
        model(x).square().mean().backward()
        optimizer.step()
        seen["weights"].append(digest(net))
        if due and place == "checkpoint":
            strike()
        optimizer.state_dict()  # which all ranks collect, where they share it
        del held[:]


def between(net, rank, last, options, strike):
    """Let `strike` happen on the last rank between the two collectives of a bucket.

    With `zero` that is before the parameters of the first bucket are sent. In a wire format rank 0
    holds up its last bucket until that rank has sent all of its own.
    """
    if last and "zero" in options:
        Delivery.start = before(Delivery.start, strike)
    if "zero" in options:
        return []
    if rank == 0:
        net[0].weight.register_hook(lambda grad: time.sleep(1))
    return after_all(net, strike) if last else []


def main():
    job = json.loads(sys.argv[1])
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    patience = timedelta(seconds=float(os.environ.get("TIMEOUT", "6")))
    dist.init_process_group("gloo", "env://", patience, world_size=world, rank=rank)
    began = time.monotonic()
    seen = {"rank": rank, "error": None, "struck": None, "weights": []}
    try:
        train(rank, world, job, seen)
    except Exception as error:
        seen |= {name: getattr(error, name, None) for name in ("ranks", "bucket")}
        seen |= {"error": type(error).__name__, "text": str(error), "at": time.time()}
        seen["waited"] = getattr(error, "seconds", None)
    seen["seconds"] = time.monotonic() - began
    print(json.dumps(seen), flush=True)
    os._exit(0)  # without a wait for the others


if __name__ == "__main__":
    main()
