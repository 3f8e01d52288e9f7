"""GGML_OP_DFLASH convolution sub-ops against reference/conv.py: output and kept rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_harness import OpRun
from reference import conv

TAPS = 4
# Four products of size 1..10 in float32 and a silu good to a few units in the last place.
TOLERANCE = {"rtol": 0, "atol": 1e-5}

# channels, rows, slots, block capacity, slots of the lanes
SHAPES = [(1, 1, 1, 1, (0,)), (7, 3, 3, 8, (2, -1, 0)), (130, 8, 2, 8, (1,)), (257, 16, 4, 16, (3, 0))]


@pytest.fixture(params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    channels, rows, n_slots, block, slots = request.param
    rng = np.random.default_rng(channels)
    kept = np.full((n_slots, TAPS - 1 + block, channels), np.nan, dtype=np.float32)
    for slot in slots:
        if slot >= 0:
            kept[slot] = rng.standard_normal(kept.shape[1:], dtype=np.float32)
    return {
        "x": rng.standard_normal((len(slots), rows, channels), dtype=np.float32),
        "w": rng.standard_normal((channels, TAPS), dtype=np.float32),
        "rows": kept,
        "slots": np.array(slots, dtype=np.int32),
        "n_pending": np.arange(n_slots, dtype=np.int32) * 5 % (block + 1),
    }


def run_op(name: str, **arrays: Any) -> tuple[Any, Any]:
    """Result and kept rows, in the shapes of x and rows."""
    with OpRun() as run:
        tensors = {key: run.source(value) for key, value in arrays.items()}
        node = run.op(name, *tensors.values())
        run.compute(node)
        like = arrays.get("x", arrays["rows"])
        return run.read(node).reshape(like.shape), run.read(tensors["rows"]).reshape(arrays["rows"].shape)


def test_verify(case: dict[str, Any]) -> None:
    y, rows = run_op("conv_verify", **case)
    want_y, want_rows = conv.verify(**case)
    np.testing.assert_allclose(y, want_y, **TOLERANCE)
    np.testing.assert_array_equal(rows, want_rows)


@pytest.mark.parametrize("live", [0, 1, 2, None])
def test_advance(case: dict[str, Any], live: int | None) -> None:
    rows = case["x"].shape[1]
    n_rows = np.full(len(case["slots"]), rows if live is None else min(live, rows), dtype=np.int32)
    y, kept = run_op("conv_advance", **case, n_rows=n_rows)
    want_y, want_rows = conv.advance(**case, n_rows=n_rows)
    np.testing.assert_allclose(y, want_y, **TOLERANCE)
    np.testing.assert_array_equal(kept, want_rows)


def test_commit(case: dict[str, Any]) -> None:
    arrays = {key: case[key] for key in ("rows", "slots", "n_pending")}
    result, rows = run_op("conv_commit", **arrays)
    np.testing.assert_array_equal(rows, conv.commit(**arrays))
    np.testing.assert_array_equal(result, rows)


def test_reference_by_elements() -> None:
    """The convolution of the reference, index by index."""
    rng = np.random.default_rng(0)
    window, x, w = rng.standard_normal((3, 2)), rng.standard_normal((5, 2)), rng.standard_normal((2, 4))
    y = conv.causal_conv(window, x, w)
    for t in range(5):
        for c in range(2):
            total = w[c, 3] * x[t, c]
            for back in (1, 2, 3):
                total += w[c, 3 - back] * (x[t - back, c] if t >= back else window[3 + t - back, c])
            assert y[t, c] == pytest.approx(total / (1 + np.exp(-total)), abs=1e-14)
