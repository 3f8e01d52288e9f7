"""Reading GGUF: metadata through ggml's reader, tensor bytes through a memory map, every number checked.

A file is untrusted input.  ggml's reader walks the header (it refuses bad counts, lengths, types, overflows and
offsets); what it leaves open is checked here before anybody uses it: the header counts against the file size, every
tensor's byte range against the file size, every value's type before it is read (ggml aborts the process on a wrong
one).  Whatever does not fit raises :class:`FileError`.  Tokens and merges stay native until asked for.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

from ._native import ffi, lib
from .errors import EngineClosed, FileError
from .ggml.logs import native_log_tail

_HEADER = struct.Struct("<4sIqq")  # magic, version, number of tensors, number of keys
_VERSIONS = (2, 3)
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, number of dimensions, type, offset
_MIN_ALIGNMENT = 8  # the GGUF specification's minimum

TOKENS = "tokenizer.ggml.tokens"
_STRING, _ARRAY = 8, 9
# C types of the integer, boolean and float values, by the file's numbers for them.
_INTEGERS = dict(enumerate(["uint8_t", "int8_t", "uint16_t", "int16_t", "uint32_t", "int32_t"]))
_INTEGERS |= {10: "uint64_t", 11: "int64_t"}
_BOOLS = {7: "int8_t"}
_FLOATS = {6: "float", 12: "double"}
_C_TYPES = _INTEGERS | _BOOLS | _FLOATS


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is ggml's (first varies fastest), without trailing ones; `offset` is from byte 0."""

    name: str
    type: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """One GGUF file, open and mapped; close it or use it in a `with` block.

    `tensors` maps names to :class:`TensorInfo`, `path` and `size` are the file's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map: mmap.mmap | None = None
        self._ctx: Any = None
        try:
            self._map = self._open()
            self.size = len(self._map)
            self._check_header(self._map)
            self._ctx = self._read()
            self._ids = self._read_keys()
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._read_tensors())
            parts = self.integer("split.count", 1, high=2**63 - 1)
            if parts > 1:
                raise self.error("one part of a split file; join the parts first", "split.count", parts, 1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the metadata and unmap the file. Idempotent. The map outlives this while a :meth:`mapping` is held."""
        if self._ctx is not None:
            ffi.release(self._ctx)
            self._ctx = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # somebody holds a mapping(): the map goes when they let go
                pass
            self._map = None

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._ctx is None

    def error(self, reason: str, key: str = "", found: object = None, expected: object = None) -> FileError:
        """A FileError about this file, to be raised."""
        return FileError(self.path, reason, key, found, expected)

    def mapping(self) -> Any:
        """The whole file as a read-only native `char[]`; the memory stays mapped while this object lives."""
        if self._map is None:
            raise EngineClosed(f"{self.path} is closed")
        return ffi.from_buffer(self._map)

    # -- values ------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> tuple[str, ...]:
        """All metadata keys in file order."""
        return tuple(self._ids)

    def __contains__(self, key: str) -> bool:
        return key in self._ids

    def kind(self, key: str) -> str:
        """The type of a value: `u32`, `str`, `[i32]` (an array), ..., or `nothing`."""
        if key not in self._ids:
            return "nothing"
        native, item = self._kinds(key)
        name: str = ffi.string(lib.gguf_type_name(native if item is None else item)).decode()
        return name if item is None else f"[{name}]"

    def length(self, key: str) -> int:
        """Number of elements of an array, 0 if the key is missing or no array."""
        if key not in self._ids or self._kinds(key)[1] is None:
            return 0
        return int(lib.gguf_get_arr_n(self._native(), self._ids[key]))

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer of any width in low..high; without a default the key is required."""
        if default is not None and key not in self._ids:
            return default
        return self._in_range(key, self._scalar(key, _INTEGERS, "an integer"), low, high)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float; integers are taken as well."""
        if default is not None and key not in self._ids:
            return default
        value = float(self._scalar(key, _FLOATS | _INTEGERS, "a number"))
        if not math.isfinite(value):
            raise self.error("not a finite number", key, value, "a finite number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean, also one written as integer 0 or 1."""
        if default is not None and key not in self._ids:
            return default
        return bool(self._in_range(key, self._scalar(key, _BOOLS | _INTEGERS, "a boolean"), 0, 1))

    def text(self, key: str, default: str | None = None) -> str:
        """A string; bytes that are not UTF-8 are replaced."""
        if default is not None and key not in self._ids:
            return default
        if self._required(key, "a string") != (_STRING, None):
            raise self.error("wrong type", key, self.kind(key), "a string")
        return _text(lib.gguf_get_val_str(self._native(), self._ids[key]))

    def integers(self, key: str, *, low: int = 0, high: int = 2**31 - 1) -> tuple[int, ...]:
        """An array of integers, each in low..high."""
        return tuple(self._in_range(key, v, low, high) for v in self._array(key, _INTEGERS, "an array of integers"))

    def flags(self, key: str) -> tuple[bool, ...]:
        """An array of booleans, also written as integers 0 and 1."""
        values = self._array(key, _BOOLS | _INTEGERS, "an array of booleans")
        return tuple(bool(self._in_range(key, v, 0, 1)) for v in values)

    def per_layer(self, key: str, layers: int, default: int | None = None, **limits: int) -> tuple[int, ...]:
        """One integer for each layer, written as an array of that length or as one integer for all."""
        if key in self._ids and self._kinds(key)[1] is not None:
            values = self.integers(key, **limits)
            if len(values) != layers:
                raise self.error("wrong number of layers", key, f"{len(values)} values", f"{layers} values")
            return values
        return (self.integer(key, default, **limits),) * layers

    def string_array(self, key: str) -> list[bytes]:
        """The strings of an array as raw bytes (up to the first NUL of each); for a vocabulary that is many objects."""
        if self._required(key, "an array of strings") != (_ARRAY, _STRING):
            raise self.error("wrong type", key, self.kind(key), "an array of strings")
        context, index, at, string = self._native(), self._ids[key], lib.gguf_get_arr_str, ffi.string
        return [string(at(context, index, i)) for i in range(self.length(key))]

    def digest(self, key: str) -> bytes:
        """A hash of an array of strings: equal for equal arrays."""
        return hashlib.blake2b(b"\0".join(self.string_array(key)), digest_size=16).digest()

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary the file carries, 0 if it carries none."""
        return self.length(TOKENS)

    # -- opening -----------------------------------------------------------------------------------------------

    def _open(self) -> mmap.mmap:
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # before open(): a FIFO would block it
                raise self.error("not a regular file")
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _HEADER.size:
                    raise self.error("truncated header", "", f"{size} bytes", f"at least {_HEADER.size} bytes")
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self.error(f"cannot be opened: {error.strerror or error}") from error
        except ValueError as error:
            if isinstance(error, FileError):
                raise
            raise self.error(f"cannot be opened: {error}") from error

    def _check_header(self, data: mmap.mmap) -> None:
        magic, version, tensors, keys = _HEADER.unpack_from(data)
        if magic != b"GGUF":
            raise self.error("not a GGUF file", "magic", magic, b"GGUF")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            reason = "written for the other byte order" if swapped else "unsupported GGUF version"
            raise self.error(reason, "version", version, "2 or 3")
        room = self.size - _HEADER.size
        for name, count, least in (("tensor count", tensors, _MIN_TENSOR_BYTES), ("key count", keys, _MIN_KEY_BYTES)):
            if not 0 <= count <= room // least:
                raise self.error("impossible count for a file of this size", name, count, f"0..{room // least}")

    def _read(self) -> Any:
        params = ffi.new("struct gguf_init_params *", {"no_alloc": True, "ctx": ffi.NULL})
        native_log_tail()  # drop what others left
        # From the map rather than by name: what is parsed is what is mapped, even if the path changes meanwhile.
        with self.mapping() as data:
            context = lib.gguf_init_from_buffer(data, self.size, params[0])
        if context == ffi.NULL:
            raise self.error(f"header is malformed or truncated: {native_log_tail() or 'no reason given'}")
        return ffi.gc(context, lib.gguf_free)

    def _read_keys(self) -> dict[str, int]:
        return {_text(lib.gguf_get_key(self._ctx, i)): i for i in range(lib.gguf_get_n_kv(self._ctx))}

    def _read_tensors(self) -> dict[str, TensorInfo]:
        alignment = int(lib.gguf_get_alignment(self._ctx))
        if alignment < _MIN_ALIGNMENT:
            expected = f"{_MIN_ALIGNMENT} or more"
            raise self.error("tensors would not be aligned", "general.alignment", alignment, expected)
        start = int(lib.gguf_get_data_offset(self._ctx))
        return {info.name: info for info in (self._tensor(i, start) for i in range(lib.gguf_get_n_tensors(self._ctx)))}

    def _tensor(self, index: int, start: int) -> TensorInfo:
        """Tensor `index` of the file, its dimensions and byte range checked; `start` is where tensor data starts."""
        context = self._ctx
        name = _text(lib.gguf_get_tensor_name(context, index))
        dims = tuple(ffi.unpack(lib.gguf_get_tensor_ne(context, index), 4))
        if min(dims) < 1:
            raise self.error("dimension below one", name, list(dims), "positive dimensions")
        rank = max((d + 1 for d in range(4) if dims[d] > 1), default=1)
        kind = int(lib.gguf_get_tensor_type(context, index))
        offset = start + int(lib.gguf_get_tensor_offset(context, index))
        nbytes = int(lib.gguf_get_tensor_size(context, index))
        if offset + nbytes > self.size:
            reason = "truncated: tensor ends past the end of the file"
            raise self.error(reason, name, offset + nbytes, f"at most {self.size}")
        return TensorInfo(name, kind, _text(lib.ggml_type_name(kind)).upper(), dims[:rank], offset, nbytes)

    # -- typed access ------------------------------------------------------------------------------------------

    def _native(self) -> Any:
        if self._ctx is None:
            raise EngineClosed(f"{self.path} is closed")
        return self._ctx

    def _kinds(self, key: str) -> tuple[int, int | None]:
        """Native type of a value, and of its elements if it is an array."""
        context, index = self._native(), self._ids[key]
        kind = int(lib.gguf_get_kv_type(context, index))
        return kind, int(lib.gguf_get_arr_type(context, index)) if kind == _ARRAY else None

    def _required(self, key: str, expected: str) -> tuple[int, int | None]:
        if key not in self._ids:
            raise self.error("required key is missing", key, "nothing", expected)
        return self._kinds(key)

    def _scalar(self, key: str, accepted: Mapping[int, str], expected: str) -> Any:
        kind, item = self._required(key, expected)
        if item is not None or kind not in accepted:
            raise self.error("wrong type", key, self.kind(key), expected)
        return ffi.cast(f"const {_C_TYPES[kind]} *", lib.gguf_get_val_data(self._native(), self._ids[key]))[0]

    def _array(self, key: str, accepted: Mapping[int, str], expected: str) -> list[Any]:
        item = self._required(key, expected)[1]
        if item is None or item not in accepted:
            raise self.error("wrong type", key, self.kind(key), expected)
        data, count = lib.gguf_get_arr_data(self._native(), self._ids[key]), self.length(key)
        return list(ffi.unpack(ffi.cast(f"const {_C_TYPES[item]} *", data), count)) if count else []

    def _in_range(self, key: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise self.error("out of range", key, value, f"{low}..{high}")
        return value


def _text(native: Any) -> str:
    text: str = ffi.string(native).decode("utf-8", "replace")
    return text
