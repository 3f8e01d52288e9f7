"""What a large copy reaches on the device: the measure of every round that is bound by memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

from .._native import lib
from ..ggml import Backend, Graph, TensorSet, Type

GPU_BYTES, CPU_BYTES = 1 << 30, 1 << 28
COPIES = 4  # in a graph, so that starting it does not count


def bandwidth(backend: Backend, size: int | None = None, runs: int = 10) -> dict[str, Any]:
    """Copy a tensor of `size` bytes to and fro, `COPIES` times a run; bytes a second, each byte read and each written
    one counted: median and best of the runs behind the first. DeviceError when there is no memory for two of them."""
    size = size or (CPU_BYTES if backend.device.kind == "cpu" else GPU_BYTES)
    tensors = TensorSet(backend, 2)
    try:
        pair = [tensors.new(name, Type.F32, size // 4) for name in ("copy.a", "copy.b")]
        tensors.allocate()
        with Graph(backend) as graph:
            for i in range(COPIES):
                source, target = pair[i % 2], pair[1 - i % 2]
                graph.effect(graph.wrap(lib.ggml_cpy(graph.context, source.ptr, target.ptr)))
            graph.build()
            graph.run()
            seconds = [_timed(graph) for _ in range(runs)]
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


def _timed(graph: Graph) -> float:
    begin = time.perf_counter()
    graph.run()
    return time.perf_counter() - begin
