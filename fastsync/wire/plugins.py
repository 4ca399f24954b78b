"""Codecs in C or C++: a shared library with the table of functions in `csrc/codec_plugin.h`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import torch

from fastsync.wire.formats import AnyCodec, Codec

_VERSION: Final = 1
_ENTRY: Final = "fastsync_codec_entry"
_FORMS: Final = ("two_shot", "gather")

_CodedBytes = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
_Encode = ctypes.CFUNCTYPE(
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
)
_Decode = _Encode


class _Table(ctypes.Structure):
    """The C struct `fastsync_codec`."""

    _fields_ = (
        ("version", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("error_feedback", ctypes.c_int32),
        ("whole", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("coded_bytes", _CodedBytes),
        ("encode", _Encode),
        ("decode", _Decode),
    )


class PluginCodec(Codec):
    """A codec from a shared library, as `load_codec` returns it. For gradients on the CPU.

    The engine calls the library's functions without Python; the methods here serve to try the codec
    on a tensor.

    Attributes:
        path: path of the library.
        address: address of the table.
    """

    def __init__(self, path: Path, library: ctypes.CDLL, table: _Table) -> None:
        self.path = path
        self._library = library
        self._table = table
        self.address = ctypes.addressof(table)
        self.name = table.name.decode()
        self.block = int(table.block)
        self.form = _FORMS[table.form]
        self.error_feedback = bool(table.error_feedback)
        self.whole = bool(table.whole)

    def coded_bytes(self, numel: int) -> int:
        return int(self._table.coded_bytes(self._table.context, numel))

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Encode as `Codec.encode` does.

        Raises:
            ValueError: the tensors are not contiguous on the CPU, fp32 and uint8.
            RuntimeError: the library reports an error.
        """
        self._call("encode", values, payload)

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Decode as `Codec.decode` does; raises like `encode`."""
        self._call("decode", payload, values)

    def _call(self, what: str, source: torch.Tensor, target: torch.Tensor) -> None:
        dtypes = {source.dtype, target.dtype}
        on_host = source.device.type == target.device.type == "cpu"
        if not on_host or dtypes != {torch.float32, torch.uint8}:
            raise ValueError(f"{self.name} works on fp32 and uint8 tensors on the CPU")
        if not (source.is_contiguous() and target.is_contiguous()):
            raise ValueError(f"{self.name} works on contiguous tensors")
        error = getattr(self._table, what)(
            self._table.context,
            source.data_ptr(),
            source.numel(),
            target.data_ptr(),
            target.numel(),
        )
        if error:
            text = error.decode(errors="replace")
            raise RuntimeError(f"the codec {self.name} failed to {what}: {text}")


def load_codec(path: str | os.PathLike[str]) -> PluginCodec:
    """A codec from a shared library, for `wire=` or `register_codec`.

    See `docs/wire.md`. The library stays loaded. Each rank loads its own copy; they must
    be the same.

    Args:
        path: the library, built against `codec_plugin.h` in `fastsync.include_dir()`.

    Raises:
        OSError: the file is not there, or is no library that can be loaded.
        ValueError: it is no codec, one for another fastsync, or its table makes no sense.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise OSError(f"no codec library at {file}")
    library = ctypes.CDLL(str(file))
    try:
        entry = getattr(library, _ENTRY)
    except AttributeError:
        raise ValueError(
            f"{file} exports no {_ENTRY}(); include codec_plugin.h and define FASTSYNC_CODEC_ENTRY"
        ) from None
    entry.restype = ctypes.POINTER(_Table)
    pointer = entry()
    if not pointer:
        raise ValueError(f"{_ENTRY}() of {file} returned NULL instead of a table")
    _check(file, pointer.contents)
    return PluginCodec(file, library, pointer.contents)


def check_device(codec: AnyCodec, name: str, device: torch.device) -> None:
    """Raise ValueError where a library's codec is asked to carry parameter `name` on `device`."""
    if isinstance(codec, PluginCodec) and device.type != "cpu":
        raise ValueError(
            f"parameter {name!r} is on {device}, but {codec.name} comes from {codec.path} and "
            "works on the CPU only; write it as a fastsync.Codec with torch's operations, or "
            "choose another wire"
        )


def _check(file: Path, table: _Table) -> None:
    if table.version != _VERSION:
        raise ValueError(
            f"{file} was built for version {table.version} of fastsync's codec table, but this is "
            f"version {_VERSION}; compile it against codec_plugin.h in fastsync.include_dir()"
        )
    missing = [
        name for name in ("name", "coded_bytes", "encode", "decode") if not _is_set(table, name)
    ]
    if missing:
        raise ValueError(f"the codec table of {file} lacks {', '.join(missing)}")
    if not 0 <= table.form < len(_FORMS):
        raise ValueError(f"the codec table of {file} has the unknown form {table.form}")
    if table.block < 1:
        raise ValueError(f"the codec table of {file} has a block of {table.block}; 1 or more")
    if table.whole and _FORMS[table.form] != "gather":
        raise ValueError(f"the codec of {file} codes whole buckets, so its form must be gather")


def _is_set(table: _Table, name: str) -> bool:
    return bool(getattr(table, name))
