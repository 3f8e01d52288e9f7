"""The target's tokens: which rows have one, and the draw of draws.py for those.

A row is dead from n_rows on; a lane is dead when its n_rows is not in 0..T or its base is negative. A row whose logits
cannot be drawn from has no token either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyllama_dflash.draws import draw
from pyllama_dflash.errors import DeviceError
from pyllama_dflash.sampling import SamplingParams

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

NO_TOKEN = -1


def token(row: Array, params: SamplingParams, position: int) -> int:
    """row [V] -> its token at the absolute position, or NO_TOKEN."""
    try:
        return draw(row, params, position)
    except DeviceError:
        return NO_TOKEN


def sample(logits: Array, base: Ints, n_rows: Ints, params: Sequence[SamplingParams]) -> Ints:
    """logits [L, T, V]; base, n_rows [L]; one SamplingParams per lane -> tokens [L, T]."""
    tokens = np.full(logits.shape[:2], NO_TOKEN, dtype=np.int32)
    for lane, rows in enumerate(logits):
        if base[lane] >= 0 and 0 <= n_rows[lane] <= len(rows):
            for t in range(n_rows[lane]):
                tokens[lane, t] = token(rows[t], params[lane], int(base[lane]) + t + 1)
    return tokens
