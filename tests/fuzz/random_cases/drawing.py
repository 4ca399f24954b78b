"""How a model is wrapped: what a case draws before it begins."""

import random
import warnings
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from fastsync import ReplicaPolicy, Wire
from fastsync.config.arguments import PARAMETER_WIRES
from fastsync.reducer.buckets import travels_coded
from fastsync.wire.formats import FORMATS
from tests.fuzz.random_cases.tree import KINDS, REAL
from tests.fuzz.random_cases.wires import EXACT_WIRES, draw_wire
from tests.wire.reference_codes import ROUND

__all__ = ["Drawn", "draw", "may_be_cut", "simulated", "with_dtensors", "with_groups"]

# Kinds of parameters that the simulated device has no operators for.
NOT_SIMULATED = ("complex", "conj", "sparse")
WITHOUT_COMPLEX = tuple(kind for kind in KINDS if kind not in ("complex", "conj"))
THEMES = (
    ("plain",) * 4 + ("wire",) * 4 + ("hook", "mixed", "zero", "zero", "static", "strict", "skip")
)


def averaged(state, bucket):
    """A user's hook: sums, then divides."""
    future = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(state.size()))


def bf16(state, bucket):
    """torch's hook under a name of the user's own: by its own name it is refused without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": bf16,
    "fp16 around allreduce": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "averaged": averaged,
}
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Apart:
    """A parameter with a group of its own.

    Attributes:
        place: its position, as a part of the number of parameters.
        way: the position of a way to divide the ranks, as a part of the number of ways.
        divisor: that of its sums; None: the number of the ranks of its group.
    """

    place: float
    way: float
    divisor: int | None


@dataclass(frozen=True)
class Drawn:
    """One wrapper's settings.

    Attributes:
        theme: the feature that is looked at.
        kinds: of parameters that go with it.
        alike: all ranks use the same parameters in each forward; fixed: in every forward.
        complete: every forward uses every parameter.
        grouped: parameters that have groups of their own.
        cuts: the seed of what becomes DTensors; None: nothing does.
    """

    theme: str
    shape: str
    kinds: tuple = KINDS
    wire: Wire = field(default_factory=Wire)
    hook: str | None = None
    mixed: _MixedPrecision | None = None
    options: dict = field(default_factory=dict)
    reals: tuple = REAL
    grouped: tuple = ()
    cuts: str | None = None

    @property
    def divides(self):
        """Whether groups have divisors of their own, on any rank."""
        return any(each.divisor for each in self.grouped)

    @property
    def alike(self):
        return self.theme in ("static", "strict", "skip")

    @property
    def fixed(self):
        return self.theme == "static"

    @property
    def complete(self):
        return self.theme == "strict"

    @property
    def zero(self):
        """The stage."""
        return self.options.get("zero", 0)

    def rounding(self, dtype):
        """Return the rounding of a dtype's parameters after a step; None: they are exact."""
        wire = self.options.get("parameter_wire")
        return ROUND[wire] if wire and travels_coded(FORMATS[wire], dtype) else None

    @property
    def looks(self):
        """Return whether ranks check gradients for NaN and infinity."""
        return self.options["nonfinite"] != "ignore"

    @property
    def compares(self):
        """Return whether ranks compare their replicas."""
        return "replicas" in self.options

    @property
    def rounds_sums(self):
        """Return whether sums are rounded on the way, however much of them cancels out."""
        return bool(self.mixed or self.zero)

    @property
    def hook_dtype(self):
        """Return the dtype that a hook sends gradients as, where that loses something."""
        names = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return names.get((self.hook or "")[:4])


