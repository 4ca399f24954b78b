"""The programs of docs/zero.md, run as they stand."""

import copy
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.helpers.teams import run_ranks
from tests.zero.zero_loops import STEPS, batch, close, net

PAGE = (Path(__file__).parents[2] / "docs/zero.md").read_text()


def programs(heading):
    """The Python blocks of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run_program(program, rank, first, path, load=None):
    """The weights and the saved state."""
    module = net()
    module.unused.requires_grad_(False)
    if load is not None:
        module.load_state_dict(load[0])

    def train(model, optimizer):
        if load is not None:
            optimizer.load_state_dict(copy.deepcopy(load[1]))  # torch's writes to it
        for step in range(first, first + STEPS):
            optimizer.zero_grad()
            model(batch(rank, step)).mean().backward()
            optimizer.step()

    names = {"module": module, "train": train, "path": path, "torch": torch, "dist": dist}
    names |= {"fastsync": fastsync, "DistributedDataParallel": DistributedDataParallel}
    exec(program, names | {"ZeroRedundancyOptimizer": ZeroRedundancyOptimizer})
    dist.barrier()
    return module.state_dict(), torch.load(path, weights_only=True)


def migrate(rank, world, folder):
    before, after = programs("Coming from ZeroRedundancyOptimizer")
    path = os.path.join(folder, "state.pt")
    old = run_program(before, rank, 0, path)
    new = run_program(after, rank, 0, path)
    resumed = [run_program(p, rank, STEPS, path, load=old) for p in (before, after)]
    return old, new, *resumed


def test_a_program_of_zero_redundancy_optimizer_moves_over(tmp_path):
    for old, new, old_resumed, new_resumed in run_ranks(migrate, 2, str(tmp_path)):
        assert not close(old[0].values(), net().state_dict().values())
        for (wanted, state), (found, its) in [(old, new), (old_resumed, new_resumed)]:
            assert close(found.values(), wanted.values())
            assert state["state"].keys() == its["state"].keys()
            for index, values in state["state"].items():
                assert close(its["state"][index].values(), values.values())


def save_as_shown(rank, world, path):
    (program,) = programs("Libraries")
    model = fastsync.FastDDP(net(), zero=1, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(rank, 0)).mean().backward()
    optimizer.step()
    exec(program, {"optimizer": optimizer, "torch": torch, "dist": dist, "path": path})
    dist.barrier()
    return len(torch.load(path, weights_only=True)["state"])


def test_the_way_to_save_that_the_page_shows(tmp_path):
    ranks = run_ranks(save_as_shown, 2, str(tmp_path / "state.pt"))
    assert ranks[0] == ranks[1] > 3
