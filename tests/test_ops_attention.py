"""GGML_OP_DFLASH attention against reference/attention.py, pages of every type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from op_harness import OpRun, decode, encode
from reference import attention as reference

from pyllama_dflash._native import lib

# Weights come from float32 scores of size 10 and smaller (error some 1e-6), values are of size 1..5.
TOLERANCE = {"rtol": 0, "atol": 2e-5}
KINDS = {"f32": lib.GGML_TYPE_F32, "f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}


@dataclass(frozen=True)
class Case:
    """D, heads and rows; one lane per entry of slots, base and n_rows."""

    D: int
    Hq: int
    Hkv: int
    T: int
    slots: tuple[int, ...]
    base: tuple[int, ...]
    n_rows: tuple[int, ...]
    k: str
    v: str
    window: int = 0
    causal: bool = True


CASES = [
    Case(16, 1, 1, 1, (0,), (0,), (1,), "f32", "f32"),
    Case(32, 4, 2, 8, (2, -1, 0), (13, 0, 40), (8, 8, 5), "f16", "f16"),
    Case(64, 6, 1, 8, (1, 0), (30, 64), (8, 3), "q8_0", "f16", window=17),
    Case(128, 8, 2, 8, (0, 1), (50, 7), (8, 8), "f16", "q8_0", window=24, causal=False),
    Case(128, 16, 1, 3, (1,), (95,), (3,), "f32", "q8_0", causal=False),
    Case(256, 12, 2, 40, (0,), (21,), (33,), "q8_0", "q8_0"),
]


def run_case(c: Case, rng: np.random.Generator) -> tuple[Any, Any]:
    """The op's result and the reference's."""
    n_slots, max_pages = max(c.slots) + 2, 8
    n_pages = n_slots * max_pages
    table = rng.permutation(n_pages).astype(np.int32).reshape(n_slots, max_pages)
    lanes = len(c.slots)
    q = rng.standard_normal((lanes, c.T, c.Hq, c.D), dtype=np.float32)
    k, v = (rng.standard_normal((n_pages * 16, c.Hkv, c.D), dtype=np.float32) for _ in "kv")
    slots, base, n_rows = (np.array(x, dtype=np.int32) for x in (c.slots, c.base, c.n_rows))
    scale = c.D**-0.5
    with OpRun() as run:
        pages = [run.source(x, KINDS[kind]) for x, kind in ((k, c.k), (v, c.v))]
        sources = [run.source(x) for x in (table, slots, base, n_rows)]
        node = run.op("attention", run.source(q), *pages, *sources, scale, c.window, c.causal)
        run.compute(node)
        out = run.read(node).reshape(q.shape)
    k, v = (decode(encode(x, KINDS[kind]), x.shape, KINDS[kind]) for x, kind in ((k, c.k), (v, c.v)))
    options: dict[str, Any] = {"scale": scale, "window": c.window, "causal": c.causal}
    return out, reference.attention(q, k, v, table, slots, base, n_rows, **options)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"D{c.D}-{c.k}-{c.v}-w{c.window}-{'causal' if c.causal else 'block'}"
)
def test_attention(case: Case) -> None:
    out, want = run_case(case, np.random.default_rng(case.D))
    np.testing.assert_allclose(out, want, **TOLERANCE)
    for lane, slot in enumerate(case.slots):
        assert not out[lane, case.n_rows[lane] if slot >= 0 else 0 :].any()


def test_visibility_by_elements() -> None:
    """The mask of the reference against the sentences of the contract."""
    base, n_rows = 5, 3
    for window in (0, 1, 2, 4):
        for causal in (True, False):
            mask = reference.visible(base + n_rows, base, n_rows, window, causal)
            for t in range(n_rows):
                for j in range(base + n_rows):
                    p = base + t
                    expected = (j <= p or not causal) and (window == 0 or p - j < window)
                    assert mask[t, j] == expected


def test_reference_of_equal_keys_is_the_mean_of_values() -> None:
    rng = np.random.default_rng(0)
    v = rng.standard_normal((6, 1, 4))
    out = reference.attend(rng.standard_normal((1, 2, 4)), np.ones((6, 1, 4)), v, np.ones((1, 6), dtype=bool), 0.3)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=0), (1, 2, 4)), atol=1e-12)
