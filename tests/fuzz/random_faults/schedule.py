"""Faults of a training, all of them drawn from one number."""

import random
from dataclasses import dataclass

from torch import nn

__all__ = ["AFTER", "BEFORE", "FAULTS", "LAYERS", "PLACES", "STEPS", "WRAPPERS", "Schedule"]

STEPS = 24
EARLY = 3  # steps in which process groups and plans are made, and every other fault happens
LAYERS = 5
UNITS = {"zero": 3, "units": [nn.Linear]}
WRAPPERS = {
    "fp32": {},
    "group": {"shared_memory": False},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8", "shared_memory": False},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2, "shared_memory": False},
    "zero3": UNITS,
    "zero3_group": {**UNITS, "shared_memory": False},
    "fsdp": None,
}
UNIT_WRAPPERS = ("zero3", "zero3_group", "fsdp")
ENDS = ("kill", "terminate", "exit", "raise")  # a rank ends
FAULTS = (*ENDS * 3, "stop", "pause", "pause")
PLACES = ("batch", "forward", "backward", "between", "step", "checkpoint", "wrap", "vote")
BEFORE = -1  # the step of a fault while the model is wrapped
VOTED = 0  # the step after which a plan is voted on
AFTER = "after"  # place of a signal from outside, when some time has passed
AFTERS = (AFTER,) * 4
SIGNALLED = ("kill", "terminate", "stop", "pause")
LONGEST = 0.3  # seconds from the wrapping to such a signal, about what the steps take


@dataclass(frozen=True)
class Schedule:
    """One training and its fault.

    Attributes:
        victim: the rank that has it.
        place: where in `step`, and at which `layer`; or `AFTER` so many `seconds`.
        lasts: seconds of a pause.
    """

    number: int
    world: int
    wrapper: str
    fault: str
    victim: int
    place: str
    step: int
    layer: int
    seconds: float
    lasts: float

    @classmethod
    def draw(cls, number):
        draw = random.Random(number)
        world, fault = draw.choice((2, 2, 3, 4)), draw.choice(FAULTS)
        wrapper = draw.choice(tuple(WRAPPERS))
        # Units need no plan, so there is no vote on one.
        places = PLACES[:-1] if wrapper in UNIT_WRAPPERS else PLACES
        place = draw.choice((*places, *AFTERS) if fault in SIGNALLED else places)
        step = draw.randrange(draw.choice((EARLY, STEPS)))
        return cls(
            number,
            world,
            wrapper,
            fault,
            draw.randrange(world),
            place,
            {"wrap": BEFORE, "vote": VOTED}.get(place, step),
            draw.randrange(LAYERS),
            draw.uniform(0, LONGEST),
            draw.uniform(0.05, 0.6),
        )

    @property
    def sound(self):
        """The same training without a fault."""
        return f"{self.wrapper}-{self.world}"

    @property
    def passes(self):
        """The training goes on after the fault."""
        return self.fault == "pause"

    def __str__(self):
        where = f"after {self.seconds:.3f} s"
        if self.place != AFTER:
            where = f"in {self.place} of step {self.step}, layer {self.layer}"
        return (
            f"schedule {self.number}: {self.fault} of rank {self.victim} {where}; "
            f"{self.wrapper} on {self.world} ranks"
        )
