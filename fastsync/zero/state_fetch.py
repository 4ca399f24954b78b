"""An optimizer's state of whole parameters, fetched from the ranks that own the parts.

Those need not call anything. A rank that saves is between two steps, so the others cannot complete
another one: they wait in a barrier or in their next backward, load data, or have come to the end of
their scripts. Meanwhile a thread of each sends what it owns: fastsync/faults/state_server.py. If
every rank fetches, each sends its part to all, as in an all-gather.

[Note: which state]
Each rank counts the changes of its state that have been completed: steps, and `load_state_dict()`.
The numbers are the same on all ranks, since every rank makes the same calls in the same order. A
rank that fetches sends its number. A rank that has completed fewer changes lets it wait; one that
has started another refuses, and one that is being read starts no other. If every rank fetches, one
may be ahead and could start the next change without the others: a step whose gradients have already
arrived, or a load_state_dict(). So a rank that has fetched asks the others to tell it when they
reach their next change, and then starts its own. A write of the script to `optimizer.state` makes
no version, but is counted and waited for, too: it is the next change of a rank that reaches it, and
a rank that fetches after it waits for those that have not written as much.

Tensors travel as bytes, from the memory of one rank to the place in the whole parameter's state on
the other.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fastsync._build.env import Env
from fastsync._torch import Store, group_store
from fastsync.faults.rendezvous import needing_store
from fastsync.faults.state_server import Answer, Call, Server, open_server
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer.monitor import answer_of, explain_end, looker, number_of
from fastsync.reducer.state_transfer import populate
from fastsync.zero.flat_buffer import FlatBuffer, is_dense
from fastsync.zero.optimizer_state import held_state
from fastsync.zero.partition import Partition, Slice
from fastsync.zero.slices import MASTER, Spec, State, Whole, is_plain

_AHEAD = 256  # connections to ranks that are still to be read
_LARGE = 1 << 16  # bytes from which on a tensor is sent by itself
_TOGETHER = 1 << 20  # bytes of small tensors that are sent at once
_POPULATED = 1 << 20  # bytes from which on the pages of a tensor are found ahead
_STAGED = 1 << 25  # bytes of device memory that are copied at once
_PLACE = "the fetching of an optimizer's state"
_CHANGE = "the next change of an optimizer's state"
_NOT_YET = "it has not come to its next change yet"
_LOOKS = 1.0  # seconds between two looks at ranks that are waited for
# The states of pieces, with the number of the buffer of each.
Parts = Sequence[tuple[int, Slice, State]]


class Gate:
    """Keeps an optimizer's state as it is while other ranks read it. See [Note: which state].

    Attributes:
        version: number of completed changes.
        arrived: the change that this rank has come to last, and may not have begun: the version
            that it makes, and how many values the script has written to that.
        moving: to be held while entries of the state are elsewhere for a moment.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._readers, self.version, self.arrived = 0, 0, (0, 0)
        self._written = self._writes = 0
        self._changing = False
        self._done: Any = None  # event of the device's stream after the last change
        self.moving = threading.Lock()

    @property
    def changing(self) -> bool:
        """Return whether a change has begun that has not been completed."""
        return self._changing

    def arrive(self) -> None:
        """Reach a change, and notify waiting threads."""
        with self._turn:
            self.arrived = (self.version + 1, 0)
            self._turn.notify_all()

    @property
    def stands(self) -> tuple[int, int]:
        """Return the version, and how many values have been written to it."""
        return self.version, self._written

    def arrive_to_write(self) -> None:
        """Reach the writing of a value between two changes, and notify waiting threads."""
        with self._turn:
            self.arrived = max(self.arrived, (self.version, self._written + 1))
            self._turn.notify_all()

    def begin_write(self) -> None:
        """Begin it, once no rank reads any more. Writes may be nested."""
        with self._turn:
            self._turn.wait_for(lambda: not self._readers)
            self._writes += 1

    def end_write(self) -> None:
        """Complete it."""
        with self._turn:
            self._writes -= 1
            self._written += 1
            self._turn.notify_all()

    def await_arrival(self, change: tuple[int, int], timeout: float) -> None:
        """Return once this rank has come to a change.

        Raises:
            RuntimeError: it has not within `timeout` seconds.
        """
        with self._turn:
            if not self._turn.wait_for(lambda: self.arrived >= change, timeout):
                raise RuntimeError(_NOT_YET)

    def begin(self) -> None:
        """Begin a change, once no rank reads any more."""
        self.arrive()
        with self._turn:
            self._changing = True
            self._turn.wait_for(lambda: not self._readers)

    def end(self, device: torch.device) -> None:
        """Complete it.

        Args:
            device: on whose current stream it has been made.
        """
        done = None
        if device.type != "cpu":
            done = torch.get_device_module(device).Event()
            done.record()
        with self._turn:
            self._changing, self._done = False, done
            self.version, self._written = self.version + 1, 0
            self._turn.notify_all()

    @contextmanager
    def reading(self, version: int, written: int, timeout: float) -> Iterator[Any]:
        """Wait for a version with so many values written to it, and keep it.

        Yields:
            The event after which it is there; None on a CPU.

        Raises:
            RuntimeError: it does not come, or has gone.
        """
        with self._turn:
            wanted = (version, written)
            self._turn.wait_for(lambda: self.stands >= wanted and not self._writes, timeout)
            if self.version == version and self._written < written:
                raise RuntimeError(
                    f"it has not written as many values to optimizer.state within {timeout:g} s: "
                    f"{self._written}, and not {written}. Write them on every rank"
                )
            if self.version < version:
                raise RuntimeError(
                    f"it has not come so far within {timeout:g} s: it has changed the state "
                    f"{self.version} times, and not {version} times. Call step() and "
                    "load_state_dict() on every rank"
                )
            if self.stands > wanted or self._changing or self._writes:
                raise RuntimeError(
                    "it has gone on to change the state, without having to wait for this rank. "
                    "Have the other ranks wait in torch.distributed.barrier() until this one has "
                    "the state, or call optimizer.state_dict() on every rank"
                )
            self._readers += 1
            done = self._done
        try:
            yield done
        finally:
            with self._turn:
                self._readers -= 1
                self._turn.notify_all()


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    order = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
    return (torch.view_as_real(order).flatten() if order.is_complex() else order).view(torch.uint8)


