"""`python -m fastsync.run --sync`: a script of DDP whose ranks average now and then."""

import re
import subprocess
import sys

import pytest

from tests.helpers.scripts import ROOT, environment

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
alike = []
for step in range(4):
    model(torch.full((1, 2), 1.0 + dist.get_rank())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = [torch.empty(1, 2) for _ in range(2)]
    dist.all_gather(rows, model.module.weight.detach())
    alike.append(torch.equal(*rows))
print(f"<{dist.get_rank()} {alike}>", flush=True)
dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local:2", "diloco:2"])
def test_a_script_of_ddp_averages_every_second_step(mode, tmp_path):
    script = tmp_path / "train_it.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *TORCHRUN, "-m", "fastsync.run", "--sync", mode, str(script)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alike = "[False, True, False, True]"
    assert sorted(re.findall(r"<.*?>", done.stdout)) == [f"<0 {alike}>", f"<1 {alike}>"]
    assert f"FastDDP(sync='{mode}')" in done.stderr
