"""Trains like elastic_script.py, with the optimizer's state shared. See test_elastic_zero.py."""

import hashlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import fastsync
from fastsync.config.arguments import grouped
from fastsync.wire.formats import FORMATS
from fastsync.zero import neighbour_copies, sharded_optimizer
from fastsync.zero.delivery import Delivery
from fastsync.zero.parameter_codes import rounded
from tests.elastic import elastic_script
from tests.elastic.elastic_script import batch, change_group, digest, note_members

# Where else a rank may die, by the call that comes there.
PLACES = {
    "stepping": (Delivery, "start"),
    "sending": (Delivery, "finish"),
    "sharing": (neighbour_copies._Recut, "_collect"),
    "shared": (neighbour_copies.Neighbours, "install"),
    "late": (neighbour_copies.Neighbours, "prepare_late"),
    "collecting": (sharded_optimizer.ShardedOptimizer, "fetch"),
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


@dataclass
class Job(elastic_script.Job):
    """One training.

    Attributes:
        zero: the stage.
        optimizer: one of `OPTIMIZERS`.
        halves: two optimizers, each over half of the layers.
        clips: gradients, to a norm that some steps exceed.
        masters: parameters are in bf16, and the optimizer steps on copies in fp32.
        wire: what parameters travel as.
        lags: ranks and steps at which they learn of a death before the optimizer's step, when
            others wait in it already.
        loads: the step before which the optimizer's state is saved in pieces and loaded.
    """

    zero: int = 0
    optimizer: str = "AdamW"
    halves: bool = False
    clips: bool = False
    masters: bool = False
    wire: str | None = None
    lags: list = ()
    loads: int = -1


def watch_places(fate):
    """Make this rank die where it is due."""
    for place, (owner, name) in PLACES.items():
        if any(at == place for _, at in fate.due):
            call = getattr(owner, name)

            def reached(*args, _call=call, _place=place):
                fate.reach(_place)
                return _call(*args)

            setattr(owner, name, reached)


class WideSteps:
    """Steps on fp32 copies of parameters that are rounded, as one process would without fastsync.

    Args:
        wire: what they are rounded to; None: to their dtype.
    """

    def __init__(self, params, make, wire):
        self.params, self.format = list(params), FORMATS.get(wire)
        self.wide = [torch.nn.Parameter(param.detach().float().clone()) for param in self.params]
        self.inner = make(self.wide)
        self.alone = False

    def zero_grad(self, set_to_none=True):
        for param in self.params:
            param.grad = None if set_to_none or param.grad is None else param.grad.zero_()

    def step(self):
        for param, wide in zip(self.params, self.wide, strict=True):
            wide.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        with torch.no_grad():
            for param, wide in zip(self.params, self.wide, strict=True):
                if self.format and self.alone:  # nothing is rounded, also without a gradient
                    param.copy_(wide)
                elif param.grad is not None:
                    exact = self.format is None
                    param.copy_(wide if exact else rounded(wide, self.format, param))

    def state_dict(self):
        found = self.inner.state_dict()
        if not (self.format and self.alone):  # whose parameters are exact
            for key, state in found["state"].items():
                found["state"][key] = {**state, "master": self.wide[key]}
        return found

    def load_state_dict(self, state):
        """Load a state for parameters that have other values by now."""
        with torch.no_grad():
            for key, (param, wide) in enumerate(zip(self.params, self.wide, strict=True)):
                wide.copy_(state["state"].get(key, {}).pop("master", param))
        self.inner.load_state_dict(state)


def digest_state(optimizers):
    found = hashlib.sha256()
    for each in optimizers:
        states = each.state_dict()["state"]
        for key in sorted(states):
            for name in sorted(states[key]):
                value = torch.as_tensor(states[key][name])
                found.update(f"{key} {name}".encode() + value.detach().numpy().tobytes())
    return found.hexdigest()


def make_optimizers(net, job):
    make, params = OPTIMIZERS[job.optimizer], list(net.parameters())
    parts = [params[:6], params[6:]] if job.halves else [params]
    if (job.masters or job.wire) and not job.zero:
        return [WideSteps(part, make, job.wire) for part in parts]
    return [make(part) for part in parts]


def lag(model):
    """Make the work between backward and step fail for this rank alone."""
    watch, _ = model._elastic._watches[-1]
    while not watch.gone():
        time.sleep(0.01)
    time.sleep(0.2)  # the others are in their step

    def fail():
        raise RuntimeError("a connection of the plan's has been closed")

    model._engine.during(fail)


def reload(model, optimizers):
    for each in optimizers:
        model.load_optimizer_state_dict(each, _copied(model.optimizer_state_dict(each)))


def _copied(value):
    """Return a copy as read from a file: of the same form, in memory of its own."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
        return value.clone()
    return value


def train(rank, job, fate, seen):
    sharded_optimizer._BUFFER = 20_000  # so that there are several
    net = elastic_script.Net(fate, job.width)
    if job.masters:
        net.to(torch.bfloat16)
    optimizers = make_optimizers(net, job)
    watch_places(fate)
    options = {"bucket_cap_mb": 0.02, "find_unused_parameters": True, **job.options}
    if job.zero:
        options |= {"master_weights": job.masters, "parameter_wire": job.wire}
    asked = isinstance(job.elastic, dict)
    elastic = fastsync.ElasticPolicy(**job.elastic) if asked else job.elastic
    model = fastsync.FastDDP(
        net, faults=fastsync.Faults(elastic=elastic), **grouped({"zero": job.zero, **options})
    )
    for each in optimizers:
        if not isinstance(each, WideSteps):
            each.register_step_pre_hook(lambda *_: fate.reach("optimizer"))
    note_members(model, seen)
    for step in range(job.steps):
        if not change_group(model, job, step, rank):
            return
        fate.begin(step)
        for each in optimizers:
            each.zero_grad(set_to_none=not job.local)
        if job.local:
            with model.no_sync():
                backward(model, rank, step, 1, job)
        backward(model, rank, step, 0, job)
        seen["backward"].append(time.time())
        if [rank, step] in list(job.lags):
            lag(model)
        if job.clips:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        if step == job.loads and job.zero:
            reload(model, optimizers)
        for each in optimizers:
            if isinstance(each, WideSteps):
                each.alone = dist.get_world_size(model.process_group) == 1
            each.step()
        seen["weights"].append(digest(net))
        note_members(model, seen)
    seen["state"] = digest_state(optimizers)
    note_members(model, seen)


def backward(model, rank, step, part, job):
    inputs = batch(rank, step, part, job.width)
    model(inputs.to(torch.bfloat16) if job.masters else inputs).backward()


if __name__ == "__main__":
    elastic_script.main(Job, train)
