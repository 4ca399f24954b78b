"""Tunes a running training: tries sizes for a few steps each and keeps what was faster, for good.

[Note: ranks that tune together]
After each step in which others than the default may be tried, the ranks tell each other how long it
took them, and all go by the slowest one's time. The search is a function of those numbers, so they
all try the same at the same step, and all choose the same. It runs in the callback that ends a
synchronised step, where every rank is (see docs/how-it-works.md). Whatever keeps one rank from going
on travels with the times and ends the search on all of them. What an earlier run has found is read
by rank 0 alone, which tells the others.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Hashable
from pathlib import Path

import torch

from fastsync.build.env import Env
from fastsync.engine.agreement import slowest
from fastsync.engine.engine import Engine
from fastsync.engine.watch import gather_watched
from fastsync.plan.buckets import BucketPlan
from fastsync.plan.sizes import Sizes
from fastsync.torch_private import backend_name
from fastsync.tune import store
from fastsync.tune.moves import Bounds, moves
from fastsync.tune.policy import TunePolicy, is_resting
from fastsync.tune.search import Outcome, Rules, Search
from fastsync.wire.formats import FORMATS, Format, make_codec

__all__ = ["SizeTuner", "attach_tuner", "other_forms", "subject"]

_log = logging.getLogger("fastsync")
# What a rank may have against going on, by the number that it tells the others.
_OBJECTIONS = ("", "runs are to repeat bit for bit", "compiled graphs are split where buckets end")
_MOST_GATHERED = 4  # ranks; with more, the gather form sends a multiple of what the two-shot does


def attach_tuner(engine: Engine, policy: TunePolicy | None) -> None:
    """Has `engine`, just built, begin with what was found before, or look for it. Collective."""
    if policy is None or engine.group.size() == 1:
        return
    if is_resting():
        _say(engine, f"tune rests: {_OBJECTIONS[1]}")
        return
    folder = Env.read().cache_dir / "tuned" if policy.folder is None else Path(policy.folder)
    path = store.path_of(folder, subject(engine))
    found = _found(engine, path) if policy.remember else None
    engine.sizing.tuner = SizeTuner(engine, policy, path, found)
    if found is not None:
        engine.use(found.sizes)


class SizeTuner:
    """Called after each step of `engine`, which it does not keep alive.

    Args:
        path: where what is found is kept.
        found: by an earlier run; the engine begins with that.
    """

    def __init__(
        self, engine: Engine, policy: TunePolicy, path: Path, found: store.Found | None
    ) -> None:
        self._engine = weakref.ref(engine)
        self._rank = engine.group.rank()
        self._policy, self._path, self._found = policy, path, found
        self._search: Search[Sizes] | None = None
        self._received = 0  # when the averages of the step before were there, in nanoseconds
        self._planning = 0.0  # seconds between that step's end and the next one

    def after_step(self) -> None:
        """See [Note: ranks that tune together]."""
        engine = self._engine()
        if engine is None:
            return
        mine = (self._seconds(engine), self._planning, float(_objection(engine)))
        seconds, planning, objection = slowest(mine, engine.group, _device(engine))
        began = time.perf_counter()
        if objection:
            self._give_up(engine, _OBJECTIONS[int(objection)])
        elif self._found is not None:
            self._check_found(engine, self._found)
        else:
            self._go_on(engine, seconds, seconds + planning)
        self._planning = time.perf_counter() - began

    def interrupted(self, why: str) -> None:
        """Others have changed what is tuned."""
        self._search = None
        _say_on(self._rank, f"tuning has ended without result: {why}")

    def _seconds(self, engine: Engine) -> float:
        """From the step's forward to its averages on this rank; 0: it had none.

        On devices the host waits for them, which it would not do otherwise.
        """
        step = engine.core.last_step()
        if step["received"] - self._received < 1000:  # a step of the other ranks
            return 0.0
        self._received = end = step["received"]
        if _device(engine).type != "cpu":
            torch.zeros(1, device=_device(engine)).cpu()
            end = time.time_ns()
        return 1e-9 * (end - step["forward_start"])

    def _check_found(self, engine: Engine, found: store.Found) -> None:
        if found.holds_on(engine.network):
            engine.sizing.stop()
            _say_on(self._rank, f"goes on with what {self._path} holds: {_words(found.sizes)}")
            return
        _say_on(self._rank, f"the network is not what it was when {self._path} was written")
        self._found = None
        engine.use(None)

    def _go_on(self, engine: Engine, seconds: float, spent: float) -> None:
        self._search = search = self._search or self._begun(engine)
        before = search.current
        search.observe(seconds, spent)
        if search.current != before:
            engine.use(self._sizes(search.current))
        if search.outcome is not None:
            engine.sizing.stop()
            self._end(engine, search.outcome)

    def _begun(self, engine: Engine) -> Search[Sizes]:
        self._default = engine.sizing.default(engine.wire, engine.network)
        planned = {index for bucket in engine.plan.buckets for index in bucket.params}
        total = sum(engine.params[index].tensor.nbytes for index in planned)
        bounds = Bounds(self._policy.least, total, other_forms(engine))
        rules = Rules(self._policy.steps, self._policy.trial)
        return Search(self._default, moves(bounds), self._key, rules)

    def _sizes(self, of: Sizes) -> Sizes | None:
        return None if of == self._default else of

    def _key(self, sizes: Sizes) -> Hashable:
        engine = self._engine()
        assert engine is not None  # which has called
        try:
            return _shape(engine.plan_by(self._sizes(sizes)))
        except ValueError:  # more than a codec can number
            return _shape(engine.plan_by(None))

    def _give_up(self, engine: Engine, why: str) -> None:
        engine.use(None)
        engine.sizing.stop()
        self.interrupted(why)

    def _end(self, engine: Engine, outcome: Outcome[Sizes]) -> None:
        sizes = self._sizes(outcome.choice)
        self._search = None
        times = f"{1e3 * outcome.seconds:.1f} ms a step"
        if sizes is not None:
            times += f" instead of {1e3 * outcome.default_seconds:.1f}"
        _say_on(self._rank, f"tuned in {outcome.steps} steps: {_words(sizes)}; {times}")
        if self._rank == 0 and self._policy.remember and outcome.seconds:
            _keep(self._path, store.Found(sizes, engine.network))


def subject(engine: Engine) -> dict[str, object]:
    """The model, the ranks, and how gradients travel between them."""
    policy, device = engine.policy, _device(engine)
    params = [
        (p.name, tuple(p.tensor.shape), str(p.tensor.dtype), p.tensor.requires_grad, p.sparse)
        for p in engine.params
    ]
    return {
        "parameters": params,
        "wire": policy.wire.describe(),
        "mixed precision": str(policy.mixed),
        "views": policy.views,
        "flags": policy.flagged,
        "ranks": engine.group.size(),
        "ranks of a machine": Env.read().local_ranks,
        "shared memory": engine.routes.memory is not None,
        "backend": backend_name(engine.group),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _found(engine: Engine, path: Path) -> store.Found | None:
    """What rank 0 reads. Collective."""
    mine = None
    if engine.group.rank() == 0:
        try:
            mine = store.read(path)
        except OSError as error:
            _log.warning("fastsync: cannot read what was tuned before: %s", error)
    return gather_watched(mine, engine.group, "the search for earlier sizes")[0]


def _keep(path: Path, found: store.Found) -> None:
    try:
        store.write(path, found)
    except OSError as error:
        _log.warning("fastsync: cannot keep what was tuned: %s", error)


def _objection(engine: Engine) -> int:
    if is_resting():
        return 1
    return 2 if engine.graphs else 0


def other_forms(engine: Engine) -> tuple[str, ...]:
    """What coded buckets may take too: the gather form rounds once less than the two-shot form."""
    wire, world = engine.wire, engine.group.size()
    codecs = [make_codec(choice) for choice in (wire.format, *wire.overrides.values())]
    if wire.form != "auto" or not all(isinstance(codec, Format) for codec in codecs):
        return ()
    coded = [codec for codec in codecs if codec is not FORMATS["fp32"]]
    now = {wire.form_for(codec, world, _device(engine)) for codec in coded}
    fits = now == {"two_shot"} and wire.format != "fp32"
    return ("gather",) if fits and world <= _MOST_GATHERED else ()


def _shape(plan: BucketPlan) -> Hashable:
    """Equal for plans that do the same."""
    return tuple(
        (b.params, b.layout, b.format_name, b.coded and (b.coded.form, b.coded.layout))
        for b in plan.buckets
    )


def _device(engine: Engine) -> torch.device:
    return engine.params[0].tensor.device


def _words(sizes: Sizes | None) -> str:
    if sizes is None:
        return "the default sizes"
    words = [f"buckets of {_mib(sizes.cap)}", f"the first of {_mib(sizes.first)}"]
    if sizes.last is not None:
        words.append(f"the last of {_mib(sizes.last)}")
    if sizes.piece is not None:
        words.append(f"pieces of {_mib(sizes.piece)}")
    if sizes.form is not None:
        words.append(f"the form {sizes.form!r}")
    return ", ".join(words)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.3g} MiB"


def _say(engine: Engine, text: str) -> None:
    _say_on(engine.group.rank(), text)


def _say_on(rank: int, text: str) -> None:
    if rank == 0:
        _log.info("fastsync: %s", text)
