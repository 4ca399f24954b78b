"""MPI as a backend of torch.distributed, for CPU tensors.

    import torch.distributed as dist, fastsync.mpi

    dist.init_process_group("fastsync_mpi")  # under `mpirun -n 4 python train.py`

The import initialises MPI, sets torchrun's variables where they are missing, and registers the
backend. MPI moves bytes; sums are made here, in the order of the ranks, with the same bits on all
ranks and with any MPI library. One thread drives what is under way.

[Note: order of collectives]
MPI matches the nonblocking collectives of a communicator by the order of their calls. The first
half of a collective is started by the thread that calls it. Its second half, such as an
all-reduce's, goes over another communicator, in the order in which the collectives were called.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastsync._build.env import launched_by_mpi, set_missing
from fastsync._build.extension import load
from fastsync._torch import MPI as NAME
from fastsync._torch import TCPStore
from fastsync.faults.exit_reasons import in_words

try:
    from mpi4py import MPI
except ImportError as error:
    raise ImportError(f"fastsync.mpi needs mpi4py: pip install 'fastsync[mpi]': {error}") from None
except RuntimeError as error:
    text = "fastsync.mpi finds no MPI library: load the cluster's MPI module, or pip install mpich"
    raise ImportError(f"{text}: {str(error).splitlines()[0]}") from None

__all__ = ["NAME"]

_SMALL = 1 << 15  # bytes of a reduction that each rank receives from all at once
_SPIN, _NAP, _LONGEST_NAP = 1e-4, 2e-5, 3e-4  # seconds without progress; between two looks then
_LOOK, _GRACE = 0.05, 1.0  # seconds between looks at other ranks; for what the ended have sent
_world, _process = MPI.COMM_WORLD, os.getpid()
_begun: dict[str, int] = {}  # collectives of this rank, by their group's name
# What an operation does: yields requests, and goes on with their statuses once all have ended.
Steps = Generator[list[Any], list[Any], None]
How = tuple[Any, str, str, float]  # see _Job
Ranked = Sequence[tuple[int, Tensor]]


class _Dense:
    """A tensor as MPI takes it: `flat` is its memory, or a contiguous copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._own = tensor.detach()
        plain = self._own.resolve_conj().resolve_neg()
        self.flat = plain.contiguous().view(-1)
        self._copied = plain is not self._own or self.flat.data_ptr() != plain.data_ptr()

    def land(self) -> None:
        """Copy what has come into the tensor."""
        if self._copied:
            self._own.copy_(self.flat.view(self._own.shape))

    def land_message(self, status: Any) -> None:
        if (came := status.Get_count(MPI.BYTE)) != self.flat.nbytes:
            rank, due = status.Get_source(), self.flat.nbytes
            raise ValueError(f"rank {rank} has sent {came} bytes, not the {due} expected")
        self.land()


def _bytes(flat: Tensor) -> Any:
    return MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes)


def _parts(flat: Tensor, cut: Sequence[int]) -> list[Any]:
    """A buffer of parts of so many elements, as MPI takes it."""
    counts = [n * flat.element_size() for n in cut]
    return [_bytes(flat), counts, [0, *accumulate(counts)][:-1], MPI.BYTE]


def _reduce_rows(rows: Tensor, out: Tensor, name: str, averages: bool) -> None:
    """`out` becomes what the rows add up to, in their order, by torch's function of that name."""
    combine: Callable[..., Tensor] = getattr(torch, name)
    in_fp32 = out.dtype in (torch.float16, torch.bfloat16)  # and rounded once
    total = rows[0].float() if in_fp32 else rows[0]
    for row in rows[1:]:
        total = combine(total, row, out=total if in_fp32 else out)
    if averages:
        total.div_(len(rows))
    if total is not out:
        out.copy_(total)


