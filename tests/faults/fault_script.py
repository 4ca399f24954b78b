"""Trains on forked ranks of which one has a fault, and prints how each ended. See test_faults.py.

A job is (fault, place, wrapper, world). Rank 1 has the fault in its third step, or where the place
is earlier. A rank writes what it has seen to `<folder>/<job>-<rank>.json`, and as it goes, to
`.notes`, a digest of the weights after each step, and when its fault begins. The script prints, as
JSON, which processes had to be ended.
"""

import contextlib
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # wrapping a module would import it
import torch.distributed as dist
from torch import nn

import fastsync
import fastsync.reducer.core as core
import fastsync.reducer.engine as engine
import fastsync.reducer.monitor as watch
import fastsync.reducer.process_groups as groups
from fastsync._build import extension
from fastsync._torch import TCPStore
from fastsync.config.arguments import grouped
from fastsync.zero.delivery import Delivery
from fastsync.zero.state_fetch import StateShards
from tests.helpers.forked_ranks import end_of, fork_ranks
from tests.helpers.served_store import end_store, serve_store

LIMIT = 60.0  # seconds for a job
STALLED = 5.0  # seconds: the group's timeout where a rank stops or sleeps
FAULTY = 1
STEPS = 5
AT = 2  # the third step
WIDTH = 64
LAYERS = 6
UNITS = {"zero": 3, "units": [nn.Linear]}
WRAPPERS = {
    "fp32": {},
    "int8": {"wire": "int8"},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": UNITS,
    "blind3": UNITS,  # without a watch for faults
    "fsdp": None,
    "codec": {},  # a user's, which runs between the two collectives of a bucket
    "skips": {"on_skip": "average_others"},
    "finite": {"nonfinite": "raise"},
}


class BadBatch(ValueError):
    pass


class Halves(fastsync.Codec):
    """float16, by torch; each rank decodes its part of the others' before it codes the sum."""

    name = "halves"

    def __init__(self, net):
        self.net = net

    def coded_bytes(self, numel):
        return 2 * numel

    def encode(self, values, wire):
        wire.view(torch.float16).copy_(values)

    def decode(self, wire, values):
        if self.net.due("pieces"):
            fail(self.net.fault)
        values.copy_(wire.view(torch.float16))


