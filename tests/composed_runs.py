"""Single ops of the family through `family`, on a backend of one's choice: the sources and memories as NumPy arrays.

Arrays have NumPy order: the axes of a ggml tensor reversed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama_dflash.batch import AskedInputs, Batch
from pyllama_dflash.cache import PagedKV, RecurrentState
from pyllama_dflash.ggml import Backend, Graph, Tensor, TensorSet, Type
from pyllama_dflash.lane_rows import LaneRows

Array = NDArray[Any]
KINDS = {np.dtype(np.float32): Type.F32, np.dtype(np.int32): Type.I32, np.dtype(np.float16): Type.F16}


@dataclass(frozen=True)
class Lanes:
    """The lanes of a run: `rows` counts the live ones of T."""

    slots: tuple[int, ...]
    T: int
    rows: tuple[int, ...] = ()
    base: tuple[int, ...] = ()

    @property
    def work(self) -> list[LaneRows]:
        """As the inputs of a batch take them."""
        n = len(self.slots)
        rows, base = self.rows or (self.T,) * n, self.base or (0,) * n
        return [LaneRows(*item) for item in zip(self.slots, base, rows, strict=True)]


class OpRun:
    """One graph on `backend` with its batch, all of whose tensors are inputs here; `result` runs it."""

    def __init__(self, backend: Backend, lanes: Lanes) -> None:
        self.lanes = lanes
        self.graph = Graph(backend)
        self.batch = self._batch()
        self.memory = TensorSet(backend, 16)
        self._sources: list[tuple[Tensor, Array | bytes]] = []

    def __enter__(self) -> OpRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.graph.close()
        self.memory.close()

    def _batch(self) -> Batch:
        lanes, rows = len(self.lanes.slots), self.lanes.T
        per_lane, per_row = ("slots", "live", "base"), ("tokens", "positions", "kv_rows", "ring_rows")
        sizes = dict.fromkeys(per_lane, lanes) | dict.fromkeys(per_row, lanes * rows)
        inputs = {name: self.graph.input(name, Type.I32, n) for name, n in sizes.items()}
        return Batch(lanes, rows, asked=AskedInputs(self.graph), **inputs)

    def source(self, values: Array, kind: Type | None = None, raw: bytes | None = None) -> Tensor:
        """An input that will hold `values`; `raw` are its bytes where NumPy lacks the type `kind`."""
        name = f"source.{len(self._sources)}"
        tensor = self.graph.input(name, KINDS[values.dtype] if kind is None else kind, *values.shape[::-1])
        self._sources.append((tensor, values if raw is None else raw))
        return tensor

    def recurrent(self, width: int, heads: int, channels: int, block: int, slots: int) -> RecurrentState:
        """Memory of one layer, number 0."""
        made = RecurrentState(self.memory, [0], width, heads, channels, 4, block, slots)
        self.memory.allocate()
        return made

    def paged(self, width: int, heads: int, table: Array, pages: int, kind: Type) -> PagedKV:
        """Pages of one layer, number 0, and their table [N, max_pages]."""
        kv = PagedKV(self.memory, "kv", [0], width, heads, pages - 1, table.shape[1], len(table), kind)
        self.memory.allocate()
        for slot, row in enumerate(table):
            kv.assign(slot, 0, row.tolist())
        kv.send()
        return kv

    def result(self, node: Tensor, work: Sequence[LaneRows] | None = None, tokens: Array | None = None) -> Array:
        """Build, feed, run; the node's values. `tokens` [L, T] of the batch's rows, 0 if not given."""
        work, b = self.lanes.work if work is None else work, self.batch
        out = self.graph.output(self.graph.cont(node), "out") if node.type == Type.F32 else node
        self.graph.build()
        for tensor, values in self._sources:
            tensor.set(values)
        b.tokens.set(np.zeros((b.lanes, b.rows), np.int32) if tokens is None else tokens.astype(np.int32))
        b.slots.set(np.array([item.slot for item in work], np.int32))
        b.base.set(np.array([item.base for item in work], np.int32))
        b.live.set(np.array([item.rows for item in work], np.int32))
        b.asked.fill(work)
        self.graph.run()
        return out.get()


def set_pending(memory: RecurrentState, pending: Array) -> None:
    """Pending counts, out of range ones too, on the device and on the host."""
    memory.pending.set(pending.astype(np.int32))
    memory.pending_rows[:] = pending
