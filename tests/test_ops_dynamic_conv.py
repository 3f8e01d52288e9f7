"""GGML_OP_DFLASH dynamic_conv against reference/dynamic_conv.py, with coefficients read where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from op_harness import OpRun
from reference.dynamic_conv import dynamic_conv

# A sum of at most 8 products below 30, with a rounding of each weight, product and sum: 8 * 3 * 30 / 2^24.
TOLERANCE = 5e-5

# channels, groups, taps, rows, lanes
SHAPES = [(1, 1, 1, 1, 1), (6, 3, 2, 2, 2), (33, 33, 4, 4, 3), (48, 3, 8, 16, 2), (257, 1, 2, 8, 1), (130, 5, 2, 7, 5)]

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest) -> Arrays:
    """x [L, T, E], coefficients of both sides [L, T, 2, K, G], base [2, K, E]."""
    channels, groups, taps, rows, lanes = request.param
    rng = np.random.default_rng(channels)
    shapes = ((lanes, rows, channels), (lanes, rows, 2, taps, groups), (2, taps, channels))
    x, coef, base = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return x, coef, base


def run_op(case: Arrays, side: int, n_threads: int = 2) -> np.ndarray:
    """One side; its coefficients and base are views of what both sides share."""
    x, coef, base = case
    (lanes, rows, _, taps, groups), channels = coef.shape, x.shape[2]
    with OpRun(n_threads) as run:
        both = run.source(coef.reshape(lanes, rows, -1))
        row = 4 * 2 * taps * groups
        part = run.view(both, (lanes, rows, taps, groups), (rows * row, row, 4 * groups), 4 * taps * groups * side)
        fixed = run.view(run.source(base), (taps, channels), (4 * channels,), 4 * taps * channels * side)
        node = run.op("dynamic_conv", run.source(x), part, fixed)
        run.compute(node)
        return run.read(node).reshape(x.shape)


def reference(case: Arrays, side: int) -> np.ndarray:
    x, coef, base = (array.astype(np.float64) for array in case)
    group = x.shape[2] // coef.shape[4]
    lanes = range(len(x))
    return np.stack([dynamic_conv(x[i], coef[i].reshape(len(x[i]), -1), base, side, group) for i in lanes])


@pytest.mark.parametrize("side", [0, 1])
def test_against_the_reference(case: Arrays, side: int) -> None:
    np.testing.assert_allclose(run_op(case, side), reference(case, side), rtol=0, atol=TOLERANCE)


def test_lanes_and_leading_rows_alone(case: Arrays) -> None:
    together = run_op(case, 1)
    x, coef, base = case
    for lane in range(len(x)):
        for rows in range(1, x.shape[1] + 1):
            part = x[lane : lane + 1, :rows], coef[lane : lane + 1, :rows], base
            np.testing.assert_array_equal(run_op(part, 1)[0], together[lane, :rows])
    np.testing.assert_array_equal(run_op(case, 1, n_threads=1), together)


def test_the_comparison_can_fail(case: Arrays) -> None:
    """The other side's coefficients are another result."""
    got = run_op(case, 0)
    assert np.abs(got - reference(case, 1)).max() > 100 * TOLERANCE
