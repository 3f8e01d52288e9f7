"""GGUF files byte by byte, good and bad ones."""

from __future__ import annotations

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
PACKED = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "b", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(key: str, kind: int, value) -> bytes:
    body = string(value) if kind == STR else struct.pack("<" + PACKED[kind], value)
    return string(key) + struct.pack("<i", kind) + body


def array(key: str, kind: int, values, count: int | None = None) -> bytes:
    body = b"".join(string(v) if kind == STR else struct.pack("<" + PACKED[kind], v) for v in values)
    return string(key) + struct.pack("<iiQ", ARR, kind, len(values) if count is None else count) + body


def tensor(name: str = "t", dims=(32,), kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}qiQ", count, *dims, kind, offset)


def raw_file(keys=(), tensors=(), data: bytes = b"", *, magic=b"GGUF", version=3, n_keys=None, n_tensors=None) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<Iqq", version, *counts) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32) + data if tensors else head + data
