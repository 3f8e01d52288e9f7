"""Where the rows of a run stand: the token, the position and the physical rows of each.

A lane is live when its slot is one, no earlier lane has it, its n_rows is in 0..T and the base of its slot is not
negative. A row t of it is live when it is one of the n_rows and position base + t has a place in the history and in
every table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

PAGE = 16


def place(
    slots: Ints, n_rows: Ints, base: Ints, history: Ints, table: Ints, ring: Ints | None, rows: int, fill: int,
    spare: int, ring_spare: int,
) -> Ints:  # fmt: skip
    """slots, n_rows [L]; base [N], history [N, C], table [N, M], ring [N, R]; rows = T.

    Returns planes [L * T]: tokens, positions, rows, ring rows (with a ring); then the base of the lanes [L].
    """
    lanes = len(slots)
    tokens, positions = np.zeros((2, lanes, rows), np.int32)
    pages, spares = ([table], [spare]) if ring is None else ([table, ring], [spare, ring_spare])
    physical = [np.tile(np.int32(first) + np.arange(rows, dtype=np.int32) % PAGE, (lanes, 1)) for first in spares]
    lane_base = np.full(lanes, -1, np.int32)
    for lane, slot in enumerate(slots):
        owned = 0 <= slot < len(base) and slot not in slots[:lane]
        if not owned or not 0 <= n_rows[lane] <= rows or base[slot] < 0:
            continue
        lane_base[lane] = base[slot]
        for t in range(n_rows[lane]):
            p = int(base[slot]) + t
            if p >= history.shape[1] or any(p // PAGE >= each.shape[1] for each in pages):
                break
            tokens[lane, t] = max(history[slot, p], 0) if t == 0 or fill < 0 else fill
            positions[lane, t] = p
            for where, each in zip(physical, pages, strict=True):
                where[lane, t] = each[slot, p // PAGE] * PAGE + p % PAGE
    return np.concatenate([*(plane.ravel() for plane in (tokens, positions, *physical)), lane_base])
