"""Typed, shaped handles on ggml tensors, and the buffers they live in."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .._native import ffi, lib
from ..errors import DeviceError, DflashError, EngineClosed
from .devices import Backend

MAX_DIMS = 4
MAX_BYTES = 1 << 46


class ShapeError(DflashError, ValueError):
    """Shapes or types that an op does not take."""


class Type(enum.IntEnum):
    """Element types the engine handles (ggml's numbers)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    I32 = 26
    I64 = 27
    BF16 = 30

    @property
    def block(self) -> int:
        """Elements per block."""
        return _block(self)[0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _block(self)[1]

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` elements."""
        return n // self.block * self.block_bytes


@functools.cache
def _block(kind: Type) -> tuple[int, int]:
    """Elements and bytes of a block."""
    return int(lib.ggml_blck_size(int(kind))), int(lib.ggml_type_size(int(kind)))


_NUMPY: dict[Type, type[np.generic]] = {
    Type.F32: np.float32,
    Type.F16: np.float16,
    Type.I32: np.int32,
    Type.I64: np.int64,
}


class Owner(Protocol):
    """What a tensor's memory belongs to."""

    @property
    def closed(self) -> bool:
        """True once the memory is gone."""
        ...


class Tensor:
    """A ggml tensor: `shape` has four numbers, the first varies fastest; `strides` are in bytes."""

    __slots__ = ("_packed_bytes", "_ptr", "owner", "shape", "strides", "type")

    def __init__(self, ptr: Any, owner: Owner) -> None:
        self._ptr = ptr
        self.owner = owner
        self.type = Type(int(ptr.type))
        self.shape: tuple[int, int, int, int] = (ptr.ne[0], ptr.ne[1], ptr.ne[2], ptr.ne[3])
        self.strides: tuple[int, int, int, int] = (ptr.nb[0], ptr.nb[1], ptr.nb[2], ptr.nb[3])
        self._packed_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.type.name}, {list(self.shape)})"

    @property
    def ptr(self) -> Any:
        """The native handle; raises once its owner is closed."""
        if self.owner.closed:
            raise EngineClosed("tensor used after its buffer was closed")
        return self._ptr

    @property
    def name(self) -> str:
        """The tensor's name."""
        return "" if self.owner.closed else ffi.string(self._ptr.name).decode("utf-8", "replace")

    @property
    def nbytes(self) -> int:
        """Bytes from the first to behind the last element."""
        return int(lib.ggml_nbytes(self.ptr))

    @property
    def nelements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether elements follow each other without gaps."""
        return self.contiguous_from(0)

    def contiguous_from(self, dim: int) -> bool:
        """Whether all dimensions above `dim` are packed; dimension 0 must be packed in any case."""
        if self.strides[0] != self.type.block_bytes:
            return False
        expected = self.type.row_bytes(self.shape[0])
        for d in range(1, MAX_DIMS):
            if d > dim and self.shape[d] != 1 and self.strides[d] != expected:
                return False
            expected = (self.strides[d] if d <= dim else expected) * self.shape[d]
        return True

    def set(self, values: NDArray[Any] | bytes, offset: int = 0) -> None:
        """Copy `values` in at byte `offset`; an array must already have the tensor's element type."""
        ptr, size = self._stored(), self._packed()
        if isinstance(values, np.ndarray):
            want = _NUMPY.get(self.type)
            if want is not None and values.dtype != want and values.dtype != np.uint8:
                raise ShapeError(f"{self!r}: values of {values.dtype}, expected {np.dtype(want)}")
            values = np.ascontiguousarray(values).reshape(-1)
        data = ffi.from_buffer(values)
        if not 0 <= offset <= offset + len(data) <= size:
            raise ShapeError(f"{self!r}: {len(data)} bytes at {offset} do not fit {size} contiguous bytes")
        if len(data):
            lib.ggml_backend_tensor_set(ptr, data, offset, len(data))

    def clear(self, offset: int, size: int) -> None:
        """Zero `size` bytes from byte `offset` on."""
        ptr, whole = self._stored(), self._packed()
        if not 0 <= offset <= offset + size <= whole:
            raise ShapeError(f"{self!r}: {size} bytes at {offset} do not fit {whole} contiguous bytes")
        lib.ggml_backend_tensor_memset(ptr, 0, offset, size)

    def get(self) -> NDArray[Any]:
        """A copy as an array in NumPy's order (slowest first); types NumPy lacks come as raw bytes."""
        ptr, size = self._stored(), self._packed()
        if size < 0:
            raise ShapeError(f"{self!r}: only contiguous tensors are read back")
        raw = np.empty(size, np.uint8)
        lib.ggml_backend_tensor_get(ptr, ffi.from_buffer(raw), 0, raw.nbytes)
        dtype = _NUMPY.get(self.type)
        return raw if dtype is None else raw.view(dtype).reshape(self.shape[::-1])

    def _packed(self) -> int:
        """Bytes of a contiguous tensor, -1 of another; asked for every transfer, so kept."""
        if self._packed_bytes is None:
            self._packed_bytes = self.nbytes if self.contiguous else -1
        return self._packed_bytes

    def _stored(self) -> Any:
        ptr = self.ptr
        if ptr.buffer == ffi.NULL and (ptr.view_src == ffi.NULL or ptr.view_src.buffer == ffi.NULL):
            raise ShapeError(f"{self!r} has no memory yet")
        return ptr


def check_shape(kind: Type, shape: Sequence[int]) -> tuple[int, ...]:
    """Four positive numbers whose rows are whole blocks; else ShapeError."""
    if not 1 <= len(shape) <= MAX_DIMS or any(int(n) < 1 for n in shape):
        raise ShapeError(f"shape {list(shape)}: 1 to {MAX_DIMS} positive numbers are needed")
    full = tuple(int(n) for n in shape) + (1,) * (MAX_DIMS - len(shape))
    if full[0] % kind.block:
        raise ShapeError(f"shape {list(shape)}: rows of {kind.name} are multiples of {kind.block}")
    if kind.row_bytes(full[0]) * math.prod(full[1:]) > MAX_BYTES:
        raise ShapeError(f"shape {list(shape)}: more than {MAX_BYTES} bytes")
    return full


def new_context(tensors: int, extra_bytes: int = 0) -> Any:
    """A native context that holds metadata for `tensors` tensors and no data."""
    params = ffi.new("struct ggml_init_params *")
    params.mem_size = tensors * lib.ggml_tensor_overhead() + extra_bytes
    params.mem_buffer = ffi.NULL
    params.no_alloc = True
    context = lib.ggml_init(params[0])
    if context == ffi.NULL:
        raise DeviceError("no memory for tensor metadata")
    return context


class TensorSet:
    """Tensors that live together in one device buffer: weights, caches, states, inputs.

    Make the tensors with :meth:`new` and :meth:`rows`, then :meth:`allocate` once.
    """

    def __init__(self, backend: Backend, capacity: int) -> None:
        self.backend = backend
        self.capacity = capacity
        self.tensors: list[Tensor] = []
        self._context = new_context(capacity)
        self._buffer: Any = None
        self._made = 0

    @property
    def closed(self) -> bool:
        """True once the memory is gone."""
        return self._context is None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return 0 if self._buffer is None else int(lib.ggml_backend_buffer_get_size(self._buffer))

    def new(self, name: str, kind: Type, *shape: int) -> Tensor:
        """A new tensor of this set; memory comes with :meth:`allocate`."""
        full = check_shape(kind, shape)
        self._check_room(name)
        tensor = self._named(name, lib.ggml_new_tensor_4d(self._context, int(kind), *full))
        self.tensors.append(tensor)
        return tensor

    def rows(self, name: str, matrix: Tensor, first: int, n: int) -> Tensor:
        """Rows first .. first + n - 1 of a matrix [K, M] of this set as a tensor [K, n], in the same memory."""
        width, height = matrix.shape[:2]
        if matrix.owner is not self or not 0 <= first < first + n <= height or matrix.shape[2:] != (1, 1):
            raise ShapeError(f"{name}: rows {first}..{first + n} of {matrix!r}, which has to be a matrix of this set")
        self._check_room(name)
        stride = matrix.strides[1]
        return self._named(name, lib.ggml_view_2d(self._context, matrix.ptr, width, n, stride, first * stride))

    def _check_room(self, name: str) -> None:
        if self.closed or self._buffer is not None or self._made >= self.capacity:
            raise ShapeError(f"{name}: the set is closed, already allocated or full ({self.capacity})")

    def _named(self, name: str, ptr: Any) -> Tensor:
        lib.ggml_set_name(ptr, name.encode()[:63])
        self._made += 1
        return Tensor(ptr, self)

    def allocate(self, *, weights: bool = False) -> None:
        """Reserve device memory for all tensors and zero it."""
        if not self.tensors:
            return
        buffer = lib.ggml_backend_alloc_ctx_tensors(self._context, self.backend.ptr)
        if buffer == ffi.NULL:
            need = sum(t.nbytes for t in self.tensors)
            raise DeviceError(f"{self.backend.device.name}: no memory for {need / 2**20:.0f} MiB")
        self._buffer = buffer
        if weights:
            lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        else:
            lib.ggml_backend_buffer_clear(buffer, 0)

    def map(self, buffer: Any, address: Any, placements: Sequence[tuple[Tensor, int]]) -> None:
        """Place tensors inside host memory wrapped by `buffer`, each at its byte offset from `address`."""
        self._buffer = buffer
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        base = ffi.cast("char *", address)
        size = int(lib.ggml_backend_buffer_get_size(buffer))
        for tensor, offset in placements:
            if not 0 <= offset <= offset + tensor.nbytes <= size:
                raise ShapeError(f"{tensor!r}: bytes {offset}..{offset + tensor.nbytes} lie outside the file ({size})")
            if lib.ggml_backend_tensor_alloc(buffer, tensor.ptr, base + offset) != lib.GGML_STATUS_SUCCESS:
                raise DeviceError(f"{tensor!r} cannot be placed in mapped memory")

    def close(self) -> None:
        """Release memory and metadata. Idempotent; tensors of the set are unusable afterwards."""
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            self._buffer = None
        if self._context is not None:
            lib.ggml_free(self._context)
            self._context = None
        self.tensors.clear()
