"""The header of a GGUF file, walked byte by byte: where every value and every tensor lies.

A file is untrusted input. Nothing is believed before it is compared with the bytes that are left and with the caps
below, so no loop runs longer and nothing grows larger than the file bears out. What passes here satisfies ggml's own
reader too, which never sees anything else. Every refusal is a :class:`FileError` that names what and at which byte.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from ._native import ffi, lib
from .errors import FileError

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 12
MAX_STRING_BYTES = 1 << 24
MAX_ELEMENTS = 1 << 22
MAX_NAME_BYTES = 63
MAX_DIMS = 4
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 16  # the first is the specification's
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"

STRING, ARRAY = 8, 9
# struct's codes of the integer, boolean and float values, by the file's numbers for them.
INTEGERS = dict(enumerate("BbHhIi")) | {10: "Q", 11: "q"}
BOOLS = {7: "b"}
FLOATS = {6: "f", 12: "d"}
_CODES = INTEGERS | BOOLS | FLOATS
NUMBERS = {code: struct.Struct(f"<{code}") for code in _CODES.values()}
_NAMES = {0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "str", 10: "u64", 11: "i64",
          12: "f64"}  # fmt: skip

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIXED_BYTES = 4 + 4 + 8 + 8  # magic, version, number of tensors, number of keys
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, number of dimensions, one of them, type, offset

Bytes = bytes | mmap.mmap
Refuse = Callable[[str, str, object, object], FileError]


@dataclass(frozen=True)
class Value:
    """A value in bytes `start`..`end` of the file: of type `kind`, or `count` elements of type `item`, packed."""

    kind: int
    item: int | None
    count: int
    start: int
    end: int

    @property
    def type_name(self) -> str:
        """`u32`, `str`, `[i32]` (an array), ..."""
        return _NAMES[self.kind] if self.item is None else f"[{_NAMES[self.item]}]"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is ggml's (first varies fastest), without trailing ones; `offset` is from byte 0."""

    name: str
    type: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Values by key and tensors by name, both in file order."""

    values: dict[str, Value]
    tensors: dict[str, TensorInfo]


@functools.cache
def _element_type(kind: int) -> tuple[str, int, int] | None:
    """Name, elements and bytes of a block of a tensor type; None for numbers that stand for none (or none any more)."""
    if not 0 <= kind < int(lib.GGML_TYPE_COUNT) or not lib.ggml_blck_size(kind):
        return None
    name: str = ffi.string(lib.ggml_type_name(kind)).decode().upper()
    return name, int(lib.ggml_blck_size(kind)), int(lib.ggml_type_size(kind))


def read_header(data: Bytes, refuse: Refuse) -> Header:
    """Walk `data`, a whole file. `refuse(reason, key, found, expected)` makes the error that is raised."""
    return _Walk(data, refuse).header()


def string_bounds(data: Bytes, value: Value) -> list[tuple[int, int]]:
    """First byte and end of each string of an array of strings that was walked before."""
    bounds, at, read = [], value.start, NUMBERS["Q"].unpack_from
    for _ in range(value.count):
        start = at + 8
        at = start + read(data, at)[0]
        bounds.append((start, at))
    return bounds


class _Walk:
    """A position in the file, and what is read there."""

    def __init__(self, data: Bytes, refuse: Refuse) -> None:
        self._data = data
        self._size = len(data)
        self._refuse = refuse
        self._at = 0

    def header(self) -> Header:
        n_tensors, n_keys = self._counts()
        values: dict[str, Value] = {}
        for i in range(n_keys):
            key = self._name(f"key {i}", MAX_KEY_BYTES)
            if key in values:
                raise self._refuse("duplicate key", key, f"key {i}", "a key that occurs once")
            values[key] = self._value(key)
        return Header(values, self._tensors(n_tensors, self._alignment(values)))

    def _counts(self) -> tuple[int, int]:
        """Tensors and keys, as many as the file has room for."""
        if self._size < _FIXED_BYTES:
            raise self._refuse("truncated header", "", f"{self._size} bytes", f"at least {_FIXED_BYTES} bytes")
        magic = bytes(self._data[:4])
        self._at = 4
        if magic != _MAGIC:
            raise self._refuse("not a GGUF file", "magic", magic, _MAGIC)
        version = self._number("I", "version")
        if version not in _VERSIONS:
            swapped = version and version & 0xFFFF == 0
            reason = "written for the other byte order" if swapped else "unsupported GGUF version"
            raise self._refuse(reason, "version", version, "2 or 3")
        counts, room = [], self._size - _FIXED_BYTES
        limits = (("tensor count", _MIN_TENSOR_BYTES, MAX_TENSORS), ("key count", _MIN_KEY_BYTES, MAX_KEYS))
        for name, least, cap in limits:
            count, most = self._number("q", name), min(room // least, cap)
            if not 0 <= count <= most:
                raise self._refuse("impossible count for a file of this size", name, count, f"0..{most}")
            counts.append(count)
        return counts[0], counts[1]

    # -- values ------------------------------------------------------------------------------------------------

    def _value(self, key: str) -> Value:
        kind, item = self._number("I", key), None
        if kind == ARRAY:
            item = self._number("I", key)
        element = kind if item is None else item
        if element not in _NAMES:
            what = "value type" if item is None else "element type"
            raise self._refuse(f"unknown {what}", key, element, f"one of {', '.join(map(str, _NAMES))}")
        count = 1
        if item is not None:
            count = self._number("Q", key)
            least = 8 if element == STRING else NUMBERS[_CODES[element]].size
            most = min((self._size - self._at) // least, MAX_ELEMENTS)
            if count > most:
                raise self._refuse("array longer than the file has room for", key, count, f"at most {most}")
        start = self._at
        if element == STRING:
            self._skip_strings(count, key)
        else:
            self._skip(count * NUMBERS[_CODES[element]].size, key)
        return Value(kind, item, count, start, self._at)

    def _skip_strings(self, count: int, what: str) -> None:
        """A tight loop: a vocabulary has hundreds of thousands of them."""
        data, read, end, at = self._data, NUMBERS["Q"].unpack_from, self._size - 8, self._at
        for _ in range(count):
            if at > end:
                raise self._cut(what, at, 8)
            (length,) = read(data, at)
            at += 8
            if length > self._size - at or length > MAX_STRING_BYTES:
                most = min(self._size - at, MAX_STRING_BYTES)
                reason = "string longer than the file has room for"
                raise self._refuse(reason, what, f"{length} bytes at {at}", f"at most {most} bytes")
            at += length
        self._at = at

    def _alignment(self, values: dict[str, Value]) -> int:
        value = values.get(ALIGNMENT)
        if value is None:
            return DEFAULT_ALIGNMENT
        if value.type_name != "u32":
            raise self._refuse("wrong type", ALIGNMENT, value.type_name, "u32")
        alignment: int = NUMBERS["I"].unpack_from(self._data, value.start)[0]
        if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            expected = f"a power of two in {MIN_ALIGNMENT}..{MAX_ALIGNMENT}"
            raise self._refuse("tensors would not be aligned", ALIGNMENT, alignment, expected)
        return alignment

    # -- tensors -----------------------------------------------------------------------------------------------

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """Tensors one behind the other, each at the next aligned byte; the last ends within the file."""
        tensors: dict[str, TensorInfo] = {}
        expected = 0
        for i in range(count):
            name = self._name(f"tensor {i}", MAX_NAME_BYTES)
            if name in tensors:
                raise self._refuse("duplicate tensor", name, f"tensor {i}", "a name that occurs once")
            shape, kind = self._shape(name), self._number("I", name)
            type_name, nbytes = self._tensor_bytes(name, shape, kind)
            offset = self._number("Q", name)
            if offset != expected:
                raise self._refuse("wrong tensor offset", name, offset, expected)
            rank = max((d + 1 for d, n in enumerate(shape) if n > 1), default=1)
            tensors[name] = TensorInfo(name, kind, type_name, shape[:rank], offset, nbytes)
            expected += -(-nbytes // alignment) * alignment
        start = -(-self._at // alignment) * alignment
        for name, info in tensors.items():
            placed = tensors[name] = replace(info, offset=start + info.offset)
            if placed.offset + placed.nbytes > self._size:
                reason = "truncated: tensor ends past the end of the file"
                raise self._refuse(reason, name, placed.offset + placed.nbytes, f"at most {self._size}")
        return tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        rank = self._number("I", name)
        if not 1 <= rank <= MAX_DIMS:
            raise self._refuse("number of dimensions", name, rank, f"1..{MAX_DIMS}")
        shape = tuple(self._number("q", name) for _ in range(rank))
        if min(shape) < 1:
            raise self._refuse("dimension below one", name, list(shape), "positive dimensions")
        return shape

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        """Type and size of a tensor's data; exact, since Python's integers do not overflow."""
        element = _element_type(kind)
        if element is None:
            raise self._refuse("unknown tensor type", name, kind, f"a type of 0..{int(lib.GGML_TYPE_COUNT) - 1} in use")
        type_name, per_block, block_bytes = element
        if shape[0] % per_block:
            raise self._refuse("rows are no whole blocks", name, shape[0], f"a multiple of {per_block} for {type_name}")
        nbytes = shape[0] // per_block * block_bytes
        for n in shape[1:]:
            nbytes *= n
        return type_name, nbytes

    # -- bytes -------------------------------------------------------------------------------------------------

    def _name(self, what: str, most: int) -> str:
        """A key or a tensor's name: UTF-8 without NUL, since native code ends a name there."""
        length = self._number("Q", what)
        if not 1 <= length <= most:
            raise self._refuse("length of a name", what, f"{length} bytes at {self._at - 8}", f"1..{most} bytes")
        start = self._at
        self._skip(length, what)
        raw = bytes(self._data[start : self._at])
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = "\0"
        if "\0" in name:
            raise self._refuse("not a name", what, raw, "UTF-8 without NUL")
        return name

    def _number(self, code: str, what: str) -> int:
        start, number = self._at, NUMBERS[code]
        self._skip(number.size, what)
        value: int = number.unpack_from(self._data, start)[0]
        return value

    def _skip(self, n: int, what: str) -> None:
        if n > self._size - self._at:
            raise self._cut(what, self._at, n)
        self._at += n

    def _cut(self, what: str, at: int, n: int) -> FileError:
        return self._refuse("truncated", what, f"{self._size - at} bytes at {at}", f"{n} bytes")
