"""Features that do not combine: one row for each pair, with the reason.

`FastDDP` refuses a pair of this table when it is built, when a communication hook is registered,
when a join begins, and when a micro-batch gets a weight. The table in docs/troubleshooting.md is
made of it, and a test refuses every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fastsync.config.fault_policies import may_lose_ranks
from fastsync.config.policy import MixedPolicy, SyncPolicy
from fastsync.config.sync_modes import Delayed, DiLoCo


@dataclass(frozen=True)
class Setup:
    """The requested features of a wrapper.

    Attributes:
        policy: its settings.
        timeline: it records one.
        device_mesh: its ranks are those of a mesh.
        on_preemption: it saves when machines are taken away.
        on_gpus: its parameters are on a device other than the CPU.
        hook: a communication hook reduces its buckets.
        join: ranks may run out of inputs at different steps.
        weights: its micro-batches have weights.
        dtensors: parameters are DTensors.
    """

    policy: SyncPolicy
    timeline: bool = False
    device_mesh: bool = False
    on_preemption: bool = False
    on_gpus: bool = False
    hook: bool = False
    join: bool = False
    weights: bool = False
    dtensors: bool = False


class Row(NamedTuple):
    """Two features that do not combine: names in `FEATURES`, the reason, and what to do."""

    first: str
    second: str
    reason: str
    remedy: str = "leave one of them out"


def _stage(setup: Setup, *stages: int) -> str:
    return f"zero={setup.policy.zero.stage}" if setup.policy.zero.stage in stages else ""


def _wire(setup: Setup, refused: bool) -> str:
    return f"wire={setup.policy.wire.describe()!r}" if refused else ""


def _sync(setup: Setup, refused: bool) -> str:
    mode = setup.policy.sync
    return f"sync={mode.describe()}" if mode is not None and refused else ""


def _averages_alone(setup: Setup) -> bool:
    return setup.policy.sync is not None and setup.policy.sync.part_size == 1


def _sends_no_gradients(setup: Setup) -> bool:
    mode = setup.policy.sync
    return mode is not None and mode.warmup == 0 and _averages_alone(setup)


def _divisors_differ(setup: Setup) -> bool:
    return any(group.divisor != group.all_ranks for group in setup.policy.groups)


def _sends_while_steps_run(setup: Setup) -> bool:
    mode = setup.policy.sync
    return isinstance(mode, Delayed) or (isinstance(mode, DiLoCo) and mode.overlap > 0)


def _masters(setup: Setup) -> str:
    zero = setup.policy.zero
    if zero.parameter_wire is not None:
        return f"parameter_wire={zero.parameter_wire!r}"
    return "master_weights" if zero.master_weights else ""


def _coded(setup: Setup) -> bool:
    wire = setup.policy.wire
    return not wire.plain and wire.form != "native"


# The name of a feature of a setup in errors; empty if it was not requested.
FEATURES: Mapping[str, Callable[[Setup], str]] = {
    "communication hook": lambda s: "a communication hook" if s.hook else "",
    "device_mesh": lambda s: "device_mesh" if s.device_mesh else "",
    "DTensors": lambda s: "a model of DTensors" if s.dtensors else "",
    "elastic": lambda s: "" if s.policy.elastic is None else "elastic",
    "elastic with rescale": lambda s: (
        f"rescale={s.policy.elastic.rescale!r}"
        if s.policy.elastic is not None and s.policy.elastic.rescale != "average"
        else ""
    ),
    "elastic on GPUs": lambda s: (
        "elastic with parameters on GPUs" if s.policy.elastic is not None and s.on_gpus else ""
    ),
    "find_unused_parameters=False": lambda s: (
        "find_unused_parameters=False" if s.policy.fail_on_unused else ""
    ),
    "groups": lambda s: "groups" if s.policy.groups else "",
    "groups of other divisors": lambda s: "groups" if _divisors_differ(s) else "",
    "hierarchical wire": lambda s: _wire(s, s.policy.wire.form == "hierarchical"),
    "join": lambda s: "join()" if s.join else "",
    "mixed_precision": lambda s: "mixed_precision" if s.policy.mixed != MixedPolicy() else "",
    "nonfinite": lambda s: f"nonfinite={s.policy.nonfinite!r}" if s.policy.checks_finite else "",
    "on_preemption": lambda s: "on_preemption" if s.on_preemption else "",
    "on_skip": lambda s: f"on_skip={s.policy.on_skip!r}" if s.policy.may_skip else "",
    "reduce_dtype": lambda s: (
        "reduce_dtype of mixed_precision" if s.policy.mixed.reduce is not None else ""
    ),
    "replicas": lambda s: "" if s.policy.replicas is None else "replicas",
    "shard_by": lambda s: (
        f"shard_by={s.policy.zero.shard_by!r}" if s.policy.zero.shard_by != "auto" else ""
    ),
    "skip_all_reduce_unused_params": lambda s: (
        "skip_all_reduce_unused_params" if s.policy.skip_unused else ""
    ),
    "static_graph": lambda s: "static_graph" if s.policy.static_graph else "",
    "sync": lambda s: _sync(s, True),
    "sync between groups": lambda s: _sync(
        s, s.policy.sync is not None and s.policy.sync.part_size > 1
    ),
    "sync with something on its way": lambda s: _sync(s, _sends_while_steps_run(s)),
    "sync of local gradients": lambda s: _sync(s, _sends_no_gradients(s)),
    "sync without within": lambda s: _sync(s, _averages_alone(s)),
    "timeline": lambda s: "timeline" if s.timeline else "",
    "weights": lambda s: "add_weight()" if s.weights else "",
    "wire": lambda s: _wire(s, not s.policy.wire.plain),
    "wire with a memory": lambda s: _wire(s, not may_lose_ranks(s.policy.wire)),
    "coded wire": lambda s: _wire(s, _coded(s)),
    "coded wire with zero": lambda s: (
        f"{_wire(s, True)} and zero={s.policy.zero.stage}"
        if _coded(s) and s.policy.zero.stage
        else ""
    ),
    "zero=1 or 2": lambda s: _stage(s, 1, 2),
    "zero=1 to 3": lambda s: _stage(s, 1, 2, 3),
    "zero=2 or 3": lambda s: _stage(s, 2, 3),
    "zero=3": lambda s: _stage(s, 3),
    "zero with masters": _masters,
}
_ON_PLAIN_TENSORS = (
    "elastic",
    "mixed_precision",
    "nonfinite",
    "on_skip",
    "replicas",
    "sync",
    "zero=3",
)
_SHARDED = "use fully_shard beside tensor parallelism"
_INPUTS = "leave it out with join(), or give all ranks as many inputs"
ROWS = (
    Row("elastic", "zero=3", "a rank's shards of the parameters exist once, and die with it"),
    Row(
        "elastic",
        "shard_by",
        "two ranks repeat the same step of a shard, whose bits are known to agree for torch's own "
        "optimizers alone, which 'auto' knows",
    ),
    Row(
        "elastic",
        "wire with a memory",
        "what it keeps back from step to step, or its nodes, would be lost with a rank",
        "use a block format such as 'int8', in any form but the hierarchical one",
    ),
    Row(
        "elastic",
        "coded wire with zero",
        "averages of a shard are sent by its owner alone; to code them anew after its death, the "
        "others would have to keep their gradients",
    ),
    Row(
        "elastic",
        "static_graph",
        "which gradients come is recorded once; it would have to be recorded anew after a death",
    ),
    Row(
        "elastic",
        "skip_all_reduce_unused_params",
        "the survivors would have to agree anew which buckets a step sends",
    ),
    Row(
        "elastic",
        "mixed_precision",
        "an average that is made anew after a death needs the gradients as they were before they "
        "were cast",
    ),
    Row("elastic", "nonfinite", "the vote would have to be repeated among the survivors"),
    Row("elastic", "replicas", "digests are compared over the ranks that began"),
    Row("elastic", "on_skip", "both change which ranks a step counts"),
    Row("elastic", "timeline", "a recording has the ranks that began, from its first step on"),
    Row("elastic", "device_mesh", "the group of a mesh cannot shrink", "pass process_group"),
    Row("elastic", "on_preemption", "under elastic ranks leave one by one"),
    Row("elastic", "communication hook", "a hook may keep something of ranks that die"),
    Row("elastic", "weights", "an average that is made anew after a death would need another sum"),
    Row("elastic", "join", "a rank without inputs does not vote on steps", _INPUTS),
    Row(
        "elastic on GPUs",
        "zero=1 to 3",
        "copies of shards are kept between ranks on the CPU alone; devices would need the same",
    ),
    Row(
        "elastic on GPUs",
        "coded wire",
        "coded buckets wait for each other in the backward, where the host looks for no death",
        "use a wire with form='native'",
    ),
    Row(
        "on_skip",
        "static_graph",
        "a rank that skips a step has other gradients than the recorded ones",
    ),
    Row(
        "on_skip",
        "find_unused_parameters=False",
        "a skipped step leaves all parameters without gradient, which is an error then",
    ),
    Row(
        "on_skip",
        "skip_all_reduce_unused_params",
        "a rank that skips a step does not know which buckets the others send",
    ),
    Row(
        "on_skip",
        "mixed_precision",
        "contributors would have to be counted in reduce_dtype, which may be too narrow",
    ),
    Row(
        "on_skip",
        "zero=2 or 3",
        "gradients are reduced in every backward, before a rank knows that its step fails",
    ),
    Row(
        "on_skip",
        "join",
        "a rank without inputs does not count who has gradients",
        "use on_skip='raise' with join()",
    ),
    Row(
        "on_skip",
        "communication hook",
        "a hook may divide its buffers by a number of ranks of its own",
        "use on_skip='raise' with it",
    ),
    Row(
        "groups",
        "zero=3",
        "not all ranks have the parameters of a group",
        "use zero=2, or fully_shard",
    ),
    Row("groups", "zero with masters", "steps on parameters of a group are not shared"),
    *(
        Row("DTensors", feature, "it works on plain tensors", _SHARDED)
        for feature in _ON_PLAIN_TENSORS
    ),
    Row("DTensors", "join", "the last rank to join sends its parameters as plain tensors", _INPUTS),
    Row("groups", "sync", "rounds average over all ranks"),
    Row("groups", "elastic", "parameters may die with their ranks"),
    Row("groups", "on_skip", "contributors are counted over all ranks"),
    Row(
        "groups",
        "hierarchical wire",
        "a group has nodes of its own",
        "use another form",
    ),
    Row("groups", "communication hook", "a hook does not know a bucket's ranks"),
    Row("groups", "join", "it changes the divisor"),
    Row(
        "groups of other divisors",
        "weights",
        "the weights of all ranks divide all gradients",
        "use fastsync.Group(group, divisor=dist.get_world_size())",
    ),
    Row(
        "sync",
        "zero with masters",
        "rounded parameters are averaged, and would become the masters",
        "leave parameter_wire and master_weights out",
    ),
    Row("sync", "zero=3", "parameters are averaged whole", "use zero=2 with within="),
    Row(
        "sync without within",
        "zero=1 or 2",
        "a shard of the optimizer's state needs the gradients of all ranks",
        "pass within=",
    ),
    Row(
        "sync with something on its way",
        "elastic",
        "after a death it would have to be sent anew while other steps are made",
        "use LocalSGD or DiLoCo without overlap",
    ),
    Row(
        "sync between groups",
        "elastic",
        "a rank that dies leaves its group with fewer ranks than the others",
        "leave within= out",
    ),
    Row(
        "sync",
        "elastic with rescale",
        "a sum of parameters is divided by the number of its ranks, or it would be none of a model",
        "use rescale='average'",
    ),
    Row("sync", "elastic on GPUs", "the host looks for no death while it averages parameters"),
    Row("sync", "static_graph", "backwards send nothing, so that no graph is recorded"),
    Row("sync", "communication hook", "there are no buckets of gradients that it could reduce"),
    Row(
        "sync",
        "join",
        "a rank without inputs makes no steps, and does not come to the end of a round",
        _INPUTS,
    ),
    Row("sync", "nonfinite", "ranks learn of NaN with the gradients, which stay on their ranks"),
    Row("sync", "replicas", "ranks have different parameters within a round"),
    Row("sync", "on_skip", "ranks count who has gradients when they send them"),
    Row("sync", "on_preemption", "ranks would save in the middle of a round"),
    Row(
        "sync of local gradients",
        "wire",
        "gradients do not travel",
        "leave wire out; DiLoCo has a wire of its own, for differences",
    ),
    Row("sync", "weights", "a round averages parameters, which have no divisor"),
    Row("zero=3", "replicas", "each rank has its own shards, so that nothing can be compared"),
    Row(
        "zero=3",
        "mixed_precision",
        "param groups have a policy of their own",
        "use fastsync.fully_shard with mp_policy",
    ),
    Row(
        "zero=3",
        "nonfinite",
        "gradients of a param group are reduced before the other groups have theirs; a step would "
        "have to be voted on at its end",
    ),
    Row(
        "zero=3",
        "communication hook",
        "gradients are reduced a param group at a time",
        "use zero=0, 1 or 2",
    ),
    Row(
        "nonfinite",
        "join",
        "a rank without inputs makes no steps that could be skipped",
        "use nonfinite='ignore' with join()",
    ),
    Row(
        "nonfinite",
        "communication hook",
        "only the hook knows what its buffers hold",
        "look for NaN in the hook, and use nonfinite='ignore'",
    ),
    Row(
        "on_preemption",
        "join",
        "a rank that has run out of inputs does not come to where on_preemption is called",
        _INPUTS,
    ),
    Row(
        "replicas",
        "join",
        "a rank without inputs makes no optimizer steps, so that its weights are others until the "
        "end of join(), which replicas would find",
    ),
    Row(
        "zero=1 to 3",
        "join",
        "a rank without inputs makes no optimizer steps, which all ranks make together",
        "use zero=0 with join(), or give all ranks as many inputs",
    ),
    Row(
        "reduce_dtype",
        "communication hook",
        "both choose what gradients travel as",
    ),
    Row(
        "wire",
        "communication hook",
        "both compress gradients",
        "leave wire out to use the hook",
    ),
    Row(
        "wire",
        "reduce_dtype",
        "both choose what gradients travel as",
        "leave wire out and set reduce_dtype",
    ),
)


def clashes(setup: Setup) -> Iterator[str]:
    """Yield the text of the error of each row that `setup` asks for."""
    for row in ROWS:
        first, second = FEATURES[row.first](setup), FEATURES[row.second](setup)
        if first and second:
            yield f"{first} does not go with {second}: {row.reason}; {row.remedy}"


def check(setup: Setup) -> None:
    """Refuse what does not combine.

    Raises:
        ValueError: names both features, the reason and the remedy.
    """
    for text in clashes(setup):
        raise ValueError(text)
