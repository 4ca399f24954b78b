"""elastic_script, with ranks that die while others rebuild, or between two votes, and two models.

See test_elastic_races.py. More places: "sending", when this rank has started to send its last
bucket,
and "sent", when the others have all of them; "meets", "connects", "connected", "plans", "links" and
"gathers", where it rebuilds after a death; "twin", in the backward of the second model.
"""

import copy
import time
import weakref

import torch
import torch.distributed as dist

import fastsync
from fastsync.config.arguments import grouped
from fastsync.ddp import elastic_training
from fastsync.faults.survivors import Survivors
from fastsync.reducer import engine, routes
from tests.elastic import elastic_script

_SETTLED = 0.3  # seconds in which all other ranks receive what was sent


class Fate(elastic_script.Fate):
    """Knows more places."""

    def __init__(self, job, rank, file):
        super().__init__(job, rank, file)
        self.net = lambda: None
        self.nodes = []  # of autograd, held for their hooks
        if self.due:
            self.reach_before(Survivors, "meet", "meets")
            self.reach_before(elastic_training, "make_group", "connects")
            self.reach_before(engine, "open_watch", "connected")
            self.reach_before(engine, "agree_on_plan", "plans")
            self.reach_before(routes, "make_links", "links")
            self.reach_before(Survivors, "gather", "gathers")

    def reach_before(self, owner, name, place):
        call = getattr(owner, name)

        def reach_and_call(*args, **kwargs):
            self.reach(place)
            return call(*args, **kwargs)

        setattr(owner, name, reach_and_call)

    def begin(self, step):
        super().begin(step)
        for place, seconds in {"sending": 0.0, "sent": _SETTLED}.items():
            if (step, place) in self.due:
                self.die_when_sent(seconds)

    def die_when_sent(self, seconds):
        """Behind the engine's hooks, of which the last one sends the last bucket."""
        params, arrived = list(self.net().parameters()), []

        def note(*_):
            arrived.append(None)
            if len(arrived) == len(params):
                time.sleep(seconds)
                self.die()

        self.nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in params]
        for node in self.nodes:
            node.register_hook(note)


class Net(elastic_script.Net):
    """Net that its fate knows."""

    def __init__(self, fate, width, streams=False):
        super().__init__(fate, width, streams)
        fate.net = weakref.ref(self)


def twin_of(model, kind, wrap):
    """Return a second model, which dies nowhere but at "twin"."""
    fate = model.module.fate
    if kind == "copy":
        twin = copy.deepcopy(model)
        twin.module.fate = fate
    else:
        nobody = elastic_script.Fate(elastic_script.Job(), 0, None)
        twin = wrap(elastic_script.Net(nobody, elastic_script.WIDTH))
        twin.module.fate = fate
    twin.module.layers[-1].weight.register_hook(lambda grad: fate.reach("twin"))
    return twin


def train_two(rank, job, fate, seen):
    """In turn. `changes` of the job: those of the first model, then those of the second."""
    options = dict(job.options)
    kind = options.pop("twin")

    def wrap(net):
        return fastsync.FastDDP(
            net, faults=fastsync.Faults(elastic=job.elastic), bucket_cap_mb=0.02, **grouped(options)
        )

    first = wrap(Net(fate, job.width))
    models = [first, twin_of(first, kind, wrap)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen["members"] = [[], []]
    for step in range(job.steps):
        fate.begin(step)
        for index, model in enumerate(models):
            if job.changes and not change_group(model, job.changes[index], step, rank):
                return
            optimizers[index].zero_grad()
            model(elastic_script.batch(rank, step, index, job.width)).backward()
            optimizers[index].step()
            if model.elastic is not None:
                now = [model.elastic.since, list(model.elastic.ranks)]
                if now not in seen["members"][index]:
                    seen["members"][index].append(now)
        seen["weights"].append([elastic_script.digest(model.module) for model in models])


def change_group(model, change, step, rank):
    """Train with fewer ranks from some step on. Return whether this rank does."""
    since, ranks = change
    if since == step + 1 and rank in ranks:
        model._update_process_group(dist.new_group(ranks, use_local_synchronization=True))
    return since > step + 1 or rank in ranks


def train(*given):
    (train_two if "twin" in given[1].options else elastic_script.train)(*given)


def main(train=train):
    elastic_script.Fate, elastic_script.Net = Fate, Net
    elastic_script.main(train=train)


if __name__ == "__main__":
    main()
