"""What of a verified block counts.

Row 0 follows the anchor, which is final. Row t + 1 was computed behind proposal t: its token is final if that proposal
is what row t gave. So the final rows are the first one and those behind the longest prefix of right proposals; a row
without a token (-1) ends them.
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
    tokens: Ints, proposals: Ints, n_rows: Ints, slots: Ints, n_pending: Ints, anchors: Ints
) -> tuple[Ints, Ints, Ints]:
    """tokens [L, T], proposals [L, T-1], n_rows and slots [L], n_pending and anchors [N].

    Returns the result [L, T+1] (n, the tokens, -1), n_pending and anchors afterwards.
    """
    lanes, rows = tokens.shape
    n_pending, anchors = n_pending.copy(), anchors.copy()
    result = np.full((lanes, rows + 1), -1, dtype=np.int32)
    result[:, 0] = 0
    for lane, slot in enumerate(slots):
        if not 0 <= slot < len(anchors) or slot in slots[:lane] or not 0 <= n_rows[lane] <= rows:
            continue
        n = n_final(tokens[lane, : n_rows[lane]], proposals[lane])
        result[lane, 0] = n_pending[slot] = n
        result[lane, 1 : 1 + n] = tokens[lane, :n]
        if n > 0:
            anchors[slot] = tokens[lane, n - 1]
    return result, n_pending, anchors
