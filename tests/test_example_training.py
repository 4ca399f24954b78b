"""examples/training.py: a complete training, interrupted and resumed, on one "node" and on two."""

import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples import checkpoint, training
from examples.training import Saving, Settings, Trainer, learning_rate, train
from fastsync.testing import RankError, run_ranks
from tests.scripts import finish_all, start

SMALL = Settings(epochs=2, samples=256, batch=8, accumulate=2)  # 8 steps per epoch on two ranks
CPU = torch.device("cpu")


def whole(rank, world, settings=SMALL, saving=None):
    return train(settings, saving or Saving(), CPU)


def interrupted(rank, world, settings, path, steps):
    """Leaves in the middle, as a job does that is preempted right after a checkpoint."""
    trainer = Trainer(settings, CPU)
    while True:
        for _ in trainer.epoch():
            if trainer.steps == steps:
                trainer.save(path)
                return


@pytest.fixture(scope="module")
def uninterrupted():
    return run_ranks(whole, 2)[0]


@pytest.fixture(scope="module")
def checkpoint_after_3(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "training.pt"
    run_ranks(interrupted, 2, SMALL, path, 3)
    return path


@pytest.mark.parametrize("precision, steps", [("fp32", 8), ("bf16", 8), ("fp16", 3)])
def test_resumed_equals_uninterrupted(tmp_path, precision, steps):
    settings, path = replace(SMALL, precision=precision), tmp_path / "training.pt"
    expected = run_ranks(whole, 2, settings)[0]
    run_ranks(interrupted, 2, settings, path, steps)
    resumed = run_ranks(whole, 2, settings, Saving(path, resume=True))[0]
    assert resumed.digest == expected.digest
    assert len(resumed.rates) == len(expected.rates) - steps
    assert resumed.accuracy == expected.accuracy


def resumes_without(rank, world, path, forgotten):
    if forgotten == "random states":
        checkpoint._set_random_state = lambda state, device: None
    if forgotten == "optimizer":
        torch.optim.SGD.load_state_dict = lambda self, state: None
    if forgotten == "position":
        Trainer.resume = lambda self, path: (
            checkpoint.resume(path, self.trained, vars(self.settings)),
            setattr(self, "steps", 4),
        )
    return whole(rank, world, SMALL, Saving(path, resume=True))


@pytest.mark.parametrize("forgotten", ["nothing", "random states", "optimizer", "position"])
def test_everything_in_a_checkpoint_is_needed(
    tmp_path, checkpoint_after_3, uninterrupted, forgotten
):
    path = shutil.copy(checkpoint_after_3, tmp_path)  # a run that ends writes its own
    resumed = run_ranks(resumes_without, 2, Path(path), forgotten)[0]
    assert (resumed.digest == uninterrupted.digest) == (forgotten == "nothing")


def test_the_same_bits_as_with_torch_ddp(uninterrupted):
    assert run_ranks(whole, 2, replace(SMALL, wrapper="torch"))[0].digest == uninterrupted.digest


def test_it_learns():
    result = run_ranks(whole, 2, replace(SMALL, epochs=6, samples=1024))[0]
    assert result.accuracy > 0.5  # 0.25 by chance
    assert result.loss < 1.1  # log(4) = 1.39 by chance


def one_epoch(rank, world):
    trainer = Trainer(SMALL, CPU)
    start = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    random = torch.get_rng_state()
    seen = []
    for epoch in range(2):
        trainer.sampler.start(epoch, 0)
        seen.append(list(trainer.sampler))
        trainer.sampler.start(epoch, 100)
        assert list(trainer.sampler) == seen[-1][100:]
    losses = list(trainer.epoch())
    return start, random, seen, len(losses), trainer.model.sync_stats()["steps"]


def test_what_ranks_share_and_what_not():
    (weights, random, seen, steps, synchronised), other = run_ranks(one_epoch, 2)
    assert torch.equal(weights, other[0])
    assert not torch.equal(random, other[1])
    for epoch in range(2):
        assert sorted(seen[epoch] + other[2][epoch]) == list(range(SMALL.samples))
    assert seen[0] != seen[1]
    assert steps == 8
    assert synchronised == steps  # though each has two backwards


def rates(rank, world, settings):
    return [learning_rate(step, settings) for step in range(2 * settings.steps_per_epoch)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_rate_grows_with_the_batch_behind_a_warmup(world):
    settings = Settings(epochs=2, samples=1024 * world, batch=32, accumulate=2)
    found = run_ranks(rates, world, settings)[0]
    peak = settings.rate * world  # one rank's 32 x 2 pictures are the reference batch
    assert len(found) == 32
    assert max(found) == pytest.approx(peak)
    assert found[15] == pytest.approx(peak)
    assert found[0] == pytest.approx(settings.rate + (peak - settings.rate) / 16)
    assert found[:16] == sorted(found[:16])
    assert found[16:] == sorted(found[16:], reverse=True)
    assert found[-1] < 0.05 * peak


@pytest.mark.parametrize(
    "settings, message",
    [
        (replace(SMALL, batch=16), "made with batch = 8, but this run has 16"),
        (replace(SMALL, samples=16), "16 samples do not fill one step of 2 ranks x 2 x 8"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(checkpoint_after_3, settings, message):
    with pytest.raises(RankError) as raised:
        run_ranks(whole, 2, settings, Saving(checkpoint_after_3, resume=True))
    assert (
        str(raised.value).count(f"ValueError: {message}")
        + str(raised.value).count(f"ValueError: the checkpoint was {message}")
        == 2
    )


def test_another_number_of_ranks_is_refused(checkpoint_after_3):
    with pytest.raises(RankError, match="made with ranks = 2, but this run has 1"):
        run_ranks(whole, 1, SMALL, Saving(checkpoint_after_3, resume=True))


def fails_while_saving(rank, world, path):
    trainer = Trainer(SMALL, CPU)
    trainer.save(path)
    before = path.read_bytes() if rank == 0 else b""

    def half(content, file):
        file.write(b"half")
        raise OSError("disk full")

    torch.save = half
    try:
        trainer.save(path)
    except OSError:
        assert rank == 0
    return (path.read_bytes() if rank == 0 else b"") == before and len(before) != rank


def test_a_crash_while_saving_leaves_the_former_checkpoint(tmp_path):
    assert run_ranks(fails_while_saving, 2, tmp_path / "training.pt") == [True, True]


def torchrun(*arguments, nodes=1):
    """One torchrun per node; two ranks in all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    sizes = ("--epochs", 2, "--samples", 2048, "--batch", 8, "--accumulate", 2, "--every", 3)
    script = ("-m", "examples.training", *sizes, *arguments)
    common = (f"--nproc-per-node={2 // nodes}", f"--nnodes={nodes}", "--master-addr=127.0.0.1")
    return [
        start(
            "torch.distributed.run",
            *common,
            f"--master-port={port}",
            f"--node-rank={node}",
            *script,
        )
        for node in range(nodes)
    ]


def digest(outputs):
    return re.search(r"weights sha256 (\w{64})", "".join(outputs))[1]


def preempt_after_checkpoint(processes, steps):
    """Ends the job as a cluster's scheduler does, once the checkpoint is there."""
    try:
        assert any(f"after step {steps}" in line for line in processes[0].stdout)
    finally:
        for process in processes:
            process.terminate()  # torchrun passes it on to its ranks, which sessions shield
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode != 0


def test_preempted_and_resumed_on_two_nodes_equals_one_node(tmp_path):
    saving = ("--checkpoint", tmp_path / "training.pt")
    expected = digest(finish_all(torchrun()))
    preempt_after_checkpoint(torchrun(*saving, nodes=2), 6)
    resumed = finish_all(torchrun(*saving, "--resume", nodes=2))
    continued = re.search(r"continuing after step (\d+)", "".join(resumed))
    assert 6 <= int(continued[1]) < 128
    assert digest(resumed) == expected


def test_it_tells_how_to_be_started(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["training"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert ended.value.code == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_ranks_that_drift_apart_are_noticed():
    with pytest.raises(RankError, match="ranks hold different weights"):
        run_ranks(drifted, 2)


def drifted(rank, world):
    trainer = Trainer(SMALL, CPU)
    with torch.no_grad():
        next(trainer.model.parameters()).add_(dist.get_rank())
    trainer.digest()