def _memory(flat: torch.Tensor) -> memoryview:
    """Return the memory of bytes on the CPU."""
    array: Any = flat.numpy()  # numpy's annotations hide that it is a buffer before Python 3.12
    return memoryview(array)


def _packed(parts: Parts) -> tuple[bytes, list[torch.Tensor]]:
    """Return a head that has a `Spec` in place of each plain tensor, and these tensors."""
    tensors: list[torch.Tensor] = []
    packed = []
    for number, piece, state in parts:
        values = dict(state)
        for name, value in state.items():
            if is_plain(value):
                tensor = value.detach() if is_dense(value) else value.detach().contiguous()
                spec = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_cpu)
                values[name] = Spec(*spec)
                tensors.append(tensor)
        packed.append((number, piece, values))
    return pickle.dumps(packed), tensors


def _views(tensors: Iterable[torch.Tensor], done: Any) -> Iterator[memoryview]:
    """Yield the bytes of tensors, small ones together.

    Args:
        done: event after which they may be read, if they are on a device.
    """
    small = bytearray()
    for view in _each_view(tensors, done):
        if len(view) < _LARGE:
            small += view
        if small and (len(view) >= _LARGE or len(small) >= _TOGETHER):
            yield memoryview(small)
            small = bytearray()
        if len(view) >= _LARGE:
            yield view
    yield memoryview(small)


def _each_view(tensors: Iterable[torch.Tensor], done: Any) -> Iterator[memoryview]:
    stream = None
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        flat = _flat(tensor)
        if tensor.is_cpu:
            yield _memory(flat)
            continue
        module = torch.get_device_module(tensor.device)
        if stream is None:  # not the one that computes, which may wait for the rank that asks
            stream = module.Stream(tensor.device)
            if done is not None:
                stream.wait_event(done)
        host = torch.empty(min(flat.numel(), _STAGED), dtype=torch.uint8, device="cpu")
        for part in flat.split(_STAGED):
            with module.stream(stream):
                host[: part.numel()].copy_(part)
            yield _memory(host[: part.numel()])


