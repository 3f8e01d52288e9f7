"""Where the rows of a run stand: made on the device from what it knows of the slots, or by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cache import LaneCache, PagedKV
from .ggml import Graph, Tensor, Type
from .lane_rows import LaneRows

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Places:
    """Row t of lane l is entry l * T + t of tokens, positions, kv_rows and ring_rows I32 [T * L]; base I32 [L].

    `given` is the input that holds them all where the device has no `place`.
    """

    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    ring_rows: Tensor
    base: Tensor
    given: Tensor | None
    cache: LaneCache
    rows: int
    fill: int

    @classmethod
    def of(cls, g: Graph, cache: LaneCache, slots: Tensor, live: Tensor, rows: int, fill: int) -> Places:
        """The places of T = `rows` rows a lane. `fill`: the token behind the anchor, -1: tokens of the history."""
        kv, ring, history, lanes = cache.kv, cache.ring, cache.history, slots.shape[0]
        n, size = rows * lanes, lanes * ((4 if ring else 3) * rows + 1)

        def kernel() -> Tensor:
            return g.place(
                slots, live, history.base, history.history, kv.table, None if ring is None else ring.table,
                rows=rows, fill=fill, spare=kv.spare, ring_spare=0 if ring is None else ring.spare,
            )  # fmt: skip

        placed = g.choose("place", kernel, lambda: None, "host")
        given = g.input("places", Type.I32, size) if placed is None else None
        whole = g.effect(placed) if placed is not None else given
        assert whole is not None
        plane = [g.view(whole, (n,), (), 4 * n * i) for i in range(4 if ring else 3)]
        base = g.view(whole, (lanes,), (), 4 * (size - lanes))
        return cls(plane[0], plane[1], plane[2], plane[-1], base, given, cache, rows, fill)

    def fill_in(self, work: Sequence[LaneRows]) -> None:
        """What the host has to send for a run."""
        if self.given is not None:
            self.given.set(places_of(work, self.cache, self.rows, self.fill))


def places_of(work: Sequence[LaneRows], cache: LaneCache, rows: int, fill: int) -> Ints:
    """The meaning of the op `place`, from what the host knows."""
    tokens, positions = (np.zeros((len(work), rows), np.int32) for _ in range(2))
    for lane, item in enumerate(work):
        at = slice(item.base, item.base + item.rows)
        positions[lane, : item.rows] = np.arange(at.start, at.stop)
        if item.rows:
            tokens[lane, : item.rows] = cache.history.tokens[item.slot, at]
            if fill >= 0:
                tokens[lane, 1 : item.rows] = fill
    parts = [tokens, positions, physical_rows(cache.kv, work, rows)]
    if cache.ring is not None:
        parts.append(physical_rows(cache.ring, work, rows))
    base = np.array([item.base if item.slot >= 0 else -1 for item in work], np.int32)
    return np.concatenate([*(part.ravel() for part in parts), base])


def physical_rows(kv: PagedKV, work: Sequence[LaneRows], rows: int) -> Ints:
    """Rows of `kv` for a run's positions, spare rows for dead ones. [L, T]."""
    out = np.tile(kv.spare_rows(rows), (len(work), 1))
    for lane, item in enumerate(work):
        out[lane, : item.rows] = kv.rows(item.slot, item.base, item.rows)
    return out
