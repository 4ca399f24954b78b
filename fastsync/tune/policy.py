"""What `tune=` asks for: for how many steps, how carefully, and whether the result is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fastsync.plan.policy import BucketPolicy, SyncPolicy
from fastsync.plan.switch import policy_of

__all__ = ["TunePolicy", "check_tunable", "describe_tuning", "is_resting"]

_LEAST_BYTES = 64 << 10


@dataclass(frozen=True)
class TunePolicy:
    """How bucket sizes are tuned.

    Attributes:
        steps: synchronised steps, at most, in which others than the default may be tried.
        trial: steps that are timed of each, after one that is not.
        least: bytes that nothing is made smaller than.
        remember: begin with what an earlier run of this model on these ranks has found, and keep
            what this one finds.
        folder: where rank 0 keeps it; None: in fastsync's cache folder.

    Raises:
        ValueError: there is nothing to time, or a size is not positive.
    """

    steps: int = 50
    trial: int = 3
    least: int = _LEAST_BYTES
    remember: bool = True
    folder: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("steps", "trial", "least"):
            if getattr(self, name) < 1:
                raise ValueError(f"tune: {name} must be at least 1, but is {getattr(self, name)}")

    @classmethod
    def of(cls, wanted: bool | TunePolicy) -> TunePolicy | None:
        """From FastDDP's argument: True, a policy, or False.

        Raises:
            TypeError: it is something else.
        """
        return policy_of(cls, wanted, "tune")


def is_resting() -> bool:
    """Whether runs are to repeat bit for bit: sums depend on how buckets are cut."""
    return torch.are_deterministic_algorithms_enabled()


def describe_tuning(tuned: TunePolicy | None) -> str:
    """What ranks must agree on."""
    resting = " under torch.use_deterministic_algorithms(True)" if is_resting() else ""
    return "False" if tuned is None else f"{tuned}{resting}"


def check_tunable(tuned: TunePolicy | None, buckets: BucketPolicy, policy: SyncPolicy) -> None:
    """Whether there are sizes to look for.

    Raises:
        ValueError: they are the user's, or shares depend on them.
    """
    if tuned is None:
        return
    if not buckets.adaptive:
        raise ValueError(
            "tune looks for the size of buckets, and bucket_cap_mb or bucket_cap_mb_list sets it; "
            "leave one of them out"
        )
    if policy.zero.stage:
        raise ValueError(
            f"tune tries other buckets, and with zero={policy.zero.stage} what each rank owns "
            "follows from the buckets of the first steps; leave tune out"
        )