class Others:
    """The ranks that share optimizers' state, as this rank asks them.

    Args:
        group: of the ranks.
        name: of what they share; equal on all ranks.
        former: name of the group that this one replaces.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, former: str = "") -> None:
        self.group, self.name = group, name
        self.server: Server | None = None
        self._store = group_store(group) if group.size() > 1 else None
        if self._store is not None:
            with needing_store(group, "the address of this rank"):
                self._publish(self._store, former)

    def _publish(self, store: Store, former: str) -> None:
        try:
            self.server = open_server(store, Env.read().lost_after)
            address = self.server.address
            self.server.expect(self.group, store, former)
        except OSError as error:  # which a rank that asks raises
            address = f"it cannot listen ({error})"
        store.set(f"{self.name}/serves/{self.group.rank()}", address)

    def name_of(self, number: int) -> str:
        """Return what the optimizer of a number is called when it is asked for."""
        return f"{self.name}/{number}"

    def call(self, rank: int) -> Call:
        """Connect with a rank.

        Raises:
            OSError: it cannot be reached.
            RuntimeError: the ranks have no store.
        """
        if self._store is None:
            raise RuntimeError(
                "the state of this optimizer is spread over ranks of a process group that "
                "torch.distributed did not make, so they cannot find each other"
            )
        with needing_store(self.group, "the addresses of the other ranks"):
            address = self._store.get(f"{self.name}/serves/{rank}").decode()
        if not address.startswith("["):
            raise OSError(address)
        return Call(address, Env.read().lost_after, partial(answer_of, self.group, _PLACE, rank))


class StateShards:
    """This rank's part of one optimizer's state, for itself and for the ranks that ask.

    It is kept for a while after the optimizer has died, so it keeps neither that nor the model
    alive.

    Attributes:
        gate: says when others may read.
        aside: entries of the state while torch has that of whole parameters in their place.
        loading: `load_state_dict()` has been called, and not come to its end.
        stepped: masters that the optimizer has stepped on.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.gate = Gate()
        self.aside: dict[torch.Tensor, State] = {}
        self.loading = False
        self.stepped: set[torch.Tensor] = set()
        self._optimizer = weakref.ref(optimizer)
        self._state: Mapping[torch.Tensor, State] = held_state(optimizer)
        self._partition = Partition((), 0)
        self._held: list[tuple[int, Slice, torch.Tensor, Mapping[Slice, torch.Tensor]]] = []
        self._server: Server | None = None
        self._name = self._group = ""

    def use(self, partition: Partition, buffers: Sequence[FlatBuffer]) -> None:
        """Hold this rank's pieces of these buffers from now on."""
        self._partition = partition
        self.stepped = set()
        self._held = [
            (number, piece, tensor, buffer.loaded)
            for number, buffer in enumerate(buffers)
            for piece, tensor in buffer.owned.items()
        ]

    def serve(self, others: Others, number: int) -> None:
        """Let other ranks ask, by the number of the optimizer."""
        self._server, self._group = others.server, others.group.group_name
        self._name = others.name_of(number)
        if self._server is not None:
            self._server.serve(self._name, self)

    def outlive(self) -> None:
        """Keep answering other ranks for a while after the optimizer has died."""
        if self._server is not None:
            self._server.outlive(self._name, self, self._group)

    def end_change(self, optimizer: Optimizer, device: torch.device) -> None:
        """Complete what `gate.begin()` has begun: a step, or the loading of a state."""
        self._state, self.loading = held_state(optimizer), False
        self.gate.end(device)

    def saved(
        self,
        tensor: torch.Tensor,
        loaded: torch.Tensor | None,
        states: Mapping[torch.Tensor, State],
    ) -> State:
        """Return a piece's state as in checkpoints: with its master, once that was stepped on.

        Args:
            loaded: a master that has been loaded since the last step.
            states: those of the optimizer. It must not find the master there: many take a state
                that is not empty for one that they have made.
        """
        state: State = self.aside.get(tensor) or states.get(tensor, {})
        master = tensor.detach() if tensor in self.stepped else loaded
        return state if master is None else {**state, MASTER: master}

    def parts(self, share: int) -> Parts:
        """Return the states of the pieces of a share."""
        optimizer = self._optimizer()
        states = self._state if optimizer is None else held_state(optimizer)
        if self.loading and states is not self._state:
            raise RuntimeError("it is in optimizer.load_state_dict(); call that on every rank")
        return [
            (number, piece, state)
            for number, piece, tensor, loaded in self._held
            if piece.rank == share and (state := self.saved(tensor, loaded.get(piece), states))
        ]

    @contextmanager
    def answer(self, request: Mapping[str, Any]) -> Iterator[Answer]:
        """See `Served`. `request` is what `fetch_whole` or `await_others` sends."""
        if "change" in request:
            version, written = request["change"]
            self.gate.await_arrival((version, written), request["seconds"])
            yield Answer(b"", ())
            return
        version, written = request["stands"]
        with self.gate.reading(version, written, Env.read().agree_timeout) as done:
            if request["ranks"] != list(self._partition.ranks):
                raise RuntimeError("it shares the state with other ranks now")
            with self.gate.moving:
                parts = self.parts(request["share"])
            head, tensors = _packed(parts)
            yield Answer(head, _views(tensors, done))


