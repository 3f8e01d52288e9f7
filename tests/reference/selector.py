"""DFlash2's selector: which of the top-k tokens of every draft row to propose.

    score(row, a, b) = sum_r predecessor[a, r] gate[row, r] successor[b, r] + logit[row, b]

The rows are those after the anchor. Row 0 follows the anchor; row i > 0 follows any candidate of row i - 1. The walk
goes left to right and takes the best successor of what it took before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ids = NDArray[np.int64]


def without_nan(values: Array) -> Array:
    """NaN as -infinity: what never wins."""
    return np.where(np.isnan(values), -np.inf, values)


def top_candidates(logits: Array, top_k: int) -> Ids:
    """logits [P, V] -> ids [P, k] by falling logit, equal logits by rising id; NaN counts as -infinity."""
    return np.argsort(-without_nan(logits), axis=1, kind="stable")[:, :top_k]


def selector_scores(
    logits: Array, gate: Array, predecessor: Array, successor: Array, anchor: int, top_k: int
) -> tuple[Ids, Array]:
    """logits [P, V], gate [P, R], predecessor and successor [V, R].

    Returns candidates [P, k] and scores [P, k, k]: scores[i, a, b] of candidate b of row i after candidate a of the row
    before. All rows a of scores[0] are the same: before row 0 there is only the anchor.
    """
    candidates = top_candidates(logits, top_k)
    before = np.concatenate([np.full((1, top_k), anchor, dtype=candidates.dtype), candidates[:-1]])
    edges = np.einsum("par,pr,pbr->pab", predecessor[before], gate, successor[candidates])
    return candidates, edges + np.take_along_axis(logits, candidates, axis=1)[:, None, :]


def selector_scores_loops(
    logits: Array, gate: Array, predecessor: Array, successor: Array, anchor: int, top_k: int
) -> tuple[Ids, Array]:
    """The same, index by index."""
    rows, rank = gate.shape
    candidates = top_candidates(logits, top_k)
    scores = np.zeros((rows, top_k, top_k))
    for i in range(rows):
        for a in range(top_k):
            previous = anchor if i == 0 else candidates[i - 1, a]
            for b in range(top_k):
                token = candidates[i, b]
                edge = sum(predecessor[previous, r] * gate[i, r] * successor[token, r] for r in range(rank))
                scores[i, a, b] = edge + logits[i, token]
    return candidates, scores


def greedy_walk(candidates: Ids, scores: Array) -> list[int]:
    """The proposals, one per row. Of equal scores the first candidate wins."""
    proposals, taken = [], 0
    for i in range(len(candidates)):
        taken = int(np.argmax(scores[i, taken]))
        proposals.append(int(candidates[i, taken]))
    return proposals


def step_scores(
    logits: Array, edges: tuple[Array, Array, Array] | None, before: int, row: int, top_k: int
) -> tuple[Ids, Array]:
    """Candidates [k] of one row and their scores [k] behind the token `before`; edges: gate, predecessor, successor."""
    candidates = top_candidates(logits[row : row + 1], top_k)[0]
    scores = without_nan(logits[row, candidates])
    if edges is not None:
        gate, predecessor, successor = edges
        scores = scores + successor[candidates] @ (predecessor[before] * gate[row])
    return candidates, scores