class _Job:
    """An operation under way.

    Args:
        how: its handle, made by csrc/comm/host_backend.cpp; how errors name the call; what all
            ranks must say alike of it; the seconds that it may take.
        awaits: ranks of the world without which it does not end.
        number: of a collective, among those of its group; 0: a message.
        check: a request, what it brings, and what that has to be.
    """

    def __init__(
        self, group: _Group, how: How, awaits: Sequence[int], number: int, check: Any, steps: Steps
    ) -> None:
        self.group, self.awaits, self.number, self._check = group, awaits, number, check
        self.work, self.call, _, self.seconds = how
        self.deadline, self.over, self._steps = time.monotonic() + self.seconds, False, steps
        self._wait_for(next(steps))

    def _wait_for(self, requests: list[Any]) -> None:
        self._requests, self._statuses = requests, [MPI.Status() for _ in requests]
        self._arrived = not requests

    def moving(self) -> bool:
        """Return whether bytes of a collective are under way. A nap would delay each piece."""
        return self.number > 0 and self._check is None and not self._arrived

    def poll(self) -> bool:
        """Return whether something has happened."""
        try:
            if self.group.broken:
                raise RuntimeError(f"an earlier operation of the group failed: {self.group.broken}")
            if moved := self._check is not None and self._check[0].Test():
                (_, found, due), self._check = self._check, None
                if not torch.equal(found, due):
                    raise ValueError("others call something else, or with other sizes or dtypes")
            if not self._arrived and MPI.Request.Testall(self._requests, self._statuses):
                self._arrived = moved = True
            return (self._arrived and self._check is None and self._goes_on()) or moved
        except Exception as error:  # this thread serves others, too
            codes = [s.Get_error() for s in self._statuses if s.Get_error() != MPI.SUCCESS]
            self.fail(f"{self.call}: {MPI.Get_error_string(codes[0]) if codes else error}")
            return True

    def _goes_on(self) -> bool:
        order = self.group.order
        if self in order:
            if order[0] is not self:  # see [Note: order of collectives]
                return False
            order.popleft()
        try:
            self._wait_for(self._steps.send(self._statuses))
        except StopIteration:
            self.over = True
            self.work.end()
        return True

    def fail(self, text: str) -> None:
        """Fail this operation, and whatever its group is asked for from now on."""
        self.over, self.group.broken = True, self.group.broken or text
        self.group.stuck.append(self)
        self.work.end(f"rank {self.group.rank} of {self.group.size}: {text}")


class _Progress:
    """The thread that drives what is under way, and hears of ranks that have ended."""

    def __init__(self, notices: Any) -> None:
        self.left: dict[int, tuple[float, dict[str, int]]] = {}  # when, and what had begun
        self._notices, self._jobs, self._moved = notices, list[_Job](), 0.0
        self._changed, self._hearing, self._ends = threading.Condition(), threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="fastsync-mpi", daemon=True)
        self._thread.start()

    def add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._moved = time.monotonic()
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(_GRACE)

    @torch.inference_mode()
    def _run(self) -> None:
        nap, looked = _NAP, 0.0
        while not self._ends:
            with self._changed:
                self._jobs = [job for job in self._jobs if not job.over]
                self._changed.wait_for(lambda: self._jobs or self._ends)
            # Nothing that is over is kept while this waits: it would keep tensors.
            moved = any([job.poll() for job in list(self._jobs)])
            now = time.monotonic()
            if now - looked > _LOOK:
                looked = now
                self._look(now)
            if moved:
                self._moved, nap = now, _NAP
            elif now - self._moved < _SPIN or any(job.moving() for job in self._jobs):
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(1.3 * nap, _LONGEST_NAP)

    def hear(self) -> None:
        with self._hearing:
            while self._notices.Iprobe(MPI.ANY_SOURCE):
                status = MPI.Status()
                begun = self._notices.recv(status=status)
                self.left[status.Get_source()] = time.monotonic(), begun

    def _look(self, now: float) -> None:
        self.hear()
        for job in [job for job in self._jobs if not job.over]:
            for rank in job.awaits if self.left else ():
                when, begun = self.left.get(rank, (now, {}))
                has_come = 0 < job.number <= begun.get(job.group.name, 0)
                if now - when > _GRACE and not has_come:
                    job.fail(f"rank {rank} has ended, and this rank waits for it in {job.call}")
                    break
            if not job.over and now > job.deadline:
                job.fail(f"{job.call}: timeout after {job.seconds:g} s: other ranks have not come")


