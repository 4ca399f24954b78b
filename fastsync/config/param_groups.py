"""Parameters that are averaged over other ranks than the rest: the argument `groups` of FastDDP."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from fastsync._torch import is_registered

GroupKey = str | nn.Module | nn.Parameter


@dataclass(frozen=True)
class Group:
    """Ranks that add up the gradients of some parameters, and the divisor of their sums.

    A process group as a value of `groups` stands for a mean over its ranks. Experts whose gradients
    come from the samples of all ranks, each from a loss that is a mean over one rank's samples,
    need the number of all ranks as their divisor.

    Attributes:
        process_group: the ranks.
        divisor: the number that sums are divided by; None: that of these ranks.
    """

    process_group: dist.ProcessGroup
    divisor: float | None = None


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that have a group of their own.

    Attributes:
        label: the key in `groups`, as errors name it.
        process_group: the group.
        ranks: its ranks, as the default group counts them.
        all_ranks: the number of ranks that train the model.
        divisor: the number that sums of gradients are divided by.
        is_mean: it is that of `ranks`, which may differ between the parts of all ranks.
        names: names of parameters and buffers.
    """

    label: str
    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    all_ranks: int
    divisor: float
    is_mean: bool
    names: frozenset[str]

    def describe(self) -> str:
        """Return what ranks must agree on. Each has ranks of its own."""
        divided = "a mean" if self.is_mean else f"divided by {self.divisor:g}"
        return f"{self.label}: {len(self.names)} tensors, {divided}"


def find_groups(
    groups: Mapping[GroupKey, dist.ProcessGroup | Group],
    module: nn.Module,
    whole: dist.ProcessGroup,
    ignored: Collection[str] = (),
) -> tuple[ParamGroup, ...]:
    """Return the groups with the names of what belongs to them.

    Args:
        groups: patterns of names, modules or parameters, and their groups.
        whole: the group of all ranks that train `module`.
        ignored: names of parameters and buffers that are not averaged at all.

    Raises:
        TypeError: a key or a value is something else.
        ValueError: a key matches no parameter, two match the same, or this rank or another one of
            the group does not belong there.
    """
    if not isinstance(groups, Mapping):
        raise TypeError(
            "groups must map patterns, modules or parameters to process groups, but is a "
            f"{type(groups).__name__}"
        )
    if not groups:
        return ()  # the names of a large model take time
    found: list[ParamGroup] = []
    owner: dict[str, str] = {}
    first = {id(tensor): name for name, tensor in _named(module)}
    parameters = {name for name, _ in module.named_parameters()}
    for key, value in groups.items():
        label, matched = _matched(key, module, first)
        names = frozenset(matched).difference(ignored)
        if names.isdisjoint(parameters):
            raise ValueError(
                f"groups: {label} matches no parameter of the model; patterns are compared with "
                "the names in named_parameters() of the model before it is wrapped"
            )
        for name in sorted(names):
            if name in owner:
                raise ValueError(
                    f"groups: {name!r} is in two groups, those of {owner[name]} and {label}; make "
                    "one of them narrower"
                )
            owner[name] = label
        found.append(_param_group(label, names, value, whole))
    return tuple(found)


def _param_group(
    label: str, names: frozenset[str], value: object, whole: dist.ProcessGroup
) -> ParamGroup:
    given = value if isinstance(value, Group) else Group(value)  # type: ignore[arg-type]
    group: object = given.process_group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"groups: rank {dist.get_rank()} is not in the group of {label}; each rank passes the "
            "group that it is in itself"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"groups: the value of {label} must be a process group or a fastsync.Group, but is a "
            f"{type(group).__name__}"
        )
    if not (is_registered(group) and is_registered(whole)):
        raise ValueError(
            f"groups: {label} needs process groups that torch.distributed made itself; use those "
            "of init_process_group() and new_group(), or leave groups out"
        )
    ranks, all_ranks = (tuple(dist.get_process_group_ranks(each)) for each in (group, whole))
    if not set(ranks) <= set(all_ranks):
        raise ValueError(
            f"groups: the group of {label} has ranks {list(ranks)}, but the process_group of the "
            f"model has {list(all_ranks)} alone; pass one that contains all of its groups"
        )
    divisor = float(len(ranks)) if given.divisor is None else float(given.divisor)
    if not 0 < divisor < math.inf:
        raise ValueError(
            f"groups: the divisor of {label} must be a positive number, but is {given.divisor}"
        )
    is_mean = given.divisor is None
    return ParamGroup(label, group, ranks, len(all_ranks), divisor, is_mean, names)


def _matched(key: object, module: nn.Module, first: Mapping[int, str]) -> tuple[str, Iterator[str]]:
    """Return a key's label, and the names of the parameters and buffers that it means.

    Args:
        first: the first name of each, by its id.
    """
    if isinstance(key, str):
        pairs = _named(module, remove_duplicate=False)
        return repr(key), (first[id(tensor)] for name, tensor in pairs if fnmatchcase(name, key))
    if isinstance(key, nn.Module):
        names = {id(part): name for name, part in module.named_modules()}
        known = (first[id(tensor)] for _, tensor in _named(key) if id(tensor) in first)
        return f"the module {names.get(id(key), type(key).__name__)!r}", known
    if isinstance(key, torch.Tensor):
        name = first.get(id(key))
        return f"the parameter {name!r}", iter(() if name is None else (name,))
    raise TypeError(
        "groups: a key must be a pattern of names, a module or a parameter, but is a "
        f"{type(key).__name__}"
    )


def _named(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def check_parts(labels: Sequence[str], ranks_of: Mapping[int, Sequence[tuple[int, ...]]]) -> None:
    """Check that the groups of each key are parts of all ranks, without a rank in common.

    Args:
        labels: the keys.
        ranks_of: by rank, the ranks of its groups, in the order of the keys.

    Raises:
        ValueError: they are not; the same on every rank.
    """
    for number, label in enumerate(labels):
        for rank, groups in ranks_of.items():
            mine = groups[number]
            for other in mine:
                theirs = ranks_of[other][number]
                if theirs != mine:
                    raise ValueError(
                        f"groups: for {label}, rank {rank} has the group of ranks {list(mine)}, "
                        f"but rank {other} that of {list(theirs)}; all ranks of a group pass that "
                        "group"
                    )
