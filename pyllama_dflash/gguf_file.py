"""Reading GGUF: metadata and tensor places of a file that is mapped, every number checked before it is used.

A file is untrusted input. :mod:`.gguf_header` walks it when it is opened; here every value's type and range is checked
when it is read. Whatever does not fit raises :class:`FileError`. Arrays stay in the file until asked for.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from ._native import ffi
from .errors import EngineClosed, FileError
from .gguf_header import ARRAY, BOOLS, FLOATS, INTEGERS, NUMBERS, STRING, Value, read_header, string_bounds
from .gguf_header import TensorInfo as TensorInfo

TOKENS = "tokenizer.ggml.tokens"


class GGUFFile:
    """One GGUF file, open and mapped; close it or use it in a `with` block.

    `tensors` maps names to :class:`TensorInfo`, `path` and `size` are the file's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map: mmap.mmap | None = None
        try:
            self._map = self._open()
            self.size = len(self._map)
            header = read_header(self._map, self.error)
            self._values = header.values
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)
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
        """Unmap the file. Idempotent. The map outlives this while a :meth:`mapping` is held."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # somebody holds a mapping(): the map goes when they let go
                pass
            self._map = None

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._map is None

    def error(self, reason: str, key: str = "", found: object = None, expected: object = None) -> FileError:
        """A FileError about this file, to be raised."""
        return FileError(self.path, reason, key, found, expected)

    def mapping(self) -> Any:
        """The whole file as a read-only native `char[]`; the memory stays mapped while this object lives."""
        return ffi.from_buffer(self._bytes())

    # -- values ------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> tuple[str, ...]:
        """All metadata keys in file order."""
        return tuple(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def kind(self, key: str) -> str:
        """The type of a value: `u32`, `str`, `[i32]` (an array), ..., or `nothing`."""
        self._bytes()
        return self._values[key].type_name if key in self._values else "nothing"

    def length(self, key: str) -> int:
        """Number of elements of an array, 0 if the key is missing or no array."""
        self._bytes()
        value = self._values.get(key)
        return 0 if value is None or value.item is None else value.count

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer of any width in low..high; without a default the key is required."""
        if default is not None and key not in self._values:
            return default
        return self._in_range(key, self._scalar(key, INTEGERS, "an integer"), low, high)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float; integers are taken as well."""
        if default is not None and key not in self._values:
            return default
        value = float(self._scalar(key, FLOATS | INTEGERS, "a number"))
        if not math.isfinite(value):
            raise self.error("not a finite number", key, value, "a finite number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean, also one written as integer 0 or 1."""
        if default is not None and key not in self._values:
            return default
        return bool(self._in_range(key, self._scalar(key, BOOLS | INTEGERS, "a boolean"), 0, 1))

    def text(self, key: str, default: str | None = None) -> str:
        """A string; bytes that are not UTF-8 are replaced."""
        if default is not None and key not in self._values:
            return default
        value = self._required(key, "a string")
        if value.kind != STRING:
            raise self.error("wrong type", key, value.type_name, "a string")
        return self._bytes()[value.start + 8 : value.end].decode("utf-8", "replace")

    def integers(self, key: str, *, low: int = 0, high: int = 2**31 - 1) -> tuple[int, ...]:
        """An array of integers, each in low..high."""
        return tuple(self._in_range(key, v, low, high) for v in self._array(key, INTEGERS, "an array of integers"))

    def flags(self, key: str) -> tuple[bool, ...]:
        """An array of booleans, also written as integers 0 and 1."""
        values = self._array(key, BOOLS | INTEGERS, "an array of booleans")
        return tuple(bool(self._in_range(key, v, 0, 1)) for v in values)

    def per_layer(self, key: str, layers: int, default: int | None = None, **limits: int) -> tuple[int, ...]:
        """One integer for each layer, written as an array of that length or as one integer for all."""
        if key in self._values and self._values[key].item is not None:
            values = self.integers(key, **limits)
            if len(values) != layers:
                raise self.error("wrong number of layers", key, f"{len(values)} values", f"{layers} values")
            return values
        return (self.integer(key, default, **limits),) * layers

    def string_array(self, key: str) -> list[bytes]:
        """The strings of an array as raw bytes; for a vocabulary that is many objects."""
        data = self._bytes()
        return [data[start:end] for start, end in string_bounds(data, self._strings(key))]

    def digest(self, key: str) -> bytes:
        """A hash of an array of strings: equal for equal arrays."""
        value = self._strings(key)
        return hashlib.blake2b(self._bytes()[value.start : value.end], digest_size=16).digest()

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
                if not size:
                    raise self.error("truncated header", "", "0 bytes", "a GGUF file")  # nothing can be mapped
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self.error(f"cannot be opened: {error.strerror or error}") from error
        except ValueError as error:
            if isinstance(error, FileError):
                raise
            raise self.error(f"cannot be opened: {error}") from error

    # -- typed access ------------------------------------------------------------------------------------------

    def _bytes(self) -> mmap.mmap:
        if self._map is None:
            raise EngineClosed(f"{self.path} is closed")
        return self._map

    def _required(self, key: str, expected: str) -> Value:
        self._bytes()
        if key not in self._values:
            raise self.error("required key is missing", key, "nothing", expected)
        return self._values[key]

    def _scalar(self, key: str, accepted: Mapping[int, str], expected: str) -> Any:
        value = self._required(key, expected)
        if value.kind not in accepted:
            raise self.error("wrong type", key, value.type_name, expected)
        return NUMBERS[accepted[value.kind]].unpack_from(self._bytes(), value.start)[0]

    def _array(self, key: str, accepted: Mapping[int, str], expected: str) -> tuple[Any, ...]:
        value = self._required(key, expected)
        if value.item is None or value.item not in accepted:
            raise self.error("wrong type", key, value.type_name, expected)
        return struct.unpack_from(f"<{value.count}{accepted[value.item]}", self._bytes(), value.start)

    def _strings(self, key: str) -> Value:
        value = self._required(key, "an array of strings")
        if (value.kind, value.item) != (ARRAY, STRING):
            raise self.error("wrong type", key, value.type_name, "an array of strings")
        return value

    def _in_range(self, key: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise self.error("out of range", key, value, f"{low}..{high}")
        return value
