"""Causal depthwise convolution + SiLU over a slot's window and the rows of its lane.

Shapes: x [C, T, L], w [K, C], memory rows [C, R, N] with R = K - 1 + B rows of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph import Graph
from ..ops import need
from ..tensors import Tensor
from .rows import Kept, Shown, keep, show


@dataclass(frozen=True)
class Window:
    """before I32 [(K-1) * L]: numbers, in rows [C, R * N], of the K - 1 rows in front of each lane's next row.

    front I64 [(K-1) * L]: numbers of the first K - 1 rows of its slot. For a padded lane both are the front of a slot
    that no lane has.
    """

    before: Tensor
    front: Tensor


def commit(g: Graph, rows: Tensor, at: Window) -> Tensor:
    """Move the windows to the front of their slots. `rows` behind the write."""
    flat = _flat(g, rows)
    return g.reshape(g.effect(g.set_rows(flat, g.get_rows(flat, at.before), at.front)), *rows.shape)


def verify(g: Graph, x: Tensor, w: Tensor, rows: Tensor, at: Window, kept: Kept, shown: Shown) -> Tensor:
    """All rows are kept behind the window, which comes to the front. -> [C, T, L]."""
    seen = _seen(g, x, w, rows, at)
    keep(g, _flat(g, rows), _flat(g, seen), kept)
    return show(g, _convolved(g, seen, w, x.shape[1]), shown)


def advance(g: Graph, x: Tensor, w: Tensor, rows: Tensor, at: Window, last: Tensor, shown: Shown) -> Tensor:
    """Only the last K - 1 of window and live rows are kept: last I32 [(K-1) * L] of the K - 1 + T rows of each lane.

    -> [C, T, L].
    """
    seen = _seen(g, x, w, rows, at)
    g.effect(g.set_rows(_flat(g, rows), g.get_rows(_flat(g, seen), last), at.front))
    return show(g, _convolved(g, seen, w, x.shape[1]), shown)


def _flat(g: Graph, rows: Tensor) -> Tensor:
    return g.reshape(rows, rows.shape[0], rows.shape[1] * rows.shape[2])


def _seen(g: Graph, x: Tensor, w: Tensor, rows: Tensor, at: Window) -> Tensor:
    """window ++ x, [C, K - 1 + T, L]."""
    channels, taps, lanes = x.shape[0], w.shape[0], x.shape[2]
    need(
        w.shape == (taps, channels, 1, 1) and rows.shape[0] == channels, "conv", "w [K, C], rows [C, R, N]", x, w, rows
    )
    window = g.reshape(g.get_rows(_flat(g, rows), at.before), channels, taps - 1, lanes)
    return g.concat(window, x, 1)


def _convolved(g: Graph, seen: Tensor, w: Tensor, n_rows: int) -> Tensor:
    """silu(sum_j w[j] in[t + j])."""
    channels, taps, lanes = seen.shape[0], w.shape[0], seen.shape[2]
    by_tap = g.cont(g.permute(w, 1, 0, 2, 3))

    def term(j: int) -> Tensor:
        delayed = g.view(seen, (channels, n_rows, lanes), seen.strides[1:3], j * seen.strides[1])
        return g.mul(delayed, g.view(by_tap, (channels,), (), j * by_tap.strides[1]))

    total = term(0)
    for j in range(1, taps):
        total = g.add(total, term(j))
    return g.silu(total)
