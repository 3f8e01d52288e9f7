"""Attention over paged keys and values: gather the positions that are seen, then a masked softmax.

Shapes: q [D, Hq, T, L]; k, v [D, Hkv, 16 P]; n positions gathered a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph import Graph
from ..ops import need
from ..tensors import Tensor
from .rows import Shown, show


@dataclass(frozen=True)
class Seen:
    """rows I32 [n * L]: physical rows of the positions that some row of the lane sees; any of them again as filler.

    mask F32 [n, T, 1, L]: 0 where row t sees the position, else -infinity; all 0 for rows that are not shown.
    """

    rows: Tensor
    mask: Tensor
    shown: Shown


def attention(g: Graph, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v, query head h with kv head h / (Hq / Hkv). -> [D, Hq, T, L].

    Rows of a lane are gathered once for all its rows: a NaN in a later row's keys or values spreads to earlier rows.
    """
    d, heads = q.shape[:2]
    need(k.shape == v.shape and k.shape[0] == d and heads % k.shape[1] == 0, "attention", "k, v [D, Hkv, R]", q, k, v)
    keys, values = (_gathered(g, pages, seen.rows, q.shape[3]) for pages in (k, v))
    scores = g.mul_mat(g.cont(g.permute(keys, 0, 2, 1, 3)), g.cont(g.permute(q, 0, 2, 1, 3)))  # [n, T, Hq, L]
    weights = g.soft_max(scores, seen.mask, scale)
    mixed = g.mul_mat(g.cont(g.permute(values, 1, 2, 0, 3)), weights)  # [D, T, Hq, L]
    return show(g, g.cont(g.permute(mixed, 0, 2, 1, 3)), seen.shown)


def _gathered(g: Graph, pages: Tensor, rows: Tensor, lanes: int) -> Tensor:
    """F32 [D, Hkv, n, L]."""
    d, heads, total = pages.shape[:3]
    return g.reshape(g.get_rows(g.reshape(pages, d * heads, total), rows), d, heads, rows.shape[0] // lanes, lanes)
