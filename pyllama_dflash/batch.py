"""The inputs of a graph over L lanes of T rows each. Row t of lane l is column l * T + t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cache import PagedKV, Rows
from .ggml import Graph, Tensor, Type


@dataclass(frozen=True)
class LaneRows:
    """The rows of one lane in one run: `tokens` stand at positions base, base + 1, ... of `slot`."""

    slot: int
    base: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """Input tensors: tokens, positions, kv_rows [T * L]; slots, base, live [L].

    Lanes shorter than T are filled with dead rows: they write to the cache's spare page and are seen by nobody.
    """

    lanes: int
    rows: int
    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    slots: Tensor
    base: Tensor
    live: Tensor

    @classmethod
    def of(cls, graph: Graph, lanes: int, rows: int) -> Batch:
        """Make the inputs in `graph`."""
        n, i32 = lanes * rows, Type.I32
        return cls(
            lanes,
            rows,
            tokens=graph.input("tokens", i32, n),
            positions=graph.input("positions", i32, n),
            kv_rows=graph.input("kv_rows", Type.I64, n),
            slots=graph.input("slots", i32, lanes),
            base=graph.input("base", i32, lanes),
            live=graph.input("live", i32, lanes),
        )

    def fill(self, work: Sequence[LaneRows], kv: PagedKV) -> None:
        """Upload one run's rows; `kv` says where their keys and values go."""
        tokens = np.zeros((self.lanes, self.rows), np.int32)
        positions = np.zeros((self.lanes, self.rows), np.int32)
        kv_rows = np.broadcast_to(kv.spare_rows(self.rows), (self.lanes, self.rows)).copy()
        for lane, item in enumerate(work):
            n = len(item.tokens)
            tokens[lane, :n] = item.tokens
            positions[lane, :n] = np.arange(item.base, item.base + n)
            kv_rows[lane, :n] = kv.rows(item.slot, item.base, n)
        self.tokens.set(tokens)
        self.positions.set(positions)
        self.kv_rows.set(kv_rows)
        self.slots.set(np.array([item.slot for item in work], np.int32))
        self.base.set(np.array([item.base for item in work], np.int32))
        self.live.set(np.array([len(item.tokens) for item in work], np.int32))


def ring_rows(ring: PagedKV, work: Sequence[LaneRows], rows: int) -> Rows:
    """Physical ring rows of a run's positions, spare rows for dead ones. [L, T]."""
    out: Rows = np.broadcast_to(ring.spare_rows(rows), (len(work), rows)).copy()
    for lane, item in enumerate(work):
        out[lane, : len(item.tokens)] = ring.rows(item.slot, item.base, len(item.tokens))
    return out
