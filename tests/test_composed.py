"""Every op of the family composed of ggml's ops, beside its kernel and beside its NumPy reference.

Lanes are padded, permuted and doubled; slots nobody names hold NaN and -0, which must survive bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from composed_runs import Lanes, OpRun, set_pending
from reference import attention as attention_reference
from reference import conv as conv_reference
from reference import gdn as gdn_reference
from reference.dynamic_conv import dynamic_conv as dynamic_conv_reference

from pyllama_dflash import family
from pyllama_dflash._native import ffi, lib
from pyllama_dflash.ggml import Backend, Type
from pyllama_dflash.ggml.composed.gdn import Rows

# Sums of up to 128 F32 products of size 1, in another order and without fma: a few 1e-6 a row.
TOLERANCE = {"rtol": 0, "atol": 3e-5}


# -- gated delta net ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """State width, heads, block capacity, slots, and the lanes."""

    S: int
    Hk: int
    Hv: int
    B: int
    N: int
    lanes: Lanes

    def __str__(self) -> str:
        return f"S{self.S}-Hk{self.Hk}-Hv{self.Hv}-B{self.B}-slots{self.lanes.slots}-T{self.lanes.T}"

    @property
    def pending(self) -> Any:
        """Another count for every slot: 0..B."""
        return np.arange(self.N) * 3 % (self.B + 1)


SHAPES = [
    Shape(16, 1, 1, 1, 1, Lanes((0,), 1)),
    Shape(16, 2, 6, 8, 5, Lanes((3, -1, 0), 5, (5, 5, 2))),
    Shape(32, 3, 3, 8, 3, Lanes((1, 0), 8, (0, 7))),
    Shape(64, 1, 2, 16, 3, Lanes((2,), 16, (3,))),
    Shape(128, 2, 4, 8, 4, Lanes((0, 2, 0), 7)),  # the second lane that names slot 0 is padded
    Shape(16, 1, 2, 4, 6, Lanes((5, 99, -7, 1), 3, (1, 3, 3, 3))),
]
REFUSED = [
    Shape(24, 2, 4, 8, 4, Lanes((3, -1, 1), 5)),  # a state width without a kernel
    Shape(16, 1, 2, 17, 3, Lanes((1, 2), 17)),  # a block longer than any kernel's
]


class Gdn:
    """Random rows, states and logs."""

    def __init__(self, s: Shape, seed: int) -> None:
        rng, lanes = np.random.default_rng(seed), len(s.lanes.slots)
        self.s = s

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32)

        unit = np.float32(s.S**-0.5)
        self.rows = (
            normal(lanes, s.lanes.T, s.Hk, s.S) * unit,
            normal(lanes, s.lanes.T, s.Hk, s.S) * unit,
            normal(lanes, s.lanes.T, s.Hv, s.S),
            -np.abs(normal(lanes, s.lanes.T, s.Hv)),
            rng.random((lanes, s.lanes.T, s.Hv), dtype=np.float32),
        )
        self.state = normal(s.N, s.Hv, s.S, s.S) * np.float32(0.5)
        gate = rng.random((s.N, s.B, s.Hv, 1), dtype=np.float32)
        self.log = np.concatenate([gate, normal(s.N, s.B, s.Hv, s.S) * unit, normal(s.N, s.B, s.Hv, s.S)], axis=-1)
        for slot in set(range(s.N)) - set(s.lanes.slots):
            self.state[slot].flat[:2] = np.nan, -0.0
            self.log[slot] = np.nan
        for slot in range(s.N):  # a row that is not pending may hold anything
            self.log[slot, s.pending[slot] :] = np.nan

    def run(self, backend: Backend, op: str, pending: Any = None) -> tuple[Any, ...]:
        """Result, state, log, paths."""
        s = self.s
        with OpRun(backend, s.lanes) as run:
            memory = run.recurrent(s.S, s.Hv, 1, s.B, s.N)
            rows = Rows(*(run.source(x) for x in self.rows))
            b = run.batch
            if op == "gdn_commit":
                node = family.gdn_commit(run.graph, b, memory, 0)
            else:
                node = getattr(family, op)(run.graph, b, memory, 0, rows)
            memory.state[0].set(self.state)
            memory.log[0].set(self.log)
            set_pending(memory, s.pending if pending is None else pending)
            out = run.result(node)
            return out, memory.state[0].get(), memory.log[0].get(), dict(run.graph.paths)

    def reference(self, op: str) -> tuple[Any, ...]:
        """Result, state, log."""
        slots, s = kept_slots(self.s.lanes.slots, self.s.N), self.s
        rows = [x.astype(np.float64) for x in self.rows]
        memory = (self.state.astype(np.float64), self.log.astype(np.float64), slots, s.pending)
        if op == "gdn_verify":
            return gdn_reference.verify(*rows, *memory)
        if op == "gdn_advance":
            n_rows = np.array([item.rows for item in s.lanes.work])
            return *gdn_reference.advance(*rows, *memory, n_rows), self.log
        state = gdn_reference.commit(*memory)
        return state, state, self.log


def kept_slots(slots: tuple[int, ...], n: int) -> Any:
    """Slots with -1 for padded lanes."""
    live = [0 <= slot < n and slot not in slots[:lane] for lane, slot in enumerate(slots)]
    return np.array([slot if alive else -1 for slot, alive in zip(slots, live, strict=True)])


def untouched(slots: tuple[int, ...], n: int) -> list[int]:
    return sorted(set(range(n)) - set(slots))


GDN_OPS = ["gdn_verify", "gdn_advance", "gdn_commit"]


@pytest.mark.parametrize("op", GDN_OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gdn(kernels, composed, shape, op):
    case = Gdn(shape, shape.S)
    theirs, ours = case.run(kernels, op), case.run(composed, op)
    assert (theirs[3], ours[3]) == ({(op, "kernel"): 1}, {(op, "composed"): 1})
    check_gdn(case, op, ours)
    for a, b in zip(theirs[:3], ours[:3], strict=True):
        np.testing.assert_allclose(b, a, **TOLERANCE)


@pytest.mark.parametrize("op", GDN_OPS)
@pytest.mark.parametrize("shape", REFUSED, ids=str)
def test_gdn_that_no_kernel_takes(kernels, shape, op):
    case = Gdn(shape, shape.S)
    ours = case.run(kernels, op)
    assert ours[3] == {(op, "composed"): 1}
    check_gdn(case, op, ours)


def check_gdn(case: Gdn, op: str, ours: tuple[Any, ...]) -> None:
    """Against the reference; and what nobody names is the same to the bit."""
    s = case.s
    for name, got, want in zip(("result", "state", "log"), ours, case.reference(op), strict=False):
        np.testing.assert_allclose(got.reshape(want.shape), want, **TOLERANCE, err_msg=name)
    for slot in untouched(s.lanes.slots, s.N):
        assert ours[1][slot].tobytes() == case.state[slot].tobytes()
        assert ours[2][slot].tobytes() == case.log[slot].tobytes()
    rest = s.lanes.T if op == "gdn_verify" else 0
    assert ours[2][:, rest:].tobytes() == case.log[:, rest:].tobytes(), "log rows past the block were written"


@pytest.mark.parametrize("op", GDN_OPS)
def test_gdn_lane_with_wrong_count_is_padded(kernels, composed, op):
    case = Gdn(Shape(16, 1, 2, 4, 4, Lanes((2, 1, 3), 3)), 5)
    runs = [case.run(backend, op, np.array([0, 5, 2, -1])) for backend in (kernels, composed)]
    for out, state, log, _ in runs:
        assert state[[1, 3]].tobytes() == case.state[[1, 3]].tobytes()
        assert log[[1, 3]].tobytes() == case.log[[1, 3]].tobytes()
        assert op == "gdn_commit" or not out[1:].any()
    for a, b in zip(runs[0][:3], runs[1][:3], strict=True):
        np.testing.assert_allclose(b, a, **TOLERANCE)


def test_gdn_replay_of_composed_rows_is_their_forward_pass(composed):
    """Promoting a verified block leaves the state that advancing over the same rows leaves, to the bit."""
    shape = Shape(32, 1, 2, 8, 1, Lanes((0,), 6))
    case = Gdn(shape, 3)
    case.log[:] = 0
    _, state, log, _ = case.run(composed, "gdn_verify", np.array([0]))
    _, advanced, _, _ = case.run(composed, "gdn_advance", np.array([0]))
    case.state, case.log = state, log
    _, replayed, _, _ = case.run(composed, "gdn_commit", np.array([6]))
    assert np.array_equal(replayed, advanced)


# -- convolution -------------------------------------------------------------------------------------------------------

CONV_SHAPES = [  # channels, block capacity, slots, lanes
    (1, 1, 1, Lanes((0,), 1)),
    (7, 8, 5, Lanes((2, -1, 0), 3, (3, 3, 1))),
    (130, 8, 2, Lanes((1,), 8, (2,))),
    (257, 16, 5, Lanes((3, 0, 3), 16, (0, 16, 16))),
    (5, 4, 6, Lanes((5, 99, -7, 1), 3, (3, 3, 3, 2))),
    (16, 17, 3, Lanes((1, 2), 17)),
]
CONV_OPS = ["conv_verify", "conv_advance", "conv_commit"]


@pytest.mark.parametrize("op", CONV_OPS)
@pytest.mark.parametrize("shape", CONV_SHAPES, ids=str)
def test_conv(kernels, composed, shape, op):
    channels, block, n_slots, lanes = shape
    rng = np.random.default_rng(channels)
    x = rng.standard_normal((len(lanes.slots), lanes.T, channels), dtype=np.float32)
    w = rng.standard_normal((channels, 4), dtype=np.float32)
    kept = rng.standard_normal((n_slots, 3 + block, channels), dtype=np.float32)
    for slot in untouched(lanes.slots, n_slots):
        kept[slot].flat[:] = np.resize(np.array([np.nan, -0.0], np.float32), kept[slot].size)
    pending = np.arange(n_slots) * 5 % (block + 1)

    def run(backend: Backend) -> tuple[Any, Any, Any]:
        with OpRun(backend, lanes) as run:
            memory = run.recurrent(1, 1, channels, block, n_slots)
            sources = run.source(x), run.source(w)
            if op == "conv_commit":
                node = family.conv_commit(run.graph, run.batch, memory, 0, 4)
            else:
                node = getattr(family, op)(run.graph, run.batch, memory, 0, *sources)
            memory.rows[0].set(kept)
            set_pending(memory, pending)
            return run.result(node), memory.rows[0].get().reshape(kept.shape), dict(run.graph.paths)

    slots, n_rows = kept_slots(lanes.slots, n_slots), np.array([item.rows for item in lanes.work])
    if op == "conv_commit":
        want_rows = conv_reference.commit(kept, slots, pending)
        want = want_rows
    elif op == "conv_verify":
        want, want_rows = conv_reference.verify(x, w, kept, slots, pending)
    else:
        want, want_rows = conv_reference.advance(x, w, kept, slots, pending, n_rows)
    out, rows, paths = run(composed)
    assert paths == {(op, "composed"): 1}
    np.testing.assert_allclose(out.reshape(want.shape), want, rtol=0, atol=1e-5)
    assert rows.tobytes() == want_rows.astype(np.float32).tobytes()
    theirs = run(kernels)
    np.testing.assert_allclose(out, theirs[0], rtol=0, atol=1e-5)
    assert rows.tobytes() == theirs[1].tobytes()
    assert theirs[2] == {(op, "composed" if block > 16 else "kernel"): 1}


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """Widths, heads, lanes, page type, window, causal."""

    D: int
    Hq: int
    Hkv: int
    lanes: Lanes
    kind: Type
    window: int = 0
    causal: bool = True
    kernel: bool = True


ATTENTION = [
    Attention(16, 1, 1, Lanes((0,), 1, (1,), (0,)), Type.F32),
    Attention(32, 4, 2, Lanes((2, -1, 0), 8, (8, 8, 5), (13, 0, 40)), Type.F16),
    Attention(64, 6, 1, Lanes((1, 0), 8, (8, 3), (30, 64)), Type.Q8_0, window=17),
    Attention(128, 8, 2, Lanes((0, 1), 8, (8, 8), (50, 7)), Type.F16, window=24, causal=False),
    Attention(128, 16, 1, Lanes((1, 1), 3, (3, 2), (95, 7)), Type.F32, causal=False),
    Attention(64, 4, 4, Lanes((1, 0), 7, (7, 0), (0, 3)), Type.F16, window=1),
    Attention(32, 2, 1, Lanes((0, 1, 1), 4, (4, 4, 4), (126, 125, 124)), Type.F16),  # rows past the table
    Attention(32, 2, 1, Lanes((0, 1, 1), 4, (4, 4, 4), (126, 125, 124)), Type.F16, causal=False, window=9),
    Attention(64, 24, 2, Lanes((1, 0), 5, (5, 4), (33, 2)), Type.F16, kernel=False),  # 12 query heads a kv head
    Attention(24, 3, 1, Lanes((0,), 6, (6,), (20,)), Type.F32, window=8, kernel=False),
]


def page_rows(rng: np.random.Generator, n: int, c: Attention) -> tuple[Any, Any]:
    """Raw pages of a type and the numbers they stand for, [16 P, Hkv, D]."""
    values = rng.standard_normal((n, c.Hkv, c.D), dtype=np.float32)
    if c.kind == Type.F32:
        return values, values
    if c.kind == Type.F16:
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    raw, out = ffi.new("char[]", values.nbytes), np.empty_like(values)
    size = lib.ggml_quantize_chunk(
        int(c.kind), ffi.from_buffer("float[]", values), raw, 0, n * c.Hkv, c.D, ffi.NULL
    )  # fmt: skip
    assert lib.dflash_to_float(int(c.kind), raw, ffi.from_buffer("float[]", out), out.size)
    return bytes(ffi.buffer(raw, size)), out


@pytest.mark.parametrize(
    "c", ATTENTION, ids=lambda c: f"D{c.D}-{c.Hq}x{c.Hkv}-{c.kind.name}-w{c.window}-{'causal' if c.causal else 'block'}"
)
def test_attention(kernels, composed, c):
    rng, lanes = np.random.default_rng(c.D), c.lanes
    n_slots, max_pages = max(lanes.slots) + 2, 8
    table = rng.permutation(n_slots * max_pages).astype(np.int32).reshape(n_slots, max_pages)
    n_pages = table.size + 1
    q = rng.standard_normal((len(lanes.slots), lanes.T, c.Hq, c.D), dtype=np.float32)
    (raw_k, k), (raw_v, v) = (page_rows(rng, 16 * n_pages, c) for _ in "kv")

    def run(backend: Backend) -> tuple[Any, Any]:
        with OpRun(backend, lanes) as run:
            kv = run.paged(c.D, c.Hkv, table, n_pages, c.kind)
            kv.k[0].set(raw_k)
            kv.v[0].set(raw_v)
            options = {"scale": c.D**-0.5, "window": c.window, "causal": c.causal}
            node = family.attention(run.graph, run.batch, kv, run.source(q), kv.k[0], kv.v[0], **options)
            return run.result(node).reshape(q.shape), dict(run.graph.paths)

    out, paths = run(composed)
    theirs, their_paths = run(kernels)
    assert paths == {("attention", "composed"): 1}
    assert their_paths == {("attention", "kernel" if c.kernel else "composed"): 1}
    np.testing.assert_allclose(out, theirs, **TOLERANCE)
    if max(b + r for b, r in zip(lanes.base, lanes.rows, strict=True)) <= 16 * max_pages:
        slots, base, n_rows = (np.array(x) for x in (lanes.slots, lanes.base, lanes.rows))
        options = {"scale": c.D**-0.5, "window": c.window, "causal": c.causal}
        want = attention_reference.attention(q, k, v, table, slots, base, n_rows, **options)
        np.testing.assert_allclose(out, want, **TOLERANCE)
    zeros = out[theirs == 0]
    assert not zeros.any()


def test_attention_does_not_read_what_no_row_sees(composed):
    """Pages behind the block and of other slots hold NaN."""
    lanes = Lanes((1, 0), 4, (4, 2), (20, 0))
    rng, table = np.random.default_rng(1), np.arange(8, dtype=np.int32).reshape(2, 4)
    pages = np.full((16 * 9, 1, 32), np.nan, np.float32)
    pages[64 : 64 + 24] = pages[:2] = 1
    with OpRun(composed, lanes) as run:
        kv = run.paged(32, 1, table, 9, Type.F32)
        kv.k[0].set(pages)
        kv.v[0].set(pages)
        q = run.source(rng.standard_normal((2, 4, 2, 32), dtype=np.float32))
        node = family.attention(run.graph, run.batch, kv, q, kv.k[0], kv.v[0], scale=0.1, window=0, causal=True)
        out = run.result(node)
    np.testing.assert_allclose(out[0], 1, atol=1e-6)
    np.testing.assert_allclose(out[1, :2], 1, atol=1e-6)
    assert not out[1, 2:].any()


# -- dynamic convolution -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 3, 8, 9])
@pytest.mark.parametrize(("block", "lanes"), [(1, 1), (2, 3), (7, 2), (16, 1)])
def test_dynamic_conv(kernels, composed, taps, block, lanes):
    width, groups, rng = 48, 6, np.random.default_rng(taps * block)
    x = rng.standard_normal((lanes * block, width), dtype=np.float32)
    coef = rng.standard_normal((lanes * block, groups * taps * 2), dtype=np.float32)
    base = rng.standard_normal((2, taps, width), dtype=np.float32)

    def run(backend: Backend, side: int) -> tuple[Any, Any]:
        with OpRun(backend, Lanes((0,) * lanes, block)) as run:
            sources = (run.source(x), run.source(coef), run.source(base))
            node = family.dynamic_conv(run.graph, *sources, side, block)
            return run.result(node).reshape(x.shape), dict(run.graph.paths)

    for side in (0, 1):
        (out, paths), (theirs, their_paths) = run(composed, side), run(kernels, side)
        parts = [slice(i * block, (i + 1) * block) for i in range(lanes)]
        want = np.concatenate([dynamic_conv_reference(x[p], coef[p], base, side, width // groups) for p in parts])
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
        np.testing.assert_allclose(theirs, want, rtol=0, atol=2e-5)
        assert paths == {("dynamic_conv", "composed"): 1}
        assert their_paths == {("dynamic_conv", "kernel" if taps <= 8 else "composed"): 1}
