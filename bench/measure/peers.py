"""Local SGD of other libraries, on lanes that have been made for the bare model.

    pip install accelerate torchft

To torchft every rank is a replica, with a store of its own; rank 0 keeps its lighthouse.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from examples.common.ranks import CheckFailed, Group
from examples.common.training import Lane
from fastsync._torch import TCPStore

Attach = Callable[[Lane, Group, ExitStack], None]

HEARTBEAT = timedelta(seconds=1)  # torchft's 0.1 s would show in the bytes of other lanes


def peers(every: int, settled: int, streamed: str) -> tuple[dict[str, Attach], list[str]]:
    """Return how lanes come to average as other libraries do, by name, and a line for each
    library that cannot be imported.

    Args:
        every: steps from one average of a parameter to the next.
        settled: first steps, after which nothing is on its way.
        streamed: what the name of a mode that sends in fragments ends with.
    """
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells of each round otherwise
    logging.getLogger("torchft").setLevel(logging.ERROR)
    ways: dict[tuple[str, str], Attach] = {
        ("accelerate", f"LocalSGD({every})"): partial(_accelerate, every),
        ("torchft", f"LocalSGD({every})"): partial(_local_sgd, every),
        ("torchft", f"DiLoCo({every})"): partial(_diloco, every, None),
        ("torchft", f"DiLoCo({every}{streamed})"): partial(_diloco, every, settled),
    }
    found, missing = dict[str, Attach](), dict[str, str]()
    for (library, mode), attach in ways.items():
        try:
            import_module(f"{library}.local_sgd")
            found[f"{library}.{mode}"] = attach
        except ImportError as error:
            missing[library] = f"left out {library}: {error}; pip install {library}"
    return found, list(missing.values())


def _accelerate(every: int, lane: Lane, group: Group, opened: ExitStack) -> None:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    threads = torch.get_num_threads()
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(threads)  # accelerate sets them where OMP_NUM_THREADS does not
    lane.model = accelerator.prepare_model(lane.module)
    averaging = opened.enter_context(LocalSGD(accelerator, lane.model, every))
    if not averaging.enabled or accelerator.num_processes != group.world:
        raise CheckFailed("accelerate does not see all ranks")
    lane.optimizer.register_step_post_hook(lambda *_: averaging.step())


def _local_sgd(every: int, lane: Lane, group: Group, opened: ExitStack) -> None:
    from torchft.local_sgd import LocalSGD

    manager = _manager(group, opened)
    opened.enter_context(LocalSGD(manager, lane.module, lane.optimizer, every))


def _diloco(every: int, settled: int | None, lane: Lane, group: Group, opened: ExitStack) -> None:
    """Attach DiLoCo with the outer optimizer and mixing of fastsync's; streamed with `settled`."""
    from torchft.local_sgd import DiLoCo

    weights = list(lane.module.parameters())
    parts = 1 if settled is None else math.gcd(every, len(weights))
    size = len(weights) // parts
    fragments = [nn.ParameterList(weights[i * size : (i + 1) * size]) for i in range(parts)]
    kind = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    outer = [kind(fragment.parameters()) for fragment in fragments]
    delay = 0 if settled is None else max(0, every // parts - settled - 1)
    mixed = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5 if delay else 0.0}
    manager = _manager(group, opened)
    opened.enter_context(DiLoCo(manager, fragments, lane.optimizer, outer, every, **mixed))


def _manager(group: Group, opened: ExitStack) -> Any:
    """Return this rank's replica, among those of all ranks."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    main, port = os.environ["MASTER_ADDR"], [""]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((main, 1))  # sends nothing
        here = probe.getsockname()[0]
    if group.is_main:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=group.world)
        opened.callback(lighthouse.shutdown)
        port = [lighthouse.address().rpartition(":")[2]]
    dist.broadcast_object_list(port)
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
    opened.enter_context(nullcontext(store))  # which lives as long as its server is needed
    manager = Manager(
        ProcessGroupGloo(),
        None,
        None,
        min_replica_size=group.world,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{main}:{port[0]}",
        replica_id=str(group.rank),
        hostname=here,
        heartbeat_interval=HEARTBEAT,
        init_sync=False,
        max_retries=0,  # a round that comes to nothing is an error
    )
    opened.callback(manager.shutdown, wait=False)
    return manager
