"""GGML_OP_DFLASH mul_mat from Python: against the dequantised weights in float64, and one column at a time."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pyllama_dflash._native import ffi, lib
from pyllama_dflash.ggml import Backend, Graph, Type, choose_device

OWN = [Type.IQ4_XS, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q8_0]
OTHER = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q3_K]
LEVELS = {kind: 2047 for kind in OWN} | {Type.Q8_0: 32767}


def bound(kind: Type, w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What a product [n, m] may be off: activations are rounded to steps of the largest / levels, which adds noise of
    step / sqrt(12) to each term (six deviations allowed), and sums are F32."""
    step = np.abs(x).max(1, keepdims=True) / LEVELS[kind]
    rounding = 6 * step / np.sqrt(12) * np.linalg.norm(w, axis=1)
    return rounding + 4e-6 * np.abs(x).astype(np.float64) @ np.abs(w).T


@pytest.fixture(scope="module", params=[1, 2])
def backend(request):
    opened = Backend(choose_device("cpu")[0], threads=request.param)
    yield opened
    opened.close()


def quantised(kind: Type, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Raw rows of `kind`, and the numbers they stand for."""
    rows, columns = values.shape
    raw = np.empty(rows * kind.row_bytes(columns), np.uint8)
    source = np.ascontiguousarray(values)
    lib.ggml_quantize_chunk(
        int(kind), ffi.from_buffer("float[]", source), ffi.from_buffer(raw), 0, rows, columns, ffi.NULL
    )
    meaning = gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType(int(kind)))
    return raw, meaning.reshape(rows, columns)


def product(backend: Backend, kind: Type, raw: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    rows = raw.nbytes // kind.row_bytes(x.shape[1])
    with Graph(backend, max_nodes=16) as g:
        w, tx = g.input("w", kind, x.shape[1], rows), g.input("x", Type.F32, x.shape[1], len(x))
        y = g.output(g.product(w, tx), "y")
        g.build()
        w.set(raw)
        tx.set(x)
        g.run()
        return y.get().reshape(len(x), rows), dict(g.nodes)


@pytest.mark.parametrize("kind", OWN, ids=lambda k: k.name)
@pytest.mark.parametrize(("k", "m"), [(256, 1), (512, 37), (1536, 129)])
def test_against_float64_and_alone(backend, kind, k, m):
    rng = np.random.default_rng(k + m)
    raw, meaning = quantised(kind, rng.normal(size=(m, k)).astype(np.float32))
    x = rng.normal(size=(19, k)).astype(np.float32) * rng.uniform(0.01, 100, size=(19, 1)).astype(np.float32)
    together, nodes = product(backend, kind, raw, x)
    assert nodes == {"dflash.mul_mat": 1}
    want = x.astype(np.float64) @ meaning.astype(np.float64).T
    assert np.all(np.abs(together - want) <= bound(kind, meaning.astype(np.float64), x))
    for n in (1, 2, 3, 7, 8, 9):
        for start in (0, 5, 19 - n):
            part, _ = product(backend, kind, raw, x[start : start + n])
            assert np.array_equal(part, together[start : start + n])


@pytest.mark.parametrize("kind", OTHER, ids=lambda k: k.name)
def test_other_types_fall_back_visibly(backend, kind):
    rng = np.random.default_rng(5)
    values = rng.normal(size=(9, 512)).astype(np.float32)
    raw, meaning = quantised(kind, values)
    x = rng.normal(size=(8, 512)).astype(np.float32)
    y, nodes = product(backend, kind, raw, x)
    assert nodes == {"MUL_MAT": 1}
    want = x.astype(np.float64) @ meaning.astype(np.float64).T
    assert np.sum((y - want) ** 2) / np.sum(want**2) < 1e-4


def test_rows_that_are_no_super_blocks_fall_back(backend):
    raw, _ = quantised(Type.Q8_0, np.ones((4, 96), np.float32))
    _, nodes = product(backend, Type.Q8_0, raw, np.ones((2, 96), np.float32))
    assert nodes == {"MUL_MAT": 1}
