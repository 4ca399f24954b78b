"""Starts the ranks of an example or benchmark and gives each one its process group.

A script calls `launch(main, ranks)` once. Under torchrun (the variable RANK is set) or mpirun that
runs `main` in this process; otherwise the script starts itself `ranks` times on this machine and
waits.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fastsync._build.env import launched_by_mpi

FAILED, USAGE, NO_RIGHTS, INTERRUPTED = 1, 2, 3, 130  # exit codes
OVER_SOCKETS = "BENCH_OVER_SOCKETS"  # tells a rank that it may share a GPU
GRACE_SECONDS = 3.0


class UsageError(argparse.ArgumentTypeError):
    """The command line asks for something that does not exist or cannot run here."""


class CheckFailed(RuntimeError):
    """A variant trained other weights than default DDP, or a result is not what it must be."""


class MissingRights(RuntimeError):
    """This user or this machine may not do what is needed."""


def mps_control() -> Path:
    """Return the path that exists while an MPS daemon lets processes use a GPU at the same time."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")


@dataclass(frozen=True)
class Group:
    """This process's place in the job."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def transport(self) -> str:
        shares = OVER_SOCKETS in os.environ and self.world > torch.cuda.device_count()
        nccl = "NCCL, taking turns" if shares and not mps_control().exists() else "NCCL"
        if self.device.type == "cuda":
            return nccl
        over_mpi = dist.is_initialized() and dist.get_backend() != "gloo"
        return "MPI" if over_mpi else "Gloo"

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over ranks, on the CPU."""
        values = values.to(self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.cpu()

    def most(self, value: float) -> float:
        """Return the largest of all ranks' numbers."""
        return float(self.max(torch.tensor([value], dtype=torch.float64)).item())

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean of all ranks' numbers."""
        total = value.detach().to(self.device).clone()
        dist.all_reduce(total)
        return total.item() / self.world

    def all_agree(self, verdict: bool) -> bool:
        """Return whether `verdict` is true on every rank."""
        return not self.most(0.0 if verdict else 1.0)

    def alike(self, tensor: torch.Tensor) -> bool:
        """Return whether every rank holds the bits of rank 0's."""
        first = tensor.clone()
        dist.broadcast(first, 0)
        return self.all_agree(torch.equal(tensor, first))

    def synchronize(self) -> None:
        """Wait for this rank's device; does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call, until this rank's device has done it."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Placement:
    """How one rank is started: what stands before its command, and variables to add."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def anywhere(rank: int) -> Placement:
    """Return the placement of a rank like any other process."""
    return Placement()


def over_sockets(rank: int) -> Placement:
    """Return the placement of a rank that NCCL takes for one on a host of its own, over sockets.

    NCCL refuses two ranks of one host on one GPU, so this also lets ranks share one.
    """
    own = {"NCCL_HOSTID": f"bench-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return Placement(environment={**own, OVER_SOCKETS: "1"})


def is_rank() -> bool:
    """Return whether this process is one of the ranks, rather than what starts them."""
    return "RANK" in os.environ


def launch(
    main: Callable[[Group], int],
    ranks: int,
    threads: int = 1,
    place: Callable[[int], Placement] = anywhere,
) -> int:
    """Run `main` on every rank, and return the exit code of the job.

    Args:
        main: called with this rank's `Group`; returns an exit code.
        ranks: how many to start on this machine; ignored under torchrun and mpirun.
        threads: CPU threads of torch in each rank.
        place: how each rank is started; ignored under torchrun.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler reports its starts otherwise
    if not is_rank() and launched_by_mpi():
        import fastsync.mpi  # noqa: F401, sets the variables
    return _run_rank(main, threads) if is_rank() else _start_ranks(ranks, place)


def _run_rank(main: Callable[[Group], int], threads: int) -> NoReturn:
    # The default action ends a rank at once, also while it waits inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", world)), torch.cuda.device_count()
    device = torch.device("cpu")
    # One GPU per rank where there are enough of them, else a shared one if allowed.
    if gpus >= local_world or (gpus and OVER_SOCKETS in os.environ):
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
    on_cpu = "fastsync_mpi" if "fastsync.mpi" in sys.modules else "gloo"
    dist.init_process_group("nccl" if device.type == "cuda" else on_cpu)
    try:
        code = main(Group(rank, world, device))
    finally:
        dist.destroy_process_group()
    if on_cpu == "fastsync_mpi":
        raise SystemExit(code)  # MPI is finalised at the interpreter's end
    # Not through the interpreter's end: a Gloo thread that drops the last handle of one of DDP's
    # collectives takes Python's lock for it, and aborts where the interpreter is on its way out.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start_ranks(ranks: int, place: Callable[[int], Placement]) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # Asked for by cuBLAS for repeatable results; the correctness checks compare bits.
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    }
    command = [sys.executable, *sys.orig_argv[1:]]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            placed = place(rank)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **placed.environment}
            processes.append(subprocess.Popen([*placed.prefix, *command], env=environment | own))
        return _wait(processes)
    except KeyboardInterrupt:
        print("\ninterrupted: stopping the ranks", file=sys.stderr)
        return INTERRUPTED
    finally:
        _stop(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Return 0 when all ranks ended well, or the code of the first that did not."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), 0)
        if failed or None not in codes:
            return failed if failed >= 0 else 128 - failed
        time.sleep(0.1)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Let ranks that are still running finish for a moment, then ends them."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(0.05)
    for process in processes:
        process.kill()  # does nothing to one that has ended
        process.wait()


Argument = tuple[str, dict[str, Any]]


def argument(name: str, meaning: str, default: Any = None, **how: Any) -> Argument:
    """Return an option as `add_argument` takes it; its help ends with the default, if any."""
    shown = meaning if default is None else f"{meaning} (default: %(default)s)"
    return name, {"help": shown, "default": default, **how}


def whole(text: str, least: int = 1) -> int:
    """Return an argparse type: a whole number, positive unless `least` says otherwise."""
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise UsageError(f"expects a whole number from {least} on, not {text!r}")
    return int(text)


class Parser(argparse.ArgumentParser):
    """A command line whose errors are UsageError, in one line, and whose text keeps its lines."""

    def __init__(self, name: str, text: str | None, *arguments: Argument) -> None:
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {name}", description=text, formatter_class=how)
        for option, settings in arguments:
            self.add_argument(option, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def run(
        self, start: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None
    ) -> int:
        """Start a command; its expected errors become a line of text and an exit code."""
        try:
            return start(self.parse_args(argv))
        except CheckFailed as error:
            code, text = FAILED, f"correctness check failed: {error}"
        except UsageError as error:
            code, text = USAGE, f"error: {error}"
        except MissingRights as error:
            code, text = NO_RIGHTS, f"cannot run here: {error}"
        if os.environ.get("RANK", "0") == "0":  # such an error comes up on every rank alike
            print(text, file=sys.stderr)
        return code


def run_example(
    name: str,
    text: str | None,
    main: Callable[[argparse.Namespace, Group], int],
    *arguments: Argument,
    ranks: int = 2,
) -> int:
    """Run an example's command line: `main` on every rank; return the exit code."""
    how_many = argument("--ranks", "processes to start; torchrun's wins", ranks, type=whole)
    parser = Parser(f"examples.{name}", text, how_many, *arguments)
    return parser.run(lambda args: launch(lambda group: main(args, group), args.ranks))
