"""Save when the machines of a training are taken away: `Faults(on_preemption=save)`.

The ranks agree where by fastsync/faults/preemption_vote.py: before a forward that follows a step of
an optimizer. What the script does after such a step on its own account is done then, and every rank
has the same weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fastsync._build.env import Env
from fastsync._torch import group_store
from fastsync.config.fault_policies import PreemptionPolicy
from fastsync.faults.exit_reasons import before_leaving
from fastsync.faults.preemption_vote import Preemption, check_handlers
from fastsync.reducer.monitor import looker, make_rendezvous
from fastsync.reducer.optimizer_hooks import StepWatcher, params_of, watch_steps


def check_preemption(wanted: PreemptionPolicy | None, group: dist.ProcessGroup) -> None:
    """Whether the ranks of `group` can save together.

    Raises:
        ValueError: they cannot.
    """
    if wanted is None:
        return
    check_handlers(wanted.numbers)
    if group.size() > 1 and group_store(group) is None:
        raise ValueError(
            "on_preemption has the ranks agree through the store of their process group, but "
            "torch.distributed did not make this one; use one of init_process_group() or "
            "new_group()"
        )


class SavePoints(StepWatcher):
    """Places between steps at which this rank may save, and does.

    Args:
        policy: names what is called.
        group: group whose ranks save.
        params: parameters that optimizers step on.
    """

    def __init__(
        self,
        policy: PreemptionPolicy,
        group: dist.ProcessGroup,
        params: Iterable[torch.Tensor],
    ) -> None:
        self._save, self._ours = policy.save, {id(param) for param in params}
        self._stepped = False
        self._exit = make_rendezvous(group, "preemption", Env.read().agree_timeout)
        store = group_store(group) if group.size() > 1 else None
        me = (group.rank(), group.size())
        look_out = partial(looker, group, "the agreement on a step to save after")
        self._preemption = Preemption(f"{self._exit.name}/agreement", store, me, look_out)
        self._preemption.begin(policy.numbers)
        before_leaving(self._preemption)
        weakref.finalize(self, self._preemption.close).atexit = False
        watch_steps(self)

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped on the model's parameters."""
        self._stepped = self._stepped or any(id(p) in self._ours for p in params_of(optimizer))

    def before_forward(self) -> None:
        """Save and end this process, if the ranks have agreed on that.

        Raises:
            SyncFault: a rank has ended without having saved.
        """
        if not self._stepped or not torch.is_grad_enabled():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step that is captured into a CUDA graph does not come to where on_preemption is "
                "called; leave one of them out"
            )
        self._stepped = False
        if self._preemption.comes():
            self._save()
            self._exit.meet("all ranks to have saved", remedy="on_preemption has to return")
            self._preemption.end_saved()
