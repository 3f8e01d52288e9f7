"""Attention over paged keys and values.

Row t of a lane stands at p = base + t and sees position j of its slot when
    j <= p            (causal)   or   j < base + n_rows   (a block that sees itself), and
    p - j < window    if window > 0: one-sided, later rows of the block stay visible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ints = NDArray[np.int32]

PAGE = 16


def gather(pages: Array, table: Ints, n: int) -> Array:
    """Positions 0..n-1 of a slot: pages [16 P, Hkv, D] through table [max_pages] -> [n, Hkv, D]."""
    position = np.arange(n)
    return pages[table[position // PAGE] * PAGE + position % PAGE]


def visible(n: int, base: int, n_rows: int, window: int, causal: bool) -> NDArray[np.bool_]:
    """[n_rows, n]: which positions a row sees."""
    p, j = base + np.arange(n_rows)[:, None], np.arange(n)[None, :]
    seen = j <= p if causal else j < base + n_rows
    return np.asarray(seen & (p - j < window) if window > 0 else seen & (p >= 0))


def attend(q: Array, k: Array, v: Array, mask: NDArray[np.bool_], scale: float) -> Array:
    """q [T, Hq, D], k, v [n, Hkv, D], mask [T, n] -> [T, Hq, D]; query head h reads kv head h // (Hq / Hkv)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1).astype(np.float64), np.repeat(v, group, axis=1).astype(np.float64)
    scores = scale * np.einsum("thd,nhd->thn", q, k)
    scores = np.where(mask[:, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("thn,nhd->thd", weights / weights.sum(axis=-1, keepdims=True), v)


def attention(
    q: Array, k_pages: Array, v_pages: Array, table: Ints, slots: Ints, base: Ints, n_rows: Ints, *, scale: float,
    window: int = 0, causal: bool = True,
) -> Array:  # fmt: skip
    """The op: q [L, T, Hq, D], pages [16 P, Hkv, D], table [N, max_pages] -> [L, T, Hq, D]; dead rows are zeros."""
    out = np.zeros(q.shape)
    for lane, slot in enumerate(slots):
        if slot >= 0 and n_rows[lane] > 0:
            n = base[lane] + n_rows[lane]
            mask = visible(n, base[lane], n_rows[lane], window, causal)
            k, v = gather(k_pages, table[slot], n), gather(v_pages, table[slot], n)
            out[lane, : n_rows[lane]] = attend(q[lane, : n_rows[lane]], k, v, mask, scale)
    return out