class _Group:
    """The work of a process group. csrc/comm/host_backend.cpp checks arguments, and asks for it."""

    def __init__(self, comm: Any, name: str, members: Sequence[int]) -> None:
        self.rank, self.size, self.name, self._members = comm.rank, comm.size, name, members
        self.broken, self.stuck = "", list[_Job]()  # whose memory MPI may still write to
        self.order: deque[_Job] = deque()
        self._first, self._second = comm, comm.Dup()  # see [Note: order of collectives]
        self._lock, self._tags = threading.Lock(), int(comm.Get_attr(MPI.TAG_UB)) + 1

    def collective(self, how: How, name: str, *args: Any) -> None:
        digest = zlib.crc32(how[2].encode())
        mine = torch.tensor([digest, -digest], device="cpu")
        found = torch.empty_like(mine)
        with self._lock, torch.no_grad():
            number = _begun[self.name] = _begun.get(self.name, 0) + 1
            check = self._first.Iallreduce(mine.numpy(), found.numpy(), MPI.MAX), found, mine
            job = _Job(self, how, self._members, number, check, getattr(self, name)(*args))
            self.order.append(job)
            _progress.add(job)

    def message(self, how: How, name: str, peer: int, tag: int, tensor: Tensor) -> None:
        """Begin to send or receive one; a peer of -1 is any."""
        awaits = self._members[peer : peer + 1] if peer >= 0 else ()
        steps = getattr(self, name)(how[0], peer, tag % self._tags, tensor)
        with self._lock, torch.no_grad():
            _progress.add(_Job(self, how, awaits, 0, None, steps))

    def close(self) -> None:
        """MPI keeps what is under way."""
        for comm in (self._first, self._second) if not self.stuck else ():
            comm.Free()

    def barrier(self) -> Steps:
        yield [self._first.Ibarrier()]

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        dense = _Dense(tensor)
        yield [self._first.Ibcast(_bytes(dense.flat), root)]
        if self.rank != root:
            dense.land()

    def reduce(self, tensor: Tensor, how: tuple[str, bool], root: int) -> Steps:
        """To all ranks, if the root is -1: each sums its part, then all gather the parts."""
        dense, receives = _Dense(tensor), root in (-1, self.rank)
        flat = dense.flat
        if flat.nbytes * self.size <= _SMALL:
            rows = flat.new_empty(self.size, flat.numel())
            yield [self._first.Iallgather(_bytes(flat), _bytes(rows))]
            if receives:
                _reduce_rows(rows, flat, *how)
        else:
            each = -(-flat.numel() // self.size)
            cut = [max(0, min(each, flat.numel() - r * each)) for r in range(self.size)]
            whole, part = _parts(flat, cut), flat.split(cut)[self.rank]
            rows = flat.new_empty(self.size, part.numel())
            yield [self._first.Ialltoallv(whole, _parts(rows, [part.numel()] * self.size))]
            part = torch.empty_like(part) if root >= 0 else part  # other ranks keep their tensors
            _reduce_rows(rows, part, *how)
            if root >= 0:
                yield [self._second.Igatherv(_bytes(part), whole if receives else None, root)]
            else:
                yield [self._second.Iallgatherv(MPI.IN_PLACE, whole)]
        if receives:
            dense.land()

    def all_gather(self, everyones: Sequence[Tensor], tensor: Tensor) -> Steps:
        dense = _Dense(tensor)
        rows = dense.flat.new_empty(self.size, dense.flat.numel())
        yield [self._first.Iallgather(_bytes(dense.flat), _bytes(rows))]
        for output, row in zip(everyones, rows, strict=True):
            output.detach().copy_(row.view(output.shape))

    def all_gather_flat(self, gathered: Tensor, tensor: Tensor) -> Steps:
        whole, mine = _Dense(gathered), _Dense(tensor)
        place = mine.flat.data_ptr() - self.rank * mine.flat.nbytes
        sent = MPI.IN_PLACE if place == whole.flat.data_ptr() else _bytes(mine.flat)
        yield [self._first.Iallgather(sent, _bytes(whole.flat))]
        whole.land()

    def reduce_scatter(self, output: Tensor, everyones: Tensor, how: tuple[str, bool]) -> Steps:
        whole, mine = _Dense(everyones), _Dense(output)
        rows = mine.flat.new_empty(self.size, mine.flat.numel())
        yield [self._first.Ialltoall(_bytes(whole.flat), _bytes(rows))]
        _reduce_rows(rows, mine.flat, *how)
        mine.land()

    def exchange(self, received: Ranked, sent: Ranked) -> Steps:
        """Exchange tensors from rank to rank, which may differ in size."""
        tag = _begun[self.name] % self._tags
        into, out_of = ([(r, _Dense(t)) for r, t in pairs] for pairs in (received, sent))
        requests = [self._second.Irecv(_bytes(d.flat), rank, tag) for rank, d in into]
        requests += [self._second.Isend(_bytes(d.flat), rank, tag) for rank, d in out_of]
        statuses = yield requests
        for (_, dense), status in zip(into, statuses, strict=False):
            dense.land_message(status)

    def send(self, _: Any, rank: int, tag: int, tensor: Tensor) -> Steps:
        dense = _Dense(tensor)
        yield [self._first.Isend(_bytes(dense.flat), rank, tag)]

    def recv(self, work: Any, rank: int, tag: int, tensor: Tensor) -> Steps:
        dense, source = _Dense(tensor), rank if rank >= 0 else MPI.ANY_SOURCE
        [status] = yield [self._first.Irecv(_bytes(dense.flat), source, tag)]
        work.set_source(status.Get_source())
        dense.land_message(status)


def _make(options: Any, _: Any) -> Any:
    """A process group's backend. Collective of its ranks."""
    place, known = (options.group_rank, options.group_size), (_world.rank, _world.size)
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(members) >= _world.size or (not options.global_ranks_in_group and place != known):
        text = "torch.distributed was told rank {} of {}, but MPI says {} of {}: start with mpirun"
        raise ValueError(text.format(*place, *known))
    tag = zlib.crc32(options.group_id.encode()) & 0x7FFF
    group = _Group(_world.Create_group(_world.group.Incl(members), tag), options.group_id, members)
    seconds = options.timeout.total_seconds()
    _backends.append(load().HostBackend(group.rank, group.size, NAME, seconds, group))
    _stores.clear()  # the process group's store is in the same process, and serves the same port
    return _backends[-1]


def _set_variables() -> None:
    """Set the variables that torchrun would have set. Collective of all ranks."""
    node = _world.Split_type(MPI.COMM_TYPE_SHARED)
    place = {"RANK": _world.rank, "WORLD_SIZE": _world.size}
    place |= {"LOCAL_RANK": node.rank, "LOCAL_WORLD_SIZE": node.size}
    if _world.rank == 0:
        host = "127.0.0.1" if node.size == _world.size else socket.gethostname()
        _stores.append(TCPStore(host, 0, None, True, wait_for_workers=False, multi_tenant=True))
        address = {"MASTER_ADDR": host, "MASTER_PORT": _stores[0].port}
    set_missing(place, _world.bcast(address if _world.rank == 0 else None))


def _leave() -> None:
    """End with the others: at once after an exception, otherwise once all have come here."""
    if os.getpid() != _process or MPI.Is_finalized():
        return
    error = getattr(sys, "last_value", None)
    try:
        others = (rank for rank in range(_world.size) if rank != _world.rank and error is None)
        sent = [_notices.isend(_begun, rank) for rank in others]
        while len(_progress.left) < len(sent):
            _progress.hear()
            time.sleep(_LONGEST_NAP)
    except KeyboardInterrupt as interrupt:
        error = interrupt
    if error is not None and _world.size > 1:
        sys.stdout.flush()
        reason = f"fastsync: rank {_world.rank} ends all ranks: {in_words(error)}"
        print(reason, file=sys.stderr, flush=True)
        time.sleep(0.1)  # in which mpirun passes on what has been printed
        _world.Abort(130 if isinstance(error, KeyboardInterrupt) else 1)
    _progress.end()
    for backend in _backends:
        backend.close()


if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise RuntimeError("fastsync.mpi needs an MPI that has begun with MPI_THREAD_MULTIPLE")
if _world.size == 1 and not launched_by_mpi():
    print("fastsync.mpi: no mpirun has started this process: it is rank 0 of 1", file=sys.stderr)
_stores, _backends = list[TCPStore](), list[Any]()
_notices = _world.Dup()
_progress = _Progress(_notices)
_set_variables()
atexit.register(_leave)
dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
