"""Every environment variable that fastsync reads, as documented fields of one object.

Nothing else in the package looks at the environment, except for the toolkit and the compiler that
build the extension (recipe.py).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REPLACE = "FASTSYNC_REPLACE_DDP"
_STARTUP = Path(__file__).resolve().parents[1] / "startup"  # its `sitecustomize` reads the variable
# What the variable may set, and what its values are.
DDP_OPTIONS: Mapping[str, type] = {
    "wire": str,
    "bucket_cap_mb": float,
    "find_unused_parameters": bool,
    "gradient_as_bucket_view": bool,
    "static_graph": bool,
    "broadcast_buffers": bool,
    "forward_sync_buffers": bool,
    "init_sync": bool,
    "skip_all_reduce_unused_params": bool,
    "timeline": str,
    "zero": int,
    "shard_by": str,
    "master_weights": bool,
    "parameter_wire": str,
    "nonfinite": str,
    "replicas": bool,
    "shared_memory": bool,
    "on_skip": str,
    "elastic": bool,
    "sync": str,
}
# Makes torch's NCCL watchdog leave a process alive when a collective in it fails.
NCCL_LETS_LIVE: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# Of MPICH and its kin, of Slurm's pmix, of Open MPI.
_MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_BOOLS = {"1": True, "true": True, "0": False, "false": False}

_SWITCH = ("auto", "0", "1")
# Begin the names of variables that change what ranks say to each other.
_OF_RANKS = ("FASTSYNC_", "NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "UCX_", "FI_")
_OF_RANKS_TOO = ("TORCH_DISTRIBUTED_DEBUG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Env:
    """The settings of this process.

    Attributes:
        cache_dir: ``FASTSYNC_CACHE_DIR``. Where JIT-built extensions are kept
            (default: ``$XDG_CACHE_HOME/fastsync`` or ``~/.cache/fastsync``).
        cuda: ``FASTSYNC_CUDA``. ``auto`` builds the CUDA kernels where there are a GPU and
            ``nvcc``, ``1`` insists on them, ``0`` leaves them out.
        cuda_archs: ``FASTSYNC_CUDA_ARCHS``. Architectures to compile for, such as ``"80;90"``
            (default: 80, 90 and 100, and PTX of the last).
        sanitize: ``FASTSYNC_SANITIZE``. Sanitizers to build the extension with, such as
            ``address,undefined`` or ``thread`` (default: none).
        strict: ``FASTSYNC_STRICT=1``. Makes errors of the compilers' warnings, as CI does.
        verbose: ``FASTSYNC_VERBOSE=1``. Shows the compiler's output during a JIT build.
        agree_timeout: ``FASTSYNC_AGREE_TIMEOUT``, in seconds. How long a rank waits for the others
            where all of them have to change their plan together (default: 60).
        local_ranks: ``LOCAL_WORLD_SIZE``, as torchrun sets it: ranks on this machine (default: 0,
            unknown). The hierarchical wire form takes nodes from it.
        replace_ddp: ``FASTSYNC_REPLACE_DDP``. Puts FastDDP in place of torch's
            DistributedDataParallel, with these arguments: ``1``, or such as
            ``wire=bf16,bucket_cap_mb=10`` (default: no).
        shared_memory: ``FASTSYNC_SHM``. ``0`` on any rank has the ranks of one machine average
            CPU gradients through the process group, instead of memory that they share.
        watch: ``FASTSYNC_WATCH``. ``0`` turns the watch for faults of other ranks off (default: 1).
        stall_warn: ``FASTSYNC_STALL_WARN``, in seconds. How long a rank waits for another before it
            warns (default: 10).
        lost_after: ``FASTSYNC_LOST_AFTER``, in seconds. How long the machine of a rank, or
            of the rendezvous store, may acknowledge nothing until it counts as ended (default: 30).
        straggler_warn: ``FASTSYNC_STRAGGLER_WARN``. The share of the step, 0 to 1, from which on
            rank 0 warns of a rank that the others wait for in every step (default: 0.1).
        unit_memory_mb: ``FASTSYNC_UNIT_MEMORY_MB``, in MiB. What whole parameters of zero=3 and the
            buffers that they travel in may take before others are gathered ahead of time (default:
            None, no limit).
        elastic_rank: ``FASTSYNC_ELASTIC_RANK``, as `python -m fastsync.elastic` sets it: which rank
            of the training this process is, and how many began it, such as ``2/4``; ``4/4`` has
            joined (default: None).
        elastic_store: ``FASTSYNC_ELASTIC_STORE``, as `fastsync.elastic` sets it on ranks that come
            back or join: host and port of the store where those that train meet (default: None).
        restarts: ``TORCHELASTIC_RESTART_COUNT``, as torchrun sets it, and `fastsync.elastic` on
            ranks that come back or join: another number on each (default: 0).
        master_port: ``MASTER_PORT``, as the launcher sets it (default: 0). A rank that comes back
            or joins is alone in the group that it makes there.
        nccl_lets_live: ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` and ``TORCH_NCCL_DUMP_ON_TIMEOUT`` are
            ``0``: torch does not end a process because a collective of NCCL has failed.
        rank: ``RANK``, as torchrun sets it (default: 0). Only names the rank that
            compiles to those that wait for it.
    """

    cache_dir: Path
    cuda: str = "auto"
    cuda_archs: tuple[str, ...] = ("80", "90", "100")
    sanitize: str = ""
    strict: bool = False
    verbose: bool = False
    agree_timeout: float = 60.0
    rank: int = 0
    local_ranks: int = 0
    shared_memory: bool = True
    watch: bool = True
    stall_warn: float = 10.0
    lost_after: float = 30.0
    straggler_warn: float = 0.1
    unit_memory_mb: float | None = None
    elastic_rank: tuple[int, int] | None = None
    elastic_store: tuple[str, int] | None = None
    restarts: int = 0
    master_port: int = 0
    replace_ddp: Mapping[str, Any] | None = None
    nccl_lets_live: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Env:
        """Parse the variables.

        Raises:
            ValueError: a variable has a value that makes no sense; names it.
        """
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        archs = environ.get("FASTSYNC_CUDA_ARCHS", "")
        return cls(
            cache_dir=Path(environ.get("FASTSYNC_CACHE_DIR") or base / "fastsync"),
            cuda=_choice(environ, "FASTSYNC_CUDA", _SWITCH),
            cuda_archs=_archs(archs) or cls.cuda_archs,
            sanitize=environ.get("FASTSYNC_SANITIZE", ""),
            strict=_choice(environ, "FASTSYNC_STRICT", ("0", "1")) == "1",
            verbose=environ.get("FASTSYNC_VERBOSE", "0") not in ("", "0"),
            agree_timeout=_positive(environ, "FASTSYNC_AGREE_TIMEOUT", cls.agree_timeout),
            rank=_integer(environ, "RANK", cls.rank),
            local_ranks=_integer(environ, "LOCAL_WORLD_SIZE", cls.local_ranks),
            shared_memory=_choice(environ, "FASTSYNC_SHM", ("1", "0")) == "1",
            watch=_choice(environ, "FASTSYNC_WATCH", ("1", "0")) == "1",
            stall_warn=_positive(environ, "FASTSYNC_STALL_WARN", cls.stall_warn),
            lost_after=_positive(environ, "FASTSYNC_LOST_AFTER", cls.lost_after),
            straggler_warn=_share(environ, "FASTSYNC_STRAGGLER_WARN", cls.straggler_warn),
            unit_memory_mb=_mebibytes(environ, "FASTSYNC_UNIT_MEMORY_MB"),
            elastic_rank=_place(environ, "FASTSYNC_ELASTIC_RANK"),
            elastic_store=_address(environ, "FASTSYNC_ELASTIC_STORE"),
            restarts=_integer(environ, "TORCHELASTIC_RESTART_COUNT", cls.restarts),
            master_port=_integer(environ, "MASTER_PORT", cls.master_port),
            replace_ddp=ddp_options(environ.get("FASTSYNC_REPLACE_DDP", "")),
            nccl_lets_live=all(environ.get(n) == v for n, v in NCCL_LETS_LIVE.items()),
        )


def ddp_options(text: str) -> dict[str, Any] | None:
    """Return arguments of FastDDP from `text`: ``1``, or ``name=value`` separated by commas.

    Returns:
        None where `text` is empty or ``0``.

    Raises:
        ValueError: an argument is unknown, is given twice, or has a value of another type.
    """
    if text in ("", "0"):
        return None
    options: dict[str, Any] = {}
    for part in text.split(",") if text != "1" else ():
        name, equals, value = part.strip().partition("=")
        if name not in DDP_OPTIONS or not equals:
            known = ", ".join(DDP_OPTIONS)
            raise ValueError(
                f"{_REPLACE}={text!r}: {part!r} is no option; write name=value, where name is one "
                f"of {known}"
            )
        if name in options:
            raise ValueError(f"{_REPLACE}={text!r} gives {name} twice")
        options[name] = _value(name, value, text)
    return options


def _value(name: str, value: str, text: str) -> Any:
    kind = DDP_OPTIONS[name]
    try:
        return _BOOLS[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        wanted = "true or false" if kind is bool else "a number"
        raise ValueError(f"{_REPLACE}={text!r}: {name} is {wanted}, not {value!r}") from None


def ask_to_replace(options: str = "") -> None:
    """Make the Python processes that this one starts replace DistributedDataParallel.

    Args:
        options: as in the variable; empty: the present ones.
    """
    if options:
        os.environ[_REPLACE] = options
    os.environ["PYTHONPATH"] = path_with_startup()


def path_with_startup() -> str:
    """Return PYTHONPATH with the folder whose `sitecustomize` imports fastsync after torch."""
    former = os.environ.get("PYTHONPATH")
    entries = [] if former is None else [former]
    if str(_STARTUP) in os.pathsep.join(entries).split(os.pathsep):
        return os.pathsep.join(entries)
    return os.pathsep.join([str(_STARTUP), *entries])


def ddp_environment(backend: str) -> dict[str, str]:
    """Return the variables in DistributedDataParallel's logging data, "N/A" if unset."""
    names = {
        "master_port": "MASTER_PORT",
        "master_addr": "MASTER_ADDR",
        "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
        "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    }
    if backend == "gloo":
        names["gloo_socket_ifname"] = "GLOO_SOCKET_IFNAME"
        names["gloo_device_transport"] = "GLOO_DEVICE_TRANSPORT"
    if backend == "nccl":
        names["nccl_socket_ifname"] = "NCCL_SOCKET_IFNAME"
        names["nccl_blocking_wait"] = "TORCH_NCCL_BLOCKING_WAIT"
        names["nccl_async_error_handling"] = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        names["nccl_debug"] = "NCCL_DEBUG"
        names["nccl_nthreads"] = "NCCL_NTHREADS"
        names["nccl_ib_timeout"] = "NCCL_IB_TIMEOUT"
    return {key: os.environ.get(name, "N/A") for key, name in names.items()}


def set_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the set variables of fastsync, of the backends and of their libraries."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_OF_RANKS) or name in _OF_RANKS_TOO
    }


def has_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has given this process a rank, and the way to find the others."""
    return all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launched_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher of MPI has started this process: mpirun, or Slurm's srun --mpi."""
    return any(name in environ for name in _MPI_RANKS)


def set_missing(single: Mapping[str, object], whole: Mapping[str, object]) -> None:
    """Set variables of this process that are missing, for scripts that expect those of torchrun.

    Args:
        single: set one by one.
        whole: set only where all of them are missing: half of an address is none.
    """
    for name, value in single.items():
        os.environ.setdefault(name, str(value))
    if not any(name in os.environ for name in whole):
        os.environ.update({name: str(value) for name, value in whole.items()})


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Put this process's variables back afterwards."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def inherited(
    changes: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """This process's environment for one that it starts, with `changes`."""
    return {**environ, **changes}


def _choice(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environ.get(name) or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def _archs(text: str) -> tuple[str, ...]:
    archs = tuple(part.replace(".", "") for part in text.replace(",", ";").split(";") if part)
    for arch in archs:
        if not arch.rstrip("af").isdigit():
            raise ValueError(f"FASTSYNC_CUDA_ARCHS={text!r}: {arch!r} is no CUDA architecture")
    return archs


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit():
        raise ValueError(f"{name}={text!r} is not a number")
    return int(text)


def _mebibytes(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    value = _number(text) if text else None
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name}={text!r} is not a positive number of MiB")
    return value


def _place(environ: Mapping[str, str], name: str) -> tuple[int, int] | None:
    text = environ.get(name, "")
    if not text:
        return None
    rank, _, ranks = text.partition("/")
    if not (rank.isdigit() and ranks.isdigit() and int(ranks)):
        raise ValueError(f"{name}={text!r} is not a rank and how many began, such as 2/4")
    return int(rank), int(ranks)


def _address(environ: Mapping[str, str], name: str) -> tuple[str, int] | None:
    text = environ.get(name, "")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"{name}={text!r} is not a host and a port, such as 127.0.0.1:29400")
    return host, int(port)


def _positive(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    value = _number(text) if text else default
    if not value > 0:
        raise ValueError(f"{name}={text!r} is not a positive number of seconds")
    return value


def _share(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    value = _number(text) if text else default
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={text!r} is not a share between 0 and 1")
    return value


def _number(text: str) -> float:
    """Return the number in a text; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
