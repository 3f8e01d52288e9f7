"""Rows by number: what the compositions use instead of masks, slots and counts.

A matrix [E, n] has n rows of E numbers, ggml's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Graph
from ..tensors import Tensor


@dataclass(frozen=True)
class Shown:
    """Which rows of a result [E, T * L] are shown: rows I32 [T * L] holds a row's own number, or T * L for `zeros`.

    zeros F32 [E].
    """

    rows: Tensor
    zeros: Tensor


@dataclass(frozen=True)
class Kept:
    """Where n rows go in a memory of rows: read I32, write I64 [n] are the same row numbers.

    chosen I32 [n]: a row's own number, or n more to write back what is there (padded lanes).
    """

    read: Tensor
    write: Tensor
    chosen: Tensor


def pick(g: Graph, x: Tensor, other: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [E, n] followed by other [E, m], by number. -> [E, k]."""
    return g.get_rows(g.concat(x, other, 1), rows)


def show(g: Graph, x: Tensor, shown: Shown) -> Tensor:
    """x [..., T, L] with zeros for the rows that are not shown; the same shape."""
    width, n = shown.zeros.shape[0], shown.rows.shape[0]
    return g.reshape(pick(g, g.reshape(x, width, n), shown.zeros, shown.rows), *x.shape)


def keep(g: Graph, memory: Tensor, new: Tensor, kept: Kept) -> Tensor:
    """Write rows new [E, n] into memory [E, m], by `kept`. The memory behind the write."""
    return g.effect(g.set_rows(memory, pick(g, new, g.get_rows(memory, kept.read), kept.chosen), kept.write))


def stack(g: Graph, rows: Sequence[Tensor]) -> Tensor:
    """Row t of all lanes, [E, L] each, as [E, T, L]."""
    stacked = [g.reshape(row, row.shape[0], 1, row.shape[1]) for row in rows]
    result = stacked[0]
    for row in stacked[1:]:
        result = g.concat(result, row, 1)
    return result