def draw(rng, world, theme=None):
    theme = theme or rng.choice(THEMES)
    shape = rng.choice(("tensor", "tensor", "nested", "opaque"))
    options = {
        "bucket_cap_mb": rng.choice((1e-6, 1e-4, 1e-3, None)),
        "gradient_as_bucket_view": rng.random() < 0.7,
        "find_unused_parameters": rng.choice((None, True)),
        "nonfinite": "ignore" if theme == "hook" else rng.choice(("ignore", "ignore", "skip")),
        "shared_memory": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        options["replicas"] = ReplicaPolicy(every=rng.choice((1, 1, 2)))
    if theme == "plain":
        exact = Wire() if rng.random() < 0.5 else rng.choice(EXACT_WIRES)
        return Drawn(theme, shape, wire=exact, options={**options, "wire": exact})
    if theme == "wire":
        wire = draw_wire(rng, world)
        return Drawn(theme, shape, WITHOUT_COMPLEX, wire, options={**options, "wire": wire})
    if theme == "hook":
        return _draw_hook(rng, shape, options)
    if theme == "zero":
        options["zero"] = rng.choice((1, 1, 2))
        if rng.random() < 0.4:
            options["parameter_wire"] = rng.choice(PARAMETER_WIRES)
        if rng.random() < 0.5:
            return Drawn(theme, shape, options=options)
        wire = draw_wire(rng, world)
        return Drawn(theme, shape, WITHOUT_COMPLEX, wire, options={**options, "wire": wire})
    if theme == "mixed":
        shape = rng.choice(("tensor", "nested"))  # a loss must not bypass the outputs
        low = rng.choice(LOW)
        mixed = _MixedPrecision(low, rng.choice((low, torch.float32, torch.bfloat16)), None)
        kinds = tuple(kind for kind in KINDS if kind != "sparse")
        options["mixed_precision"] = mixed
        reals = tuple(dtype for dtype in REAL if dtype is not torch.float64)
        return Drawn(theme, shape, kinds, mixed=mixed, options=options, reals=reals)
    options.update(
        {
            "static": {"static_graph": True},
            "strict": {"find_unused_parameters": False},
            "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        }[theme]
    )
    return Drawn(theme, shape, options=options)


def simulated(drawn):
    """Leave out what the simulated device lacks."""
    kinds = tuple(kind for kind in drawn.kinds if kind not in NOT_SIMULATED)
    return replace(drawn, kinds=kinds)


def with_groups(drawn, seed, world):
    """Give some parameters groups of their own."""
    rng = random.Random(f"groups of {seed}")
    if drawn.theme == "hook" or drawn.wire.form == "hierarchical":
        return drawn
    if "parameter_wire" in drawn.options:
        return drawn
    if rng.random() < 0.7:
        return drawn
    divisors = rng.choice(((None, world), (world,), (None, 3)))
    grouped = tuple(
        Apart(rng.random(), rng.random(), rng.choice(divisors)) for _ in range(rng.choice((1, 2)))
    )
    return replace(drawn, grouped=grouped)


def may_be_cut(drawn):
    """Return whether parameters may be DTensors."""
    return drawn.theme != "mixed" and drawn.wire.form != "hierarchical"


def with_dtensors(drawn, seed, world):
    """Make DTensors of some parameters, which `world` ranks average."""
    kept = ("bucket_cap_mb", "gradient_as_bucket_view", "find_unused_parameters", "shared_memory")
    more = ("wire", "static_graph", "skip_all_reduce_unused_params", "zero", "parameter_wire")
    options = {name: drawn.options[name] for name in (*kept, *more) if name in drawn.options}
    if world == 1:
        options.pop("parameter_wire", None)  # nothing is sent
    return replace(drawn, options={**options, "nonfinite": "ignore"}, cuts=f"cuts of {seed}")


def _draw_hook(rng, shape, options):
    hook = rng.choice(tuple(HOOKS))
    # A hook of torch's sums sparse tensors over Gloo, in which torch crashes sooner or later: see
    # docs/how-it-works.md. test_alternating_parameters.py has sparse gradients beside a hook.
    without = {"sparse"}
    if hook[:4] in ("fp16", "bf16"):
        without |= {"complex", "conj"}  # there are no complex numbers of 16 bits
    kinds = tuple(kind for kind in KINDS if kind not in without)
    return Drawn("hook", shape, kinds, hook=hook, options=options)


def register(model, drawn):
    if drawn.hook is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.register_comm_hook(model.process_group, HOOKS[drawn.hook])
