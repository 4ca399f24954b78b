"""Objects that DistributedDataParallel's Python front drives, answered by our engine.

The front (argument checks, initial broadcast, forward, no_sync, join) stays torch's. It drives its
engine through `self.reducer` and `self.logger`: this class, and that of logging_data.py. Method
names are torch's, hence private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fastsync._build.env import Env
from fastsync._torch import GradBucket, mesh_groups
from fastsync.ddp.logging_data import DDPLogger
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import awaited, make_rendezvous
from fastsync.sync.rounds import Rounds
from fastsync.timeline.recorder import Recorder
from fastsync.zero.exchange import Exchange
from fastsync.zero.gradient_norms import Apart, Holders
from fastsync.zero.optimizer_checkpoint import OptimizerCheckpoint
from fastsync.zero.sharded_optimizer import ShardedOptimizers


class DDPReducer:
    """Replacement for torch's `torch.distributed.Reducer`.

    Args:
        in_lockstep: whether all ranks have their forwards in common, as under join(). Then each of
            them synchronises.
        sharded: optimizers whose state the ranks share; None where each has all of it.
        rounds: when parameters are averaged; None: gradients are.
    """

    def __init__(
        self,
        engine: Engine,
        logger: DDPLogger,
        recorder: Recorder | None,
        in_lockstep: Callable[[], bool],
        sharded: ShardedOptimizers | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        self.engine = engine
        self.sharded = sharded
        self.rounds = rounds
        self.recorder = recorder
        self._logger = logger
        self._initial_world = engine.group.size()
        self._in_lockstep = in_lockstep
        self._syncs = self._begins = False  # what the next forward does
        self._apart = _apart(engine)

    def optimizers(self, module: nn.Module) -> OptimizerCheckpoint:
        """Return the part of checkpoints that concerns the optimizers of `module`, which was
        wrapped.
        """
        return OptimizerCheckpoint(self.engine, module, self.sharded)

    def holders(self) -> Holders:
        """Return the objects that hold gradients between a backward and a step."""
        shard_group = None if self.sharded is None else self.sharded.shard_group
        return Holders(self.engine.core, shard_group, self._apart)

    def await_buffers(self, exchange: Callable[[], object]) -> None:
        """Let this rank wait for others by `exchange`."""
        self.engine.core.await_buffers(exchange)

    @property
    def local(self) -> bool:
        """Return whether gradients stay on this rank, as under no_sync()."""
        return self.rounds is not None and self.rounds.local

    @property
    def shares_buffers(self) -> bool:
        """Return whether forwards take rank 0's buffers, if the script wants that."""
        return self.rounds is None or not (self.rounds.local or self.rounds.mode.part_size > 1)

    def prepare_for_forward(self) -> None:
        """Let the forward that `_rebuild_buckets` comes with synchronise."""
        self._syncs = not self.local
        self._begins = True

    def _rebuild_buckets(self) -> bool:
        """Prepare a step. torch calls it before every forward, and under join() without inputs."""
        syncs, self._syncs = self._syncs or self._in_lockstep(), False
        begins, self._begins = self._begins, False
        if self.engine.core.recomputes():
            return False  # the forward that a checkpoint runs again has prepared its step
        changed = (
            self.engine.before_forward() if syncs else self.engine.before_local_forward(begins)
        )
        if begins and self.rounds is not None:
            self.rounds.note_forward()
        return changed

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Make the next backward synchronise; called by scripts and libraries.

        Args:
            outputs: which parameters it reaches is seen as it runs, so they are not looked at.
        """
        self.engine.announce_backward()

    def _delay_all_reduce(self) -> None:
        """Do nothing: the first backward of a static graph has averaged when it ends."""

    def _set_static_graph(self) -> None:
        self.engine.core.set_static_graph()

    def _set_forward_pass_work_handle(self, work: dist.Work, use_initial_world_size: bool) -> None:
        """Set the divisor from `work`, which counts the ranks that have not run out of inputs."""
        awaited(self.engine.group, "the count of ranks in join()", work)
        active = int(work.result()[0].item())
        divisor = self._initial_world if use_initial_world_size else active
        self.engine.set_divisor(float(divisor))

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: plans are made from rank 0's order."""

    def _check_reducer_finalized(self) -> None:
        if self.engine.core.backward_running():
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration: the last backward "
                "stopped half-way"
            )

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum the bucket; hooks that divide on their own call this."""
        group = self.engine.group
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return summed

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: its hook drops the gradients itself."""

    def _install_post_backward_futures(
        self, futures: Sequence[torch.futures.Future[object]]
    ) -> None:
        """Waited for at the end of the next synchronised backward."""
        self.engine.core.at_end(lambda: torch.futures.wait_all(list(futures)))

    def _remove_autograd_hooks(self) -> None:
        self.engine.core.detach_hooks()

    def _reset_state(self) -> None:
        """Do nothing: switching the group resets the reducer."""

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        if self.rounds is not None:
            raise ValueError(
                "sync= averages parameters over the ranks of the old process group: wrap the model "
                "again"
            )
        if self.sharded is not None:
            raise ValueError(
                "the state of optimizers is spread over the ranks of the old process group: wrap "
                "the model again, or use zero=0"
            )
        if self.engine.policy.groups:
            raise ValueError(
                "groups= names ranks of the old process group: wrap the model again, or leave "
                "groups out"
            )
        self.engine.use_group(group)

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self._logger.rate = rate

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks used each parameter in the last synchronised step."""
        counts = zip(self.engine.params, self.engine.core.used_counts(), strict=False)
        trained = [count for param, count in counts if param.tensor.requires_grad]
        return torch.tensor(trained, dtype=torch.int32, device=self.engine.params[0].tensor.device)

    def _ddp_graph_static(self) -> bool:
        """Return whether every step so far used the same parameters."""
        return self.engine.core.last_step()["same_so_far"]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"FastDDP's reducer has no {name!r}: that part of DistributedDataParallel is not "
            "supported"
        )


def _apart(engine: Engine) -> Apart | None:
    """Return the gradients that are averaged over groups of their own."""
    if not engine.policy.groups or engine.group.size() == 1:
        return None
    everyone = set(dist.get_process_group_ranks(engine.group))
    parts: list[tuple[set[int], int]] = []
    for its in engine.policy.groups:
        by_count: dict[int, set[int]] = {}
        for param in engine.params:
            if param.name in its.names:
                count = len(its.ranks)
                for group in mesh_groups(param.tensor):  # they may have parts of the same one
                    others = everyone.intersection(dist.get_process_group_ranks(group))
                    count *= 1 + len(others.difference(its.ranks))
                by_count.setdefault(count, set()).add(id(param.tensor))
        parts += [(ids, count) for count, ids in sorted(by_count.items())]
    place = make_rendezvous(engine.group, "norm over groups", Env.read().agree_timeout)
    return Apart(Exchange(engine.group, place, None, engine.params), parts)
