"""The references of the draft's ops agree with the formulas written index by index, and with cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
from reference.accept import n_final
from reference.dynamic_conv import dynamic_conv, dynamic_conv_loops
from reference.selector import greedy_walk, selector_scores, selector_scores_loops, step_scores, top_candidates


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("rows", "width", "group", "taps"), [(1, 4, 2, 2), (8, 24, 4, 2), (3, 16, 16, 4), (2, 6, 1, 3)]
)
def test_dynamic_conv(rows: int, width: int, group: int, taps: int, side: int) -> None:
    rng = np.random.default_rng(rows + taps)
    x = rng.standard_normal((rows, width))
    coef = rng.standard_normal((rows, 2 * taps * width // group))
    base = rng.standard_normal((2, taps, width))
    y = dynamic_conv(x, coef, base, side, group)
    np.testing.assert_allclose(y, dynamic_conv_loops(x, coef, base, side, group), atol=1e-13)


def test_dynamic_conv_of_zero_coefficients_is_the_base() -> None:
    x = np.arange(12.0).reshape(3, 4)
    base = np.zeros((2, 2, 4))
    base[1, 0], base[1, 1] = 2, 10
    y = dynamic_conv(x, np.zeros((3, 8)), base, 1, 2)
    np.testing.assert_array_equal(y, 2 * x + 10 * np.concatenate([np.zeros((1, 4)), x[:-1]]))
    assert not dynamic_conv(x, np.zeros((3, 8)), base, 0, 2).any()


def test_dynamic_conv_sides_read_their_own_half() -> None:
    x = np.ones((2, 4))
    coef = np.tile(np.arange(8.0), (2, 1))  # group fastest, then tap, then side
    base = np.zeros((2, 2, 4))
    np.testing.assert_array_equal(dynamic_conv(x, coef, base, 0, 2), [[0, 0, 1, 1], [0 + 2, 0 + 2, 1 + 3, 1 + 3]])
    np.testing.assert_array_equal(dynamic_conv(x, coef, base, 1, 2), [[4, 4, 5, 5], [4 + 6, 4 + 6, 5 + 7, 5 + 7]])


def selector_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in ((7, 40), (7, 12), (40, 12), (40, 12)))  # type: ignore[return-value]


@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_selector_scores(top_k: int) -> None:
    case = selector_case(top_k)
    candidates, scores = selector_scores(*case, anchor=17, top_k=top_k)
    want_candidates, want_scores = selector_scores_loops(*case, anchor=17, top_k=top_k)
    np.testing.assert_array_equal(candidates, want_candidates)
    np.testing.assert_allclose(scores, want_scores, atol=1e-12)
    assert np.ptp(scores[0], axis=0).max() == 0, "row 0 has one predecessor only"


def test_walk_follows_what_it_took() -> None:
    """The walk of the reference = taking, row by row, the best successor of the token before."""
    logits, gate, predecessor, successor = selector_case(3)
    candidates, scores = selector_scores(logits, gate, predecessor, successor, anchor=5, top_k=8)
    token, proposals = 5, []
    for i in range(len(logits)):
        best = max(candidates[i], key=lambda b: (predecessor[token] * gate[i] * successor[b]).sum() + logits[i, b])
        token = int(best)
        proposals.append(token)
    assert greedy_walk(candidates, scores) == proposals
    independent = [int(c) for c in candidates[:, 0]]
    assert proposals != independent, "the case would not notice a selector that is ignored"


def test_walk_is_greedy_not_best_path() -> None:
    candidates = np.array([[1, 2], [3, 4]])
    scores = np.zeros((2, 2, 2))
    scores[0] = [1.0, 0.9]  # candidate 1 first, though ...
    scores[1] = [[0.0, 0.1], [9.0, 0.0]]  # ... candidate 2 has the better continuation
    assert greedy_walk(candidates, scores) == [1, 4]


def test_ties_take_the_first() -> None:
    assert top_candidates(np.array([[1.0, 3.0, 3.0, 2.0]]), 3).tolist() == [[1, 2, 3]]
    assert greedy_walk(np.array([[7, 8]]), np.zeros((1, 2, 2))) == [7]


def test_steps_of_a_walk() -> None:
    """step_scores is the row of selector_scores behind the token that was taken before."""
    logits, gate, predecessor, successor = selector_case(6)
    candidates, scores = selector_scores(logits, gate, predecessor, successor, anchor=5, top_k=8)
    edges = gate, predecessor, successor
    for row in range(len(logits)):
        for a in range(8):
            before = 5 if row == 0 else int(candidates[row - 1, a])
            ids, step = step_scores(logits, edges, before, row, 8)
            np.testing.assert_array_equal(ids, candidates[row])
            np.testing.assert_allclose(step, scores[row, a], atol=1e-12)
    np.testing.assert_array_equal(step_scores(logits, None, 5, 2, 8)[1], np.sort(logits[2])[::-1][:8])


def test_nan_is_the_least_logit() -> None:
    row = np.array([[np.nan, -np.inf, 1.0, np.nan, 2.0]])
    assert top_candidates(row, 5).tolist() == [[4, 2, 0, 1, 3]]


def test_accept_by_hand() -> None:
    tokens = np.array([7, 8, 9])
    for proposals, n in (([7, 8], 3), ([7, 1], 2), ([1, 8], 1), ([7, -1], 2)):
        assert n_final(tokens, np.array(proposals)) == n
    assert n_final(tokens[:1], np.array([7, 8])) == 1 and n_final(tokens[:0], np.array([7, 8])) == 0
    assert n_final(np.array([7, -1, 9]), np.array([7, -1])) == 1, "a row without a token ends them"
