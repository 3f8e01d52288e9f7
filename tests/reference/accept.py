"""What of a verified block counts.

Row 0 follows the anchor, which is final. Row t + 1 was computed behind proposal t: its token is final if that proposal
is what row t gave. So the final rows are the first one and those behind the longest prefix of right proposals; a row
without a token (-1) ends them. Final tokens enter the history behind the anchor, and the last of them is the next one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def n_final(tokens: Ints, proposals: Ints) -> int:
    """tokens [n], proposals [n - 1 or more] of the live rows of a lane -> how many leading tokens are final."""
    n = 0
    for t, token in enumerate(tokens):
        if token == -1 or (t > 0 and proposals[t - 1] != tokens[t - 1]):
            break
        n += 1
    return n


def accept(
    tokens: Ints, block: Ints, n_rows: Ints, slots: Ints, n_pending: Ints, base: Ints, history: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """tokens and block [L, T], n_rows and slots [L], n_pending and base [N], history [N, C].

    Returns the result [L, T+1] (n, the tokens, -1), n_pending, base and history afterwards.
    """
    lanes, rows = tokens.shape
    n_pending, base, history = n_pending.copy(), base.copy(), history.copy()
    result = np.full((lanes, rows + 1), -1, dtype=np.int32)
    result[:, 0] = 0
    for lane, slot in enumerate(slots):
        owned = 0 <= slot < len(base) and slot not in slots[:lane]
        if not owned or not 0 <= n_rows[lane] <= rows or base[slot] < 0:
            continue
        n = n_final(tokens[lane, : n_rows[lane]], block[lane, 1:])
        result[lane, 0] = n_pending[slot] = n
        result[lane, 1 : 1 + n] = tokens[lane, :n]
        behind = history[slot, int(base[slot]) + 1 :][:n]
        behind[:] = tokens[lane, : len(behind)]
        base[slot] += n
    return result, n_pending, base, history
