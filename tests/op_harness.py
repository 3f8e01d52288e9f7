"""Runs single nodes of GGML_OP_DFLASH from NumPy arrays, straight through the extension's ``lib``.

Arrays have NumPy order: the axes of a ggml tensor reversed. A result is read back with the axes of its tensor, ones in
front dropped.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama_dflash._native import ffi, lib
from pyllama_dflash.ggml.devices import load_backends

Array = NDArray[Any]

TYPES = {
    np.dtype(np.float32): lib.GGML_TYPE_F32,
    np.dtype(np.float16): lib.GGML_TYPE_F16,
    np.dtype(np.int32): lib.GGML_TYPE_I32,
}
DTYPES = {number: dtype for dtype, number in TYPES.items()}
NOT_WRITTEN = 0x5A5A5A5A  # a result that no op gives: -1 would be a dead row


class Refused(Exception):
    """A constructor returned NULL; the text is its reason."""


class OpRun:
    """One run on the CPU backend: ``source`` the arrays, build with ``op``, ``compute``, ``read``.

    Results start as NaN, those of whole numbers as NOT_WRITTEN. A source is read back like a result, to see what an op
    did to it.
    """

    def __init__(self, n_threads: int = 2) -> None:
        load_backends()
        self.device = lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU)
        self.backend = lib.ggml_backend_dev_init(self.device, ffi.NULL)
        assert self.backend != ffi.NULL and lib.dflash_backend_set_n_threads(self.backend, n_threads)
        size = 64 * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(64, False)
        self.ctx = lib.ggml_init({"mem_size": size, "mem_buffer": ffi.NULL, "no_alloc": True})
        self._data: list[tuple[Any, bytes]] = []
        self._buffer = ffi.NULL

    def __enter__(self) -> OpRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._buffer != ffi.NULL:
            lib.ggml_backend_buffer_free(self._buffer)
        lib.ggml_free(self.ctx)
        lib.ggml_backend_free(self.backend)

    def source(self, array: Array, quantised: int | None = None) -> Any:
        """A tensor that will hold the array; ``quantised`` names a ggml type to encode its rows with."""
        shape = (*array.shape[::-1], 1, 1, 1, 1)[:4]
        kind = TYPES[array.dtype] if quantised is None else quantised
        tensor = lib.ggml_new_tensor_4d(self.ctx, kind, *shape)
        data = np.ascontiguousarray(array).tobytes() if quantised is None else encode(array, quantised)
        assert len(data) == lib.ggml_nbytes(tensor)
        self._data.append((tensor, data))
        return tensor

    def view(self, tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Any:
        """Part of a source: ``shape`` like an array's, bytes from one to the next in all axes but the last."""
        size = (*shape[::-1], 1, 1, 1)[:4]
        row = (*strides[::-1], 0, 0, 0)[:3]
        step = [row[i] if row[i] else row[i - 1] * size[i] for i in range(3)]
        return lib.ggml_view_4d(self.ctx, tensor, *size, *step, offset)

    def op(self, name: str, *arguments: Any) -> Any:
        """The node that ggml_dflash_<name> makes of the arguments, or Refused."""
        node = getattr(lib, f"ggml_dflash_{name}")(self.ctx, *arguments)
        if node == ffi.NULL:
            raise Refused(ffi.string(lib.ggml_dflash_last_error()).decode())
        return node

    def compute(self, *nodes: Any) -> None:
        """Run the nodes in this order."""
        graph = lib.ggml_new_graph_custom(self.ctx, 64, False)
        for node in nodes:
            assert lib.ggml_backend_dev_supports_op(self.device, node)
            lib.ggml_build_forward_expand(graph, node)
        self._buffer = lib.ggml_backend_alloc_ctx_tensors(self.ctx, self.backend)
        lib.ggml_backend_buffer_clear(self._buffer, 0xFF)  # NaN
        for node in nodes:
            if node.type == lib.GGML_TYPE_I32:
                lib.ggml_backend_tensor_memset(node, NOT_WRITTEN & 0xFF, 0, lib.ggml_nbytes(node))
        for tensor, data in self._data:
            lib.ggml_backend_tensor_set(tensor, data, 0, len(data))
        assert lib.ggml_backend_graph_compute(self.backend, graph) == lib.GGML_STATUS_SUCCESS

    def read(self, tensor: Any) -> Array:
        """Values of a tensor that is not quantised."""
        data = bytearray(lib.ggml_nbytes(tensor))
        lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(data), 0, len(data))
        shape = [int(n) for n in tensor.ne][::-1]
        while len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        return np.frombuffer(data, dtype=DTYPES[tensor.type]).reshape(shape).copy()


def encode(array: Array, kind: int) -> bytes:
    """The rows of a float32 array as a ggml type stores them."""
    rows = np.ascontiguousarray(array, dtype=np.float32).reshape(-1, array.shape[-1])
    out = ffi.new("char[]", rows.nbytes)
    size = lib.ggml_quantize_chunk(kind, ffi.from_buffer("float[]", rows), out, 0, *rows.shape, ffi.NULL)
    return bytes(ffi.buffer(out, size))


def meaning(array: Array, kind: int) -> Array:
    """The numbers that a float32 array has after a round trip through a ggml type."""
    return decode(encode(array, kind), array.shape, kind)


def decode(data: bytes, shape: tuple[int, ...], kind: int) -> Array:
    """What the kernel reads of ``encode``."""
    out = np.empty(shape, dtype=np.float32)
    assert lib.dflash_to_float(kind, ffi.from_buffer(data), ffi.from_buffer("float[]", out), out.size)
    return out
