"""The error that names the ranks that others wait for in vain."""

from __future__ import annotations

from collections.abc import Sequence


class SyncFault(RuntimeError):
    """Error on a rank whose peers have ended or did not come in time; says which, where and why.

    The ranks do not agree any more once it has been raised, so every later forward raises it too:
    restart from a checkpoint.

    Attributes:
        ranks: the missing ranks of the process group.
        phase: what the first of them was doing when it was last heard of: "forward", "after
            forward", "backward", "waiting" (for others), "gathering" (parameters), "reducing" (a
            unit's gradients), "planning", "comparing" (replicas), "wrapping" (the model) or
            "between steps"; empty if it had not started to wrap the model, or if that is unknown.
        bucket: the bucket that this rank waited for, from 0; -1 where it waited for something else.
        parameters: names of those in that bucket, or unit.
        seconds: that this rank had waited.
        reason: what became of the first of them: "was killed by SIGKILL", the exception that it
            raised, "is late", "did not come"; empty where its script had come to its end.
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        phase: str = "",
        bucket: int = -1,
        parameters: Sequence[str] = (),
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.phase = phase
        self.bucket = bucket
        self.parameters = list(parameters)
        self.seconds = seconds
        self.reason = reason

    def __reduce__(self) -> tuple[type[SyncFault], tuple[object, ...]]:
        fields = (self.ranks, self.phase, self.bucket, self.parameters, self.seconds, self.reason)
        return type(self), (str(self), *fields)
