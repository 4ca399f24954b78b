"""One case: models, their copies, and a training in stages, all drawn from the case's number."""

import random
import zlib

import torch

from tests.fuzz.random_cases import rule
from tests.fuzz.random_cases.drawing import (
    draw,
    may_be_cut,
    simulated,
    with_dtensors,
    with_groups,
)
from tests.fuzz.random_cases.endings import LAYERS_CHANGE, change_layers, layers_change
from tests.fuzz.random_cases.stages import BEFORE, STEPS, accumulate, applicable
from tests.fuzz.random_cases.tree import Tree
from tests.fuzz.random_cases.wrapped import Twins, Wrapped

__all__ = ["Case"]


class Case:
    """The same on every rank, but for what each rank draws for itself.

    Args:
        note: called with the name of each kind that is drawn.
    """

    def __init__(self, seed, seat, note):
        self.note = note
        self.layers_change = layers_change(seed)
        self.rng = random.Random(seed)  # the same on every rank
        self.seat = seat
        drawn = self.draw()
        apart = random.Random(f"meshes of {seed}")
        if seat.folded and may_be_cut(drawn) and apart.random() < 0.25:
            self.seat = seat = apart.choice(seat.folded)
            drawn = with_dtensors(drawn, seed, seat.world)
        self.mine = random.Random(1000 * seed + seat.rank + 1)  # this rank's own
        torch.manual_seed(seed)
        first = self.add(with_groups(drawn, seed, seat.world))
        self.models = [first]
        way = self.rng.choice(("alone",) * 5 + ("another", "shared"))
        way = way if seat.world > 1 else "alone"
        if way == "another":
            group = self.rng.choice((None, seat.second))
            self.models.append(self.add(self.draw(), group))
        elif way == "shared" and first.drawn.theme == "plain" and not first.drawn.divides:
            drawn = self.draw("plain")
            drawn = with_dtensors(drawn, seed, seat.world) if first.drawn.cuts else drawn
            self.models.append(self.add(drawn, twins=first.twins))
            for model in self.models:
                model.siblings = [other for other in self.models if other is not model]
        self.note(f"models: {way if len(self.models) > 1 else 'alone'}")

    def draw(self, theme=None):
        drawn = draw(self.rng, self.seat.world, theme)
        return drawn if self.seat.device == "cpu" else simulated(drawn)

    def add(self, drawn, group=None, twins=None):
        self.note(f"theme: {drawn.theme}")
        if drawn.compares:
            self.note("comparing")
        if drawn.grouped:
            self.note("groups")
        if twins is None:
            tree = Tree(self.rng, drawn)
            if drawn.cuts is not None:
                self.note(f"DTensors over {self.seat.mesh.size()} of {self.seat.world} times that")
                tree.cut(self.seat.mesh, random.Random(drawn.cuts))
            twins = Twins(tree, self.rng, self.mine)
        return Wrapped(self.seat, drawn, twins, self.rng, self.mine, self.note, group)

    def run(self):
        for _ in range(self.rng.choice((2, 3, 4, 5, 6, 7, 7, 14))):
            self.step()
        for model in self.models:
            model.twins.check_saved()
            self.check_plan(model)
        if self.layers_change and self.seat.world > 1:
            self.note(LAYERS_CHANGE)
            change_layers(self.rng.choice(self.models))

    def step(self):
        model = self.rng.choice(self.models)
        model.zero()
        for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
            names = applicable(BEFORE, model)
            if names:
                self.stage(BEFORE, self.rng.choice(names), model)
        if not model.trainable and model.tree.shape == "opaque":
            return
        if self.joint():
            return
        name = self.rng.choice(applicable(STEPS, model))
        if name != "join":  # which begins with other gradients
            accumulate(model)
        self.stage(STEPS, name, model)
        model.twins.keep()

    def stage(self, stages, name, model):
        self.note(name)
        stages[name].run(model)

    def joint(self):
        """One backward through two models, which send their buckets over groups of their own."""
        groups = {id(model.group) for model in self.models}
        if len(groups) < 2 or self.rng.random() < 0.7:
            return False
        opaque = [m for m in self.models if m.tree.shape == "opaque"]
        if not all(m.trainable for m in opaque):
            return False
        self.note("joint backward")
        for model in self.models:
            model.zero()
        forwards = [model.forward() for model in self.models]
        losses = [sum(pair) for pair in zip(*(f.losses() for f in forwards), strict=True)]
        for model in self.models:
            model.note_plan()
        for loss in losses:
            loss.backward()
        for model in self.models:
            model.used |= model.twins.take_fired()
            rule.check(model)
        return True

    def check_plan(self, model):
        """All ranks hold the same one; what a group's buckets are like depends on its size."""
        buckets = model.model._engine.plan.buckets
        plan = [(b.params, b.group or (b.layout, b.dtype, b.views, b.format_name)) for b in buckets]
        mine = torch.tensor([float(zlib.crc32(repr(plan).encode()))], dtype=torch.float64)
        rows = rule.gathered(model, mine)
        assert len(rows.unique()) == 1, "the ranks hold different plans"
