"""One step of a model on tensors without memory: nothing is allocated, whatever its size.

[Note: what is traced]
The model is built and run under torch's FakeTensorMode, on the CPU whatever device it is for: the
CPU's operators keep what those of a GPU keep, attention included, which saves no matrix of scores.
A dispatch mode below autograd sees every operation of forward and backward. It counts the
floating-point operations by torch's own formulas and the bytes of inputs and outputs, and notes
when a storage is allocated and when its last tensor dies. A hook on each parameter notes its
gradient, which leaves the trace there: whether it lives on is the strategy's affair, and replays
decide it.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from fastsync._torch import is_dtensor, tree_map_only
from fastsync._torch.tracing import FakeTensorMode, TorchDispatchMode, tree_leaves
from fastsync.fsdp.group_choice import choose_units
from fastsync.planner.record import ROOT, Allocations, Mark, Record, TracedParam

Loss = Callable[[object, torch.Tensor], torch.Tensor]
_WIDE = torch.float32.itemsize
_CHANNELS = 8  # of a block, at least
_PLAIN = (
    "the planner knows averages over all ranks alone, neither tensor parallelism nor groups: "
    "return the plain model that one rank has, with --gpus as the number of ranks that have the "
    "same one"
)


class TraceError(ValueError):
    """The model, its loss or its optimizer cannot be run on tensors without memory."""


class _Recorder(TorchDispatchMode):
    """Notes every operation, and the life of every storage that it does not know yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[Mark] = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbers: dict[int, int] = {}
        self._next = 0

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of its storage, if that was allocated in the trace."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave these tensors out: their memory is counted elsewhere."""
        for tensor in tensors:
            self._numbers[tensor.untyped_storage()._cdata] = -1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        fresh = [t for t in made if self.number_of(t) is None]
        for tensor in fresh:
            self._note_storage(tensor)
        if fresh or func._schema.is_mutable:
            formula = flop_registry.get(func._overloadpacket)
            work = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            written = made if fresh else tensors[:1]
            moved = sum(t.nbytes for t in tensors) + sum(t.nbytes for t in written)
            self.marks.append(Mark("op", size=float(moved), work=float(work)))
            if held := _scratch_of(func, args):
                self.marks.append(Mark("scratch", size=float(held)))
        return result

    def _note_storage(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return
        number = self._numbers[key] = self._next
        self._next += 1
        self.marks.append(Mark("alloc", number, float(storage.nbytes())))
        self._alive[number] = weakref.ref(storage, partial(self._freed, key, number))

    def _freed(self, key: int, number: int, _: object) -> None:
        self.marks.append(Mark("free", number))
        self._numbers.pop(key, None)
        self._alive.pop(number, None)


class _UnitMarks:
    """Hooks that note when a forward or backward enters a unit or is through with it.

    The unit's modules run one after the other. The marks stand where the engine gathers, frees and
    reduces: see fastsync/fsdp/module_hooks.py.
    """

    def __init__(self, marks: list[Mark], number: int, modules: Sequence[nn.Module]) -> None:
        self._marks, self._number, self._modules = marks, number, frozenset(modules)
        self._missing: set[nn.Module] = set()
        for module in modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward)

    def _mark(self, kind: str, *_: object) -> None:
        self._marks.append(Mark(kind, self._number))

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self._missing:
            return args, kwargs
        self._missing = set(self._modules)
        self._mark("enter")
        result: tuple[Any, Any] = tree_map_only(torch.Tensor, self._marked_end, (args, kwargs))
        return result

    def _marked_end(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        passed = tensor.view_as(tensor)  # its gradient is there when this unit is through with it
        passed.register_hook(partial(self._mark, "through"))
        return passed

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._missing.discard(module)
        if self._missing:
            return
        self._mark("leave")
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._mark, "return"))