def note(**what):
    """Keep a line, which no end of this process loses."""
    file = os.open(os.environ["FAULT_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)


def note_fault():
    note(struck=time.time())


def note_step(model, wrapper):
    """Note that a step is over, with a digest of this rank's weights, unless it has only a part."""
    if wrapper not in ("zero3", "blind3", "fsdp"):
        digest = hashlib.blake2b(digest_size=8)
        for param in model.parameters():
            digest.update(param.detach().numpy().tobytes())
        note(weights=digest.hexdigest())


def end_connections():
    """End connections as the system does where a process ends, but this process goes on."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.getpeername()  # one that listens has none
            connection.shutdown(socket.SHUT_RDWR)


def fail(fault):
    """Make the faulty rank fail, some heartbeats after the others have heard where it is."""
    time.sleep(0.3)
    note_fault()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "store":
        os.kill(int(os.environ["STORE_PROCESS"]), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)  # another thread may take the signal, some time after this call
    elif fault == "sleep":
        time.sleep(1000)
    elif fault == "exit":
        os._exit(3)
    elif fault == "fade":
        end_connections()
        time.sleep(1)
        os._exit(3)
    elif fault == "leave":
        sys.exit(0)
    elif fault in ("raise", "skip"):
        raise BadBatch("bad batch")
    else:
        raise AssertionError(fault)


class Net(nn.Module):
    """Net whose layers can fail while they are wrapped, or run."""

    def __init__(self, fault, place):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.fault, self.place, self.step = fault, place, -1
        self.shared = False  # parameters are, so that hooks on these are lost
        # Reached when the buckets of half of the layers have been sent.
        self.layers[LAYERS // 2].weight.register_hook(self.in_backward)
        self.last = []  # nodes of autograd that are held for their hooks
        self.waits = False  # in the middle of the backward in which another rank has its fault

    def due(self, place):
        return self.fault is not None and place == self.place and self.step == AT

    def in_backward(self, grad):
        if self.waits and self.step == AT:
            time.sleep(1)
        if self.fault == "nan" and self.due("backward"):
            note_fault()
            return grad * float("nan")
        if self.due("backward"):
            self.fail()

    def fail(self):
        if self.fault != "flip":
            return fail(self.fault)
        note_fault()
        self.layers[0].weight.data.view(torch.int32)[0, 0] ^= 1 << 20

    def at_the_end(self):
        """Let the fault happen once this rank has sent all its buckets in the next backward."""
        arrived = []

        def note(*_):
            arrived.append(None)
            if len(arrived) == 2 * LAYERS:
                fail(self.fault)

        self.last = [p.expand_as(p).grad_fn.next_functions[0][0] for p in self.parameters()]
        for node in self.last:
            node.register_hook(note)

    def named_buffers(self, *args, **kwargs):
        checking = sys._getframe(1).f_code.co_name == "_check_zero"  # before the ranks meet
        fails = self.fault not in (None, "settings", "shapes", "order")
        if self.place == "wrap" and fails and not checking:
            fail(self.fault)
        return super().named_buffers(*args, **kwargs)

    def forward(self, x):
        if (self.fault == "nan" and self.due("forward")) or self.due("nonfinite"):
            note_fault()
            x = x * float("nan")
        for index, layer in enumerate(self.layers):
            if index == LAYERS // 2 and self.fault != "nan" and self.due("forward"):
                self.fail()
            if index == LAYERS // 2 and self.shared:
                x.register_hook(self.in_backward)
            x = layer(x).tanh()
        return x.square().mean()


class Deaf:
    """Watch that no rank gets connected with."""

    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)

    def connect(self, *ranks):
        self._own.close()
        return []


def wrap(net, wrapper, options):
    net.shared = wrapper in ("zero3", "blind3", "fsdp")
    if wrapper == "codec":
        options["wire"] = Halves(net)
    if wrapper != "fsdp":
        return fastsync.FastDDP(net, **grouped({"bucket_cap_mb": 0.01, **options}))
    for layer in net.layers:
        fastsync.fully_shard(layer)
    return fastsync.fully_shard(net)


def check_again(model, x):
    """The ranks do not agree any more, and a forward says so instead of computing."""
    try:
        model(x)
    except fastsync.SyncFault as error:
        assert "an earlier step has failed" in str(error), error
    else:
        raise AssertionError("a forward after a fault")


def differ(net, fault):
    """Make this rank differ from the others."""
    if fault in ("shapes", "order", "settings"):
        note_fault()
    if fault == "shapes":
        net.layers[0] = nn.Linear(WIDTH, WIDTH + 1)
    elif fault == "order":
        net.layers._modules["0"] = net.layers._modules.pop("0")  # behind the others
    elif fault == "settings":
        return {"bucket_cap_mb": 7}
    return {}


def vote_and_fail(fault):
    """The next vote on a plan is where this rank has its fault."""
    vote = engine.agree_on_plan

    def fail_and_vote(*facts):
        fail(fault)
        return vote(*facts)

    engine.agree_on_plan = fail_and_vote


def fail_between(net, wrapper, rank):
    """Let the fault happen when the first collective of a bucket is over, and not the second.

    With `zero` that is before the parameters of the first bucket are sent. In a wire format another
    rank holds up its next bucket, on which the faulty one's worker waits before it goes on with
    those that it has begun; then no rank needs its training thread any more.
    """
    if wrapper.startswith("zero"):
        start = Delivery.start

        def fail_and_start(*args):
            if net.due("pieces"):
                fail(net.fault)
            start(*args)

        Delivery.start = fail_and_start
    net.waits = wrapper == "int8" and rank == 0


def fail_when_asked(net):
    """Let the fault happen when another rank asks for this one's share of the optimizer's state."""
    answer = StateShards.answer

    def fail_and_answer(shares, asked):
        if asked.get("stands", [None])[0] == AT + 1:  # this rank may be in a later step
            fail(net.fault)
        return answer(shares, asked)

    StateShards.answer = fail_and_answer


def train(rank, fault, place, wrapper):
    mine = fault if rank == FAULTY else None
    options = dict(WRAPPERS[wrapper] or {})
    if fault == "nan":
        options["nonfinite"] = "raise"
    if fault == "flip":
        options["replicas"] = fastsync.ReplicaPolicy(every=1)
    net = Net(mine, place)
    options.update(differ(net, mine))
    if place == "pieces":
        fail_between(net, wrapper, rank)
    if mine and place == "fetch":
        fail_when_asked(net)
    all_thaw = (fault, place) == ("store", "vote")  # for which ranks meet in the store
    if fault == "thaw" or all_thaw:
        net.layers[0].weight.requires_grad_(False)
    if wrapper == "blind3":
        os.environ["FASTSYNC_WATCH"] = "0"
    if mine and place in (
        "groups",
        "unlinked",
    ):  # all have met to make one, and the others wait in torch
        groups.watched_call = lambda *call, **options: fail(fault)
    if mine and place == "connect":
        core.UnitLinks = lambda *links: fail(fault)
    if mine and place == "vote" and fault not in ("thaw", "store"):
        vote_and_fail(fault)
    if mine and place == "before":
        fail(fault)
    if place == "before" and rank > FAULTY:  # it comes when that one has just ended
        time.sleep(0.4)
    if mine and place == "arrived":  # the store knows, and there is no watch yet
        watch._gather = lambda *call: fail(fault)
    if mine and place == "unlinked":  # all know its address, and none is connected with it
        made = watch._make_offer
        watch._make_offer = lambda *call: (Deaf((offered := made(*call))[0]), offered[1])
    model = wrap(net, wrapper, options)
    if mine and place == "wrapped":
        fail(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for net.step in range(STEPS - (mine == "fewer")):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + net.step))
        if all_thaw and net.due("vote"):
            fail(fault)
        if net.step == AT and (mine == "thaw" or all_thaw):
            net.layers[0].weight.requires_grad_(True)
            if mine == "thaw":
                note_fault()
        optimizer.zero_grad()
        if net.due("skips") or (wrapper == "int8" and net.due("pieces")):
            net.at_the_end()
        try:
            model(x).backward()
        except BadBatch:
            if mine != "skip":
                raise
            continue
        except fastsync.SyncFault:
            if net.shared and place not in ("connect", "wrapped"):  # where no step has begun
                check_again(model, x)
            raise
        if net.due("between") or net.due("nonfinite"):
            fail(fault)
        optimizer.step()
        note_step(model, wrapper)
        if net.due("checkpoint"):
            fail(fault)
        optimizer.state_dict()  # which each rank collects, where they share it
    if mine == "fewer":
        note_fault()
        return []  # to read a number of a DTensor takes all ranks
    return [float(p.detach().double().sum()) for p in net.parameters()]


def facts_of(error):
    names = ("ranks", "phase", "bucket", "parameters", "seconds", "reason")
    facts = {name: getattr(error, name, None) for name in names}
    return {"error": type(error).__name__, "text": str(error), "at": time.time(), **facts}


def run(folder, name, rank, job, served):
    fault, place, wrapper, world = job
    port, process = served
    os.environ["FAULT_NOTES"] = f"{folder}/{name}-{rank}.notes"
    os.environ["STORE_PROCESS"] = str(process)
    dist.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=STALLED if fault in ("stop", "sleep") else 60),
    )
    try:
        seen = {"weights": train(rank, fault, place, wrapper)}
    except BaseException as error:
        seen = facts_of(error)
        raise
    finally:
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(seen))


def main():
    folder, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.update(FASTSYNC_STALL_WARN="1", FASTSYNC_AGREE_TIMEOUT="3")
    extension.load()
    gc.freeze()  # what the ranks have in common is not worth the time of a search
    stuck = {}
    for job in jobs:
        name = "-".join(map(str, job))
        served = serve_store()
        children = fork_ranks(
            job[3],
            f"{folder}/{name}-{{}}.log".format,
            partial(run, folder, name, job=job, served=served),
        )
        codes = end_of(children, LIMIT, lingering=job[0] in ("stop", "sleep"))
        stuck[name] = [rank for rank, code in enumerate(codes) if code is None]
        end_store(served[1])
    print(json.dumps(stuck))


if __name__ == "__main__":
    main()
