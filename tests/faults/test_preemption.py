"""Faults(on_preemption=save): all ranks save after the same step, once, and end."""

import gc
import json
import os
import pickle
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fastsync
from fastsync import FastDDP, PreemptionPolicy
from fastsync.config.arguments import grouped
from fastsync.testing import run_ranks
from tests.faults.launched import ForkedJob, Job, launched
from tests.faults.preemption_script import train

ALL = "all"  # torchrun, which tells all ranks
CASES = {
    "one rank": {"world": 2, "told": 1, "workers": 1},
    "torchrun": {"world": 2, "told": ALL, "options": {"zero": 1}, "workers": 1},
    "zero=1": {"world": 2, "told": 0, "options": {"zero": 1}},
    "zero=2": {"world": 3, "told": 2, "options": {"zero": 2}, "accumulates": True},
    "zero=3": {"world": 2, "told": 0, "options": {"zero": 3}},
    "no_sync": {"world": 2, "told": 0, "accumulates": True},
    "in the data loader": {"world": 3, "told": 1, "loads": 1},
    "waits for a data loader": {"world": 2, "told": 0, "loads": 1},
    "SIGUSR1": {"world": 2, "told": 1, "number": signal.SIGUSR1, "signals": ["SIGUSR1"]},
    "one rank alone": {"world": 1, "told": 0},
}


def started(folder, case):
    kind = Job if case["told"] == ALL else ForkedJob
    module, job = "tests.faults.preemption_script", json.dumps(case)
    return launched(folder, case["world"], module, job, kind=kind)


def tell(running, case):
    process = running.launcher.pid if case["told"] == ALL else running.process(case["told"])
    os.kill(process, case.get("number", signal.SIGTERM))


def without_signal(rank, world, folder, case, steps):
    train(folder, case | {"workers": 0}, rank, steps, pause=0)


def saved(folder, rank):
    (file,) = folder.glob(f"saved {rank} *")  # once
    return torch.load(file)


@pytest.mark.slow(but=("one rank",))
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_save_after_the_same_step(case, tmp_path):
    seed = random.randrange(1 << 32)
    case = CASES[case]
    world, number = case["world"], case.get("number", signal.SIGTERM)
    with started(tmp_path, case) as running:
        running.wait_for_files(*(f"step {rank} 3" for rank in running.ranks))
        time.sleep(random.Random(seed).random() * 0.2)
        tell(running, case)
        text = running.end()
    assert text.count(f"ends: {number.name}, saved") == world, (seed, text)
    assert "terminate called" not in text, text
    results = [saved(tmp_path, rank) for rank in range(world)]
    (step,) = {result["step"] for result in results}
    reference = tmp_path / "reference"
    reference.mkdir()
    run_ranks(without_signal, world, reference, case, step)
    for rank, result in enumerate(results):
        weights = saved(reference, rank)["weights"]
        assert result["weights"].keys() == weights.keys()
        assert all(torch.equal(result["weights"][n], weights[n]) for n in weights), (seed, step)


@pytest.mark.slow
def test_a_rank_goes_on_if_another_has_ended(tmp_path):
    case = {"world": 2, "told": 0, "steps": 4}
    with started(tmp_path, case) as running:
        running.wait_for_files("alone")
        running.wait_for_text("rank 1 came to its end")
        tell(running, case)
        running.wait_for_text("rank 0 does not call on_preemption: fastsync: rank 1 ended its ")
        (tmp_path / "over").touch()
        text = running.end()
    assert {rank.returncode for rank in running.forked} == {0} and "rank 0 came to its end" in text
    assert not list(tmp_path.glob("saved *"))


@pytest.mark.slow
def test_a_second_signal_ends_a_rank_at_once(tmp_path):
    case = {"world": 2, "told": 0, "stuck": True}
    with started(tmp_path, case) as running:
        running.wait_for_files("step 0 3", "step 1 3")
        while not running.has_ended(0):
            tell(running, case)  # in the first seconds a launcher may have repeated it
            time.sleep(0.2)
        assert "rank 0 ends: SIGTERM\n" in running.text
    assert not list(tmp_path.glob("saved *"))


@pytest.mark.slow
def test_an_error_of_one_ranks_save_ends_all(tmp_path):
    case = {"world": 2, "told": 0, "fails": 1}
    with started(tmp_path, case) as running:
        running.wait_for_files("step 0 3", "step 1 3")
        tell(running, case)
        text = running.end()
    assert "rank 1 raised OSError: no space left on device (preemption_script.py:" in text
    assert len(list(tmp_path.glob("saved 0 *"))) == 1


def test_a_worker_ends_when_its_rank_says_so():
    context = torch.multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=outlive, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(60)
    # From another process than its parent.
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    worker.join(1)
    assert worker.is_alive()
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


def outlive(ready):
    fastsync.outlive_preemption()
    ready.set()
    time.sleep(600)


def wrap(**options):
    return FastDDP(nn.Linear(2, 2), **grouped({"on_preemption": lambda: None} | options))


def refusals(rank, world):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    FastDDP(nn.Linear(2, 2))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "only where it is asked for"
    with pytest.raises(ValueError, match="elastic does not go with on_preemption"):
        wrap(elastic=True)
    with pytest.raises(TypeError, match="must be a function without arguments"):
        wrap(on_preemption=3)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="only the main thread"):
        pool.submit(wrap).result()
    signal.signal(signal.SIGTERM, lambda *_: None)
    with pytest.raises(ValueError, match="SIGTERM, which is handled already"):
        wrap()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model = wrap()
    with pytest.raises(ValueError, match="SIGTERM, which is handled already"):
        wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"leave it out with join\(\)"), model.join():
        model(torch.ones(1, 2))
    assert pickle.loads(pickle.dumps(model))._save_points is None
    del model, optimizer
    gc.collect()
    wrap()


def test_what_it_does_not_go_with_is_refused():
    for name in ("SIGKILL", "SIGINT", "SIGNOTHING"):
        with pytest.raises(ValueError, match=f"cannot wait for {name}"):
            PreemptionPolicy(print, (name,))
    with pytest.raises(TypeError, match="must be a tuple of names"):
        PreemptionPolicy(print, "SIGTERM")
    run_ranks(refusals, 1)


def forks(rank, world):
    model = wrap()
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"r")
        while True:
            time.sleep(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    del model
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_a_rank_forks_ends_by_the_signal():
    assert run_ranks(forks, 1) == [-signal.SIGTERM]