def fetch_whole(
    buffers: Sequence[FlatBuffer],
    partition: Partition,
    own: StateShards,
    others: Others,
    number: int,
) -> dict[torch.Tensor, State]:
    """Return the states of whole parameters; nothing of those that have none. Not collective.

    Args:
        partition: the ranks that share the state.
        own: what this rank has.
        others: to be asked for the other shares.
        number: of the optimizer.

    Raises:
        SyncFault: a rank has ended, and with it the only copy of its share, or is stopped.
        RuntimeError: a rank does not have that version.
        ValueError: a value belongs to no elements, and parts of a parameter differ in it.
    """
    whole, request = Whole(buffers), {"name": others.name_of(number), "stands": own.gate.stands}
    left = deque(share for share in range(partition.size) if share not in partition.kept)
    holders: deque[_Holder] = deque()
    with ExitStack() as stack:

        def connect() -> None:
            while left and len(holders) < _AHEAD:
                holders.append(_Holder(left.popleft(), partition, others, request))
                stack.callback(holders[-1].close)

        connect()
        for share in partition.kept:
            for buffer, piece, state in own.parts(share):
                whole.add(buffer, piece, state)
        copied = stack.enter_context(ThreadPoolExecutor(1)).submit(whole.copy_own)
        while holders:
            holders.popleft().read(whole)
            connect()
        copied.result()
        return whole.finished()


def await_others(partition: Partition, own: StateShards, others: Others, number: int) -> None:
    """Return once the other ranks have come to the change that this one has come to.

    One that has nothing to answer with, or has ended, is not waited for.

    Args:
        partition, own, others, number: see `fetch_whole`.

    Raises:
        SyncFault: a rank has ended, or is stopped.
    """
    request = {"name": others.name_of(number), "change": own.gate.arrived, "seconds": _LOOKS}
    end = time.monotonic() + Env.read().agree_timeout
    for share in range(partition.size):
        late = number_of(others.group, share)
        look = looker(others.group, f"{_CHANGE}, which rank {late} has not reached")
        while share != partition.mine and not _has_arrived(share, others, request):
            look()
            if time.monotonic() > end:
                return


def _has_arrived(share: int, others: Others, request: dict[str, Any]) -> bool:
    try:
        call = others.call(share)
        try:
            call.ask(request)
        finally:
            call.close()
    except OSError:
        return True
    except SyncFault:
        raise
    except RuntimeError as error:
        return str(error) != _NOT_YET
    return True


class _Holder:
    """A rank that holds a share, with which this one is connected; the next one if it has ended.

    Args:
        share: which.
        partition, others, request: see `fetch_whole`.
    """

    def __init__(
        self, share: int, partition: Partition, others: Others, request: Mapping[str, Any]
    ) -> None:
        self._share, self._others = share, others
        self._request = {**request, "share": share, "ranks": list(partition.ranks)}
        self._ranks = [share, (share + 1) % partition.size] if partition.doubled else [share]
        self._call: Call | None = None
        self._connect(None)

    def _connect(self, failed: OSError | None) -> None:
        """Connect with the next rank that holds the share, where one has `failed`."""
        while self._call is None:
            if failed is not None:
                self._ranks.pop(0)
            try:
                self._call = self._others.call(self._ranks[0])
            except OSError as error:
                failed = error
                if len(self._ranks) == 1:
                    raise self._fault(error) from error

    def read(self, whole: Whole) -> None:
        """Read the share."""
        while self._call is not None:
            try:
                parts = pickle.loads(self._call.ask(self._request))
                targets = [target for part in parts for target in whole.add(*part)]
                populate([_flat(t) for t in targets if t.is_cpu and t.nbytes >= _POPULATED])
                for target in targets:
                    _fill(self._call, target)
                self.close()
            except OSError as error:
                self.close()
                if len(self._ranks) == 1:
                    raise self._fault(error) from error
                self._connect(error)
            except SyncFault:
                raise
            except RuntimeError as error:
                group = self._others.group
                me, it = number_of(group), number_of(group, self._ranks[0])
                raise RuntimeError(
                    f"rank {me} asks rank {it} for its share of an optimizer's state, but {error}"
                ) from error

    def _fault(self, error: OSError) -> SyncFault:
        group = self._others.group
        rank = number_of(group, self._ranks[0])
        text = f"rank {rank} does not answer: {error}"
        if isinstance(error, ConnectionRefusedError):
            text += (
                ". If its script has come to its end, have it wait there in "
                "torch.distributed.barrier() until this rank has saved"
            )
        explain_end(group, _PLACE, self._ranks[0], text)
        return SyncFault(
            f"fastsync: rank {number_of(group)} asks rank {rank} for its share of an optimizer's "
            f"state, but {text}",
            [rank],
        )

    def close(self) -> None:
        if self._call is not None:
            self._call.close()
            self._call = None


def _fill(call: Call, target: torch.Tensor) -> None:
    if target.numel() == 0:
        return
    flat = _flat(target)
    if target.is_cpu:
        call.fill(_memory(flat))
        return
    host = torch.empty(min(flat.numel(), _STAGED), dtype=torch.uint8, device="cpu")
    for part in flat.split(_STAGED):
        call.fill(_memory(host[: part.numel()]))
        part.copy_(host[: part.numel()])
