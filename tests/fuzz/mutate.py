"""Valid GGUF files taken apart, damaged in one or a few places, and put together again.

Most damage keeps the rest consistent (counts, offsets), so that it gets past the header and meets the checks behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

import gguf
from gguf_bytes import ARR, PACKED, STR

from pyllama_dflash.gguf_header import Value, read_header, string_bounds

_NUMBERS = (
    0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 255, 256, 257, 512, 513, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**60, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
_STRINGS = (
    b"", b"\0", b"a\0b", b"\xff\xfe", b" ", b"a b", b"%s%n", b"<0x-1>", b"<0x00>", b"llama", b"qwen2", b"dflash",
    b"qwen35", b"clip", b"phi-3", b"none", b"x" * 300, b"{{ x }}", b"unused",
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """A key and its value. `items` are packed numbers, or the bytes of strings; `claim` is a length that is a lie."""

    name: bytes
    kind: int
    item: int | None
    items: tuple[bytes, ...]
    claim: int | None = None

    @functools.cached_property
    def raw(self) -> bytes:
        """As it stands in a file."""
        kind = self.kind if self.item is None else self.item
        items = [struct.pack("<Q", len(item)) + item for item in self.items] if kind == STR else self.items
        length = b"" if self.item is None else struct.pack("<iQ", self.item, self.length)
        return _name(self.name) + struct.pack("<i", self.kind) + length + b"".join(items)

    @property
    def length(self) -> int:
        """The number of elements that the file claims."""
        return len(self.items) if self.claim is None else self.claim


@dataclass(frozen=True)
class Tensor:
    """A tensor and its data; `offset` is where it says that they are, if that is a lie."""

    name: bytes
    dims: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Parts:
    """A whole file."""

    keys: list[Key]
    tensors: list[Tensor]
    alignment: int = 32

    def copy(self) -> Parts:
        """Another file with the same parts."""
        return Parts(list(self.keys), list(self.tensors), self.alignment)

    def join(self) -> tuple[bytes, int]:
        """The file, and the length of its header."""
        infos, data, at = [], [], 0
        for t in self.tensors:
            dims = struct.pack(f"<I{len(t.dims)}Q", len(t.dims), *t.dims)
            infos.append(_name(t.name) + dims + struct.pack("<IQ", t.kind, at if t.offset is None else t.offset))
            data += [t.data, bytes(-len(t.data) % self.alignment)]
            at += len(t.data) + -len(t.data) % self.alignment
        counts = struct.pack("<4sIqq", b"GGUF", 3, len(self.tensors), len(self.keys))
        header = b"".join([counts, *(key.raw for key in self.keys), *infos])
        return b"".join([header, bytes(-len(header) % self.alignment), *data]), len(header)


def take_apart(content: bytes) -> Parts:
    """The parts of a valid file without an alignment of its own."""
    header = read_header(content, lambda *reason: ValueError(*reason))
    keys = [Key(name.encode(), v.kind, v.item, _items(content, v)) for name, v in header.values.items()]
    tensors = [
        Tensor(t.name.encode(), t.shape, t.type, content[t.offset : t.offset + t.nbytes])
        for t in header.tensors.values()
    ]
    return Parts(keys, tensors)


def _items(content: bytes, value: Value) -> tuple[bytes, ...]:
    kind = value.kind if value.item is None else value.item
    if kind == STR:
        return tuple(content[start:end] for start, end in string_bounds(content, value))
    size = struct.calcsize(PACKED[kind])
    return tuple(content[at : at + size] for at in range(value.start, value.end, size))


def _name(name: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name


# -- keys ----------------------------------------------------------------------------------------------------------


def _some_item(r: random.Random, kind: int, old: bytes) -> bytes:
    """Another element of a type: at the edge of something, near the old one, or any."""
    if kind == STR:
        how = r.randrange(4)
        if how == 0 or not old:
            return r.choice(_STRINGS)
        at = r.randrange(len(old))
        return (old[:at] + bytes([r.randrange(256)]) + old[at + 1 :], old[:at], old + old)[how - 1]
    code = PACKED[kind]
    if code in "fd":
        return struct.pack("<" + code, r.choice(_FLOATS))
    size = struct.calcsize(code)
    number = r.choice(_NUMBERS) if r.random() < 0.6 else int.from_bytes(old, "little") + r.randint(-2, 2)
    return (number % (1 << 8 * size)).to_bytes(size, "little")


def _change_value(r: random.Random, p: Parts) -> None:
    i, key = _any(r, p.keys)
    kind, items = key.kind if key.item is None else key.item, list(key.items)
    if not items or kind not in (*PACKED, STR):
        return
    for _ in range(r.choice((1, 1, 1, 3))):
        at = r.randrange(len(items))
        items[at] = _some_item(r, kind, items[at])
    p.keys[i] = dataclasses.replace(key, items=tuple(items))


def _change_length(r: random.Random, p: Parts) -> None:
    i, key = _any(r, p.keys)
    if key.item is None:
        return
    how = r.randrange(5)
    items, claim = key.items, None
    if how == 0:
        items = items[:-1]
    elif how == 1:
        items = items[: r.randrange(len(items) + 1)]
    elif how == 2:
        items += items[-1:]
    elif how == 3 and items:
        at = r.randrange(len(items))
        items = (*items[:at], r.choice(items), *items[at + 1 :])
    else:
        claim = r.choice((*_NUMBERS, len(items) + 1, max(0, len(items) - 1)))
    p.keys[i] = dataclasses.replace(key, items=items, claim=claim)


def _change_kind(r: random.Random, p: Parts) -> None:
    """Another type for the same bytes, or for one that fits it."""
    i, key = _any(r, p.keys)
    kind = r.choice((*PACKED, STR, ARR, 13, 77, 2**31 - 1))
    if r.random() < 0.3 or kind not in (*PACKED, STR):
        changed = dataclasses.replace(key, kind=kind) if key.item is None else dataclasses.replace(key, item=kind)
    else:
        blank = b"" if kind == STR else bytes(struct.calcsize(PACKED[kind]))
        items = tuple(_some_item(r, kind, blank) for _ in key.items)
        changed = (
            Key(key.name, kind, None, items[:1] or (blank,)) if r.random() < 0.5 else Key(key.name, ARR, kind, items)
        )
    p.keys[i] = changed


def _rename_key(r: random.Random, p: Parts) -> None:
    i, key = _any(r, p.keys)
    name = r.choice((_some_item(r, STR, key.name), _any(r, p.keys)[1].name, b"general.alignment", b"split.count"))
    p.keys[i] = dataclasses.replace(key, name=name)


def _move_key(r: random.Random, p: Parts) -> None:
    i, key = _any(r, p.keys)
    how = r.randrange(3)
    if how == 0:
        del p.keys[i]
    elif how == 1:
        p.keys.insert(r.randrange(len(p.keys)), key)
    else:
        j, other = _any(r, p.keys)
        p.keys[i] = dataclasses.replace(other, name=key.name)
        p.keys[j] = dataclasses.replace(key, name=other.name)


# -- tensors -------------------------------------------------------------------------------------------------------


def _change_shape(r: random.Random, p: Parts) -> None:
    i, t = _any(r, p.tensors)
    dims = list(t.dims)
    how, at = r.randrange(4), r.randrange(len(dims))
    if how == 0:
        dims[at] = r.choice(_NUMBERS)
    elif how == 1:
        dims[at] = max(0, dims[at] + r.choice((-32, -1, 1, 32)))
    elif how == 2:
        dims.insert(at, r.choice((0, 1, 1, 2, 2**32)))
    else:
        r.shuffle(dims)
    changed = dataclasses.replace(t, dims=tuple(dims))
    p.tensors[i] = _fitted(changed) if r.random() < 0.6 else changed


def _change_tensor(r: random.Random, p: Parts) -> None:
    i, t = _any(r, p.tensors)
    how = r.randrange(6)
    if how == 0:
        changed = dataclasses.replace(t, kind=r.choice((*range(45), 2**31, 2**32 - 1)))
        p.tensors[i] = _fitted(changed) if r.random() < 0.6 else changed
    elif how == 1:
        name = r.choice((_some_item(r, STR, t.name), _any(r, p.tensors)[1].name, b"n" * 64, b"d2t"))
        p.tensors[i] = dataclasses.replace(t, name=name)
    elif how == 2:
        p.tensors[i] = dataclasses.replace(t, offset=r.choice(_NUMBERS))
    elif how == 3:
        del p.tensors[i]
    elif how == 4:
        p.tensors.insert(r.randrange(len(p.tensors)), t)
    else:
        p.tensors[i] = dataclasses.replace(t, data=t.data[: r.randrange(len(t.data) + 1)])


def _fitted(t: Tensor) -> Tensor:
    """The tensor with as much data as its shape and type ask for, where that is a size and no megabytes."""
    per_block, block = gguf.GGML_QUANT_SIZES.get(t.kind, (1, 0))
    nbytes = math.prod(t.dims) // per_block * block
    if t.dims[0] % per_block or not t.data or not 0 < nbytes <= 1 << 20:
        return t
    return dataclasses.replace(t, data=(t.data * -(-nbytes // len(t.data)))[:nbytes])


def _change_data(r: random.Random, p: Parts) -> None:
    """Numbers that make NaN, infinity or nonsense of what is computed with them."""
    i, t = _any(r, p.tensors)
    data = bytearray(t.data)
    for _ in range(r.choice((1, 8, 64))):
        if len(data) >= 4:
            at = r.randrange(len(data) // 4) * 4
            data[at : at + 4] = r.choice((b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f", r.randbytes(4)))
    p.tensors[i] = dataclasses.replace(t, data=bytes(data))


def _any(r: random.Random, parts: list[Key] | list[Tensor]) -> tuple[int, Key | Tensor]:
    i = r.randrange(len(parts))
    return i, parts[i]


_STRUCTURAL: tuple[Callable[[random.Random, Parts], None], ...] = (
    _change_value, _change_value, _change_value, _change_length, _change_kind, _rename_key, _move_key, _change_shape,
    _change_tensor, _change_data,
)  # fmt: skip


# -- bytes ---------------------------------------------------------------------------------------------------------


def _change_bytes(r: random.Random, content: bytes, header: int) -> bytes:
    """Words, bytes and spans of the header replaced, or the file cut."""
    damaged = bytearray(content)
    for _ in range(r.choice((1, 1, 2, 4))):
        at = r.randrange(header)
        how = r.randrange(6)
        if how == 0:
            damaged[at] = r.randrange(256)
        elif how == 1:
            damaged[at] ^= 1 << r.randrange(8)
        elif how == 2:
            damaged[at : at + 8] = struct.pack("<Q", r.choice(_NUMBERS))
        elif how == 3:
            damaged[at : at + 4] = struct.pack("<I", r.choice(_NUMBERS) % 2**32)
        elif how == 4:
            other = r.randrange(header)
            damaged[at : at + 16] = damaged[other : other + r.randrange(32)]
        else:
            del damaged[r.randrange(len(damaged)) :]
            return bytes(damaged)
    return bytes(damaged)


def mutated(r: random.Random, base: Parts) -> bytes:
    """`base` with some damage; what it is depends on `r` alone."""
    parts, raw = base.copy(), r.random() < 0.2
    for _ in range(0 if raw else r.choice((1, 1, 1, 2, 3))):
        if parts.keys and parts.tensors:
            r.choice(_STRUCTURAL)(r, parts)
    content, header = parts.join()
    return _change_bytes(r, content, header) if raw or r.random() < 0.05 else content
