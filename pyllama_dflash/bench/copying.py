"""What a large copy reaches on the device: the measure of every round that is bound by memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from .._native import lib
from ..ggml import Backend, Tensor, TensorSet, Type

GPU_BYTES, CPU_BYTES = 1 << 30, 1 << 28
COPIES = 4  # a run


def bandwidth(backend: Backend, size: int | None = None, runs: int = 10) -> dict[str, Any]:
    """Copy a tensor of `size` bytes to and fro, `COPIES` times a run; bytes a second, each byte read and each written
    one counted: median and best of the runs behind the first. DeviceError when there is no memory for two of them.

    By the backend's own copy: ggml_cpy is a kernel that reaches two thirds of it on an H200.
    """
    size = size or (CPU_BYTES if backend.device.kind == "cpu" else GPU_BYTES)
    tensors = TensorSet(backend, 2)
    try:
        pair = [tensors.new(name, Type.F32, size // 4) for name in ("copy.a", "copy.b")]
        tensors.allocate()
        _timed(pair)
        seconds = [_timed(pair) for _ in range(runs)]
    finally:
        tensors.close()
    moved = 2 * size * COPIES
    return {
        "tensor_bytes": size,
        "copies": COPIES,
        "runs": runs,
        "bytes_per_s": moved / statistics.median(seconds),
        "best_bytes_per_s": moved / min(seconds),
    }


def _timed(pair: Sequence[Tensor]) -> float:
    begin = time.perf_counter()
    for i in range(COPIES):
        lib.ggml_backend_tensor_copy(pair[i % 2].ptr, pair[1 - i % 2].ptr)
    return time.perf_counter() - begin
