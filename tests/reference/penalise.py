"""Biases and penalties of a row of logits: biases first, then repetition, then presence, each rounded to F32.

The penalties are for the distinct tokens at the row's own position and before: those of the history up to the anchor,
and those of the block behind it up to the row. Ids outside the vocabulary are passed over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ints = NDArray[np.int32]


def penalise_row(x: Array, seen: set[int], repetition: np.float32, presence: np.float32, bias: Ints) -> None:
    """x [V] in place; bias [NB, 2]: token id, bits of an F32, up to the first id below 0."""
    for token, bits in bias:
        if token < 0:
            break
        if token < len(x):
            x[token] += bits.view(np.float32)
    if repetition == 1 and presence == 0:
        return
    for token in seen:
        if 0 <= token < len(x):
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
            x[token] = x[token] - presence


def penalise(
    logits: Array, block: Ints, base: Ints, n_rows: Ints, slots: Ints, history: Ints, penalties: Array, bias: Ints
) -> Array:
    """logits [L, T, V], block [L, T]; base, n_rows, slots [L]; history [N, C], penalties [N, 2], bias [N, NB, 2].

    Returns the logits afterwards.
    """
    logits = logits.copy()
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for lane, slot in enumerate(slots):
            if not 0 <= slot < len(history) or not 0 <= n_rows[lane] <= block.shape[1] or base[lane] < 0:
                continue
            for t in range(n_rows[lane]):
                seen = {*history[slot, : int(base[lane]) + 1].tolist(), *block[lane, 1 : t + 1].tolist()}
                penalise_row(logits[lane, t], seen, *penalties[slot], bias[slot])
    return logits
