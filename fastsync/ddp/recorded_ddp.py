"""A front whose steps are recorded, if that was asked for."""

from __future__ import annotations

import os
from typing import cast

from fastsync._build.env import Env
from fastsync.ddp.checked_ddp import CheckedDDP
from fastsync.ddp.ddp_objects import DDPReducer
from fastsync.timeline.recorder import Recorder

__all__ = ["RecordedDDP"]


class RecordedDDP(CheckedDDP):
    """A front that writes what its ranks did."""

    @property
    def _recorder(self) -> Recorder | None:
        return cast(DDPReducer, self.reducer).recorder

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what has been recorded so far; every rank calls it.

        Args:
            path: as in `TimelinePolicy`: rank 0 writes this file; with "{rank}", each its own.

        Raises:
            RuntimeError: nothing is recorded.
        """
        if self._recorder is None:
            raise RuntimeError(
                "write_timeline() finds no recording; wrap the model with "
                "FastDDP(model, timeline=True), on every rank"
            )
        self._recorder.write(os.fspath(path), Env.read().agree_timeout)
