"""Causal depthwise convolution + SiLU over the kept window of a slot and the new rows of its lane.

in = window ++ x;  y[t, c] = silu(sum_j w[c, j] in[t + j, c]): the last tap meets the row itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ints = NDArray[np.int32]


def causal_conv(window: Array, x: Array, w: Array) -> Array:
    """window [K-1, C], x [T, C], w [C, K] -> [T, C]."""
    taps = w.shape[1]
    rows = np.concatenate([window, x]).astype(np.float64)
    total = sum(w[:, j] * rows[j : j + len(x)] for j in range(taps))
    return np.asarray(total / (1 + np.exp(-total)))


def window_of(rows: Array, n_pending: int, taps: int) -> Array:
    """The K-1 rows before the next token, of a slot's kept rows [K-1+B, C] of which n_pending new ones count."""
    return rows[n_pending : n_pending + taps - 1].copy()


def commit(rows: Array, slots: Ints, n_pending: Ints, taps: int = 4) -> Array:
    """conv_commit: rows [N, K-1+B, C] with the window of the named slots moved to the front."""
    rows = rows.copy()
    for slot in slots:
        if slot >= 0:
            rows[slot, : taps - 1] = window_of(rows[slot], n_pending[slot], taps)
    return rows


def verify(x: Array, w: Array, rows: Array, slots: Ints, n_pending: Ints) -> tuple[Array, Array]:
    """conv_verify: x [L, T, C]. Returns y and the kept rows, which hold window ++ x now."""
    taps, rows, y = w.shape[1], rows.copy(), np.zeros(x.shape)
    for lane, slot in enumerate(slots):
        if slot >= 0:
            window = window_of(rows[slot], n_pending[slot], taps)
            y[lane] = causal_conv(window, x[lane], w)
            rows[slot, : taps - 1 + len(x[lane])] = np.concatenate([window, x[lane]])
    return y, rows


def advance(x: Array, w: Array, rows: Array, slots: Ints, n_pending: Ints, n_rows: Ints) -> tuple[Array, Array]:
    """conv_advance: the n_rows[lane] leading rows are final; only the window behind them is kept."""
    taps, rows, y = w.shape[1], rows.copy(), np.zeros(x.shape)
    for lane, slot in enumerate(slots):
        if slot >= 0:
            live = x[lane, : n_rows[lane]]
            window = window_of(rows[slot], n_pending[slot], taps)
            y[lane, : len(live)] = causal_conv(window, live, w)
            rows[slot, : taps - 1] = np.concatenate([window, live])[len(live) :]
    return y, rows
