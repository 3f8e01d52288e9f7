"""Gated delta rule with a replay log.

Per value head h (key head h mod Hk) and token, with the state S as a matrix [key i, value j]:

    S     <- exp(g) S
    delta  = beta (v - S^T k)
    S     <- S + k delta^T
    o      = S^T q / sqrt(width)

Memory holds the state transposed: state[h, j, i]. A log row is (exp(g) | k | delta), all that a replay needs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ints = NDArray[np.int32]


def step(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array, Array]:
    """One token. state [Hv, S, S] (value j, key i); q, k [Hk, S]; v [Hv, S]; g, beta [Hv].

    Returns output [Hv, S], new state, log row [Hv, 2S+1].
    """
    heads, width = v.shape
    key_head = np.arange(heads) % len(k)
    q, k = q[key_head], k[key_head]
    gate = np.exp(g)
    state = gate[:, None, None] * state
    delta = beta[:, None] * (v - np.einsum("hji,hi->hj", state, k))
    state = state + delta[:, :, None] * k[:, None, :]
    out = np.einsum("hji,hi->hj", state, q) / np.sqrt(width)
    return out, state, np.concatenate([gate[:, None], k, delta], axis=1)


def replay(state: Array, log: Array) -> Array:
    """The transitions of log rows [n, Hv, 2S+1] on a state [Hv, S, S]."""
    width = state.shape[-1]
    for row in log:
        gate, k, delta = row[:, 0], row[:, 1 : 1 + width], row[:, 1 + width :]
        state = gate[:, None, None] * state + delta[:, :, None] * k[:, None, :]
    return state


def replay_float32(state: Array, log: Array) -> Array:
    """The same as the kernels do it: s <- fma(k, delta, gate * s) in float32.

    The product of two float32 is exact in float64; that sum and its rounding to float32 differ from a true fma in about
    one of 2^29 cases, by one unit in the last place.
    """
    width = state.shape[-1]
    state = state.astype(np.float32)
    for row in log.astype(np.float32):
        gate, k, delta = row[:, 0], row[:, 1 : 1 + width], row[:, 1 + width :]
        scaled = gate[:, None, None] * state
        product = delta[:, :, None].astype(np.float64) * k[:, None, :]
        state = (product + scaled).astype(np.float32)
    return state


def run(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array, Array]:
    """T tokens of one lane: q, k [T, Hk, S]; v [T, Hv, S]; g, beta [T, Hv]. Returns output, new state, log rows."""
    outputs, rows = [], []
    for t in range(len(v)):
        out, state, row = step(state, q[t], k[t], v[t], g[t], beta[t])
        outputs.append(out)
        rows.append(row)
    width, heads = v.shape[2], v.shape[1]
    return (
        np.reshape(outputs, (len(v), heads, width)).astype(np.float64),
        state,
        np.reshape(rows, (len(v), heads, 2 * width + 1)).astype(np.float64),
    )


def commit(state: Array, log: Array, slots: Ints, n_pending: Ints) -> Array:
    """gdn_commit: state [N, Hv, S, S] with the pending log rows [N, B, Hv, 2S+1] of the named slots applied."""
    state = state.copy()
    for slot in slots:
        if slot >= 0:
            state[slot] = replay(state[slot], log[slot, : n_pending[slot]])
    return state


def verify(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, log: Array, slots: Ints, n_pending: Ints
) -> tuple[Array, Array, Array]:
    """gdn_verify: lanes first, q [L, T, Hk, S] and so on. Returns output [L, T, Hv, S], state, log."""
    state, log = commit(state, log, slots, n_pending), log.copy()
    out = np.zeros(v.shape)
    for lane, slot in enumerate(slots):
        if slot >= 0:
            out[lane], _, rows = run(state[slot], q[lane], k[lane], v[lane], g[lane], beta[lane])
            log[slot, : len(rows)] = rows
    return out, state, log


def advance(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, log: Array, slots: Ints, n_pending: Ints,
    n_rows: Ints,
) -> tuple[Array, Array]:  # fmt: skip
    """gdn_advance: the n_rows[lane] leading rows are final. Returns output (zeros past them) and state."""
    state = commit(state, log, slots, n_pending)
    out = np.zeros(v.shape)
    for lane, slot in enumerate(slots):
        if slot >= 0:
            live = slice(0, n_rows[lane])
            rows = (q[lane][live], k[lane][live], v[lane][live], g[lane][live], beta[lane][live])
            out[lane][live], state[slot], _ = run(state[slot], *rows)
    return out, state
