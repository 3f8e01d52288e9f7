"""DFlash2's grouped dynamic convolution.

    y[t, e] = sum_tap (base[side, tap, e] + coef[t, side, tap, e // group]) x[t - tap, e],   x before the block = 0

Both sides of a sub-block (0: its input, 1: its output) read one coefficient vector per token, computed from the input.
Its layout is group fastest, then tap, then side; base has channel fastest, then tap, then side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


def dynamic_conv(x: Array, coef: Array, base: Array, side: int, group: int) -> Array:
    """x [T, E], coef [T, 2 K G], base [2, K, E], G = E / group -> [T, E]."""
    rows, width = x.shape
    taps, groups = base.shape[1], width // group
    weight = coef.reshape(rows, 2, taps, groups)[:, side].repeat(group, axis=-1) + base[side]  # [T, K, E]
    padded = np.concatenate([np.zeros((taps - 1, width)), x])
    shifted = np.stack([padded[taps - 1 - tap : taps - 1 - tap + rows] for tap in range(taps)], axis=1)  # [T, K, E]
    return np.einsum("tke,tke->te", weight, shifted)


def dynamic_conv_loops(x: Array, coef: Array, base: Array, side: int, group: int) -> Array:
    """The same, index by index as the formula is written, offsets into the flat coefficient vector spelled out."""
    rows, width = x.shape
    taps, groups = base.shape[1], width // group
    y = np.zeros((rows, width))
    for t in range(rows):
        for e in range(width):
            for tap in range(taps):
                if t - tap >= 0:
                    offset = e // group + groups * tap + groups * taps * side
                    y[t, e] += (base[side, tap, e] + coef[t, offset]) * x[t - tap, e]
    return y