def _scratch_of(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes beside the results that oneDNN holds on a CPU while it convolves.

    Both directions compute on copies in blocks of channels: the forward on the weight and the
    input, or the output where few channels come in; the backward first on input and gradient, then
    on the weight's gradient. In 16 bits it adds that up in fp32, beside the other two.
    """
    if func is torch.ops.aten.convolution.default:
        image, weight, _, stride, padding, dilation = args[:6]
        if image.shape[1] % _CHANNELS == 0:
            return int(weight.nbytes + image.nbytes)
        sizes = zip(image.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        each = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        numel = image.shape[0] * weight.shape[0] * math.prod(each)
        return int(weight.nbytes + numel * image.itemsize)
    if func is torch.ops.aten.convolution_backward.default:
        gradient, image, weight = args[:3]
        others = image.nbytes + gradient.nbytes
        narrow = weight.itemsize < _WIDE
        return int(others + _WIDE * weight.numel() if narrow else max(weight.nbytes, others))
    return 0


def units_of(module: nn.Module) -> list[Sequence[nn.Module]]:
    """Return the modules of each unit, by its number; the root's is the first."""
    chosen = choose_units(module, None)
    return [[module], *([each] if isinstance(each, nn.Module) else each for each in chosen)]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers that a model repeats: the outermost ones that a list holds several of.

    A list is an `nn.ModuleList` or `nn.Sequential`; a layer has parameters and parts of its own.
    """
    found: list[nn.Module] = []

    def search(inside: nn.Module) -> None:
        children = list(inside.children())
        lists = isinstance(inside, nn.ModuleList | nn.Sequential)
        kinds = [type(child) for child in children]
        for child in children:
            whole = any(True for _ in child.parameters()) and any(True for _ in child.children())
            is_list = isinstance(child, nn.ModuleList | nn.Sequential)
            if lists and whole and not is_list and kinds.count(type(child)) > 1:
                found.append(child)
            else:
                search(child)

    search(module)
    return found


@contextmanager
def _explained(what: str) -> Iterator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")  # repeats what the error says
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copies of fake tensors have pointers looked at
            yield
    except TraceError:
        raise
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise TraceError(f"{what} cannot be traced: {type(error).__name__}: {first}") from error
    finally:
        log.disabled = before


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    """Return what `build` returns, if it is a model that every rank has.

    Raises:
        TraceError: ranks have different parts of it.
    """
    try:
        module = build()
    except TraceError:
        raise
    except Exception as error:
        if dist.is_initialized() or "process group" in str(error):
            raise TraceError(f"the model needs process groups; {_PLAIN}") from error
        raise
    for name, param in module.named_parameters():
        if is_dtensor(param):
            raise TraceError(f"{name!r} is a DTensor; {_PLAIN}")
    return module


def _without_memory(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return the module with parameters and buffers that are fake and on the CPU; ties are kept.

    Args:
        dtype: of those that hold floating-point numbers, where it is not None.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
            keeps = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if keeps else empty
        return made[id(tensor)]

    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake(tensor)  # type: ignore[assignment]
    return module


def _default_loss(output: object, batch: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy for batches of tokens, else the mean square."""
    for name in ("loss", "logits"):
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            output = value
            break
    leaves = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    if not leaves:
        raise TraceError("the model returns no tensor; name a loss with --loss file.py:function")
    first = leaves[0]
    if first.dim() == 0:
        return first
    if first.dim() == 3 and not batch.is_floating_point() and first.shape[:2] == batch.shape:
        return nn.functional.cross_entropy(first.flatten(0, 1), batch.flatten())
    return first.pow(2).mean()


def _make_batch(module: nn.Module, shape: Sequence[int]) -> torch.Tensor:
    """Return token numbers if the model begins with an embedding, else numbers of its own dtype."""
    kinds = (m for m in module.modules() if any(True for _ in m.parameters(recurse=False)))
    if isinstance(next(kinds, None), nn.Embedding):
        return torch.zeros(tuple(shape), dtype=torch.int64)
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    return torch.zeros(tuple(shape), dtype=dtype)


def trace_model(
    build: Callable[[], nn.Module],
    batch: Sequence[int],
    *,
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
) -> Record:
    """Trace a forward and a backward of what `build` returns.

    Args:
        batch: sizes of the input, samples first. Tokens for a model that begins with an embedding.
        loss: of output and batch. By default a scalar output, an attribute `loss`, next-token
            cross-entropy for token models, else the mean square.
        dtype: that floating-point parameters are converted to.
        checkpointing: recompute each block (`find_blocks`) in the backward.

    Raises:
        TraceError: something in it cannot be run without memory, or nothing is trained.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _explained("the model"):
            module = _without_memory(_built(build), dtype).train()
            given = _make_batch(module, batch)
        blocks = find_blocks(module)
        if checkpointing:
            _checkpoint(blocks)
        trained = {id(p): (n, p) for n, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise TraceError("the model has no parameter that is trained")
        units = units_of(module)
        recorder = _Recorder()
        for number, modules in enumerate(units):
            _UnitMarks(recorder.marks, number, modules)
        hooks = _note_gradients(recorder, [p for _, p in trained.values()])
        held = [*module.parameters(), *module.buffers(), given]
        recorder.ignore(held)
        with _explained("a step of the model"), recorder:
            _step(module, given, loss or _default_loss, recorder)
        del hooks
        return _record(module, units, len(blocks), given, recorder.marks)


def _step(module: nn.Module, batch: torch.Tensor, loss: Loss, recorder: _Recorder) -> None:
    value = loss(module(batch), batch)
    recorder.marks.append(Mark("backward"))
    value.backward()


def _checkpoint(blocks: Sequence[nn.Module]) -> None:
    if not blocks:
        raise TraceError(
            "the model has no repeated blocks in an nn.ModuleList or nn.Sequential, so there is "
            "nothing to checkpoint"
        )
    for block in blocks:
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = again


def _note_gradients(recorder: _Recorder, params: Sequence[torch.Tensor]) -> list[object]:
    def note(index: int, param: torch.Tensor) -> None:
        size = None if param.grad is None else float(param.grad.nbytes)
        param.grad = None  # which frees it, before replays hear of it
        if size is not None:
            recorder.marks.append(Mark("grad", index, size))

    return [
        p.register_post_accumulate_grad_hook(partial(note, index)) for index, p in enumerate(params)
    ]


def _record(
    module: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    blocks: int,
    batch: torch.Tensor,
    marks: Sequence[Mark],
) -> Record:
    numbers: dict[int, int] = {}
    for number, modules in list(enumerate(units))[1:]:  # the first unit that a tied weight is in
        for module_of_unit in modules:
            for param in module_of_unit.parameters():
                numbers.setdefault(id(param), number)
    trained = []
    for label, param in module.named_parameters():
        if param.requires_grad:
            unit = numbers.get(id(param), ROOT)
            trained.append(TracedParam(label, tuple(param.shape), param.dtype, unit))
    tokens = 0 if batch.is_floating_point() else batch.numel()
    return Record(
        model=type(module).__name__,
        params=tuple(trained),
        frozen=sum(p.nbytes for p in module.parameters() if not p.requires_grad),
        buffers=sum(b.nbytes for b in module.buffers()),
        inputs=batch.nbytes,
        samples=batch.shape[0],
        tokens=tokens,
        marks=tuple(marks),
        blocks=blocks,
    )


def trace_optimizer(
    name: str, sizes: Sequence[tuple[tuple[int, ...], torch.dtype]], foreach: bool
) -> Allocations:
    """Trace a step of torch's optimizer `name` on parameters of these shapes.

    Args:
        name: of a class of torch.optim, in any case: adamw, sgd.
        foreach: it steps on all parameters at once, as torch does by default on GPUs.

    Raises:
        TraceError: torch has no such optimizer, or it cannot be traced.
    """
    kinds = {n.lower(): kind for n, kind in vars(torch.optim).items() if isinstance(kind, type)}
    del kinds["optimizer"]  # their base
    if (kind := kinds.get(name.lower())) is None:
        known = ", ".join(each.__name__ for each in kinds.values())
        raise TraceError(f"torch.optim has no optimizer {name!r}; choose one of {known}")
    recorder = _Recorder()
    with FakeTensorMode(), _explained(f"a step of {kind.__name__}"):
        params = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in sizes]
        for param in params:
            param.grad = torch.empty_like(param)
        takes = inspect.signature(kind).parameters
        options: dict[str, Any] = {"foreach": foreach} if "foreach" in takes else {}
        if name.lower() == "sgd":
            options["momentum"] = 0.9
        optimizer = kind(params, lr=1e-3, **options)
        optimizer.step()  # makes the state
        kept = [
            t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor)
        ]
        recorder.ignore([*params, *(p.grad for p in params if p.grad is not None), *kept])
        with recorder:
            optimizer.step()
        return Allocations.of(recorder.marks, sum(t.nbytes for t in kept))
