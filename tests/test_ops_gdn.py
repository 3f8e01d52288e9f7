"""GGML_OP_DFLASH gated delta net sub-ops against reference/gdn.py: output, state and log.

Bit-exact claims (replay = forward, independence of lanes and threads) are checked natively in test-dflash-ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from op_harness import OpRun, Refused
from reference import gdn

# Values here are of size 1. Per token a dot product of up to 128 float32 terms loses a few 1e-6 at worst.
TOLERANCE = {"rtol": 0, "atol": 2e-5}


@dataclass(frozen=True)
class Shape:
    """Sizes of a case and the slots of its lanes."""

    S: int
    Hk: int
    Hv: int
    T: int
    N: int
    B: int
    slots: tuple[int, ...]

    def __str__(self) -> str:
        return f"S{self.S}-Hk{self.Hk}-Hv{self.Hv}-T{self.T}-slots{self.slots}"


SHAPES = [
    Shape(16, 1, 1, 1, 1, 1, (0,)),
    Shape(16, 2, 6, 5, 4, 8, (3, -1, 0)),
    Shape(32, 3, 3, 8, 2, 8, (1, 0)),
    Shape(64, 1, 2, 16, 3, 16, (2,)),
    Shape(128, 2, 4, 7, 3, 8, (0, 2)),
]


class Case:
    """Random rows, states and logs. Slots without a lane hold NaN."""

    def __init__(self, s: Shape, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        lanes = len(s.slots)
        self.slots = np.array(s.slots, dtype=np.int32)

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32)

        unit = np.float32(s.S**-0.5)
        self.rows = (
            normal(lanes, s.T, s.Hk, s.S) * unit,
            normal(lanes, s.T, s.Hk, s.S) * unit,
            normal(lanes, s.T, s.Hv, s.S),
            -np.abs(normal(lanes, s.T, s.Hv)),
            rng.random((lanes, s.T, s.Hv), dtype=np.float32),
        )
        self.state = np.full((s.N, s.Hv, s.S, s.S), np.nan, dtype=np.float32)
        self.log = np.full((s.N, s.B, s.Hv, 2 * s.S + 1), np.nan, dtype=np.float32)
        for slot in s.slots:
            if slot >= 0:
                self.state[slot] = normal(s.Hv, s.S, s.S) * 0.5
                gate = rng.random((s.B, s.Hv, 1), dtype=np.float32)
                self.log[slot] = np.concatenate([gate, normal(s.B, s.Hv, s.S) * unit, normal(s.B, s.Hv, s.S)], axis=-1)

    def memory(self, run: OpRun, n_pending: Any) -> list[Any]:
        """state, log, slots, n_pending as sources."""
        return [run.source(x) for x in (self.state, self.log, self.slots, np.asarray(n_pending, dtype=np.int32))]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param  # type: ignore[no-any-return]


def pending_of(s: Shape) -> Any:
    """Another number of pending rows for every slot: 0..B."""
    return np.arange(s.N, dtype=np.int32) * 3 % (s.B + 1)


def test_verify(shape: Shape) -> None:
    case, pending = Case(shape), pending_of(shape)
    with OpRun() as run:
        rows = [run.source(x) for x in case.rows]
        memory = case.memory(run, pending)
        node = run.op("gdn_verify", *rows, *memory)
        run.compute(node)
        out, state, log = run.read(node), run.read(memory[0]), run.read(memory[1])

    want_out, want_state, want_log = gdn.verify(*case.rows, case.state, case.log, case.slots, pending)
    np.testing.assert_allclose(out.reshape(want_out.shape), want_out, **TOLERANCE)
    np.testing.assert_allclose(state.reshape(want_state.shape), want_state, **TOLERANCE)
    np.testing.assert_allclose(log.reshape(want_log.shape), want_log, **TOLERANCE)
    rest = log.reshape(want_log.shape)[:, shape.T :]
    assert rest.tobytes() == case.log[:, shape.T :].tobytes(), "log rows past the block were written"


@pytest.mark.parametrize("live", [0, 1, None])
def test_advance(shape: Shape, live: int | None) -> None:
    case, pending = Case(shape, seed=1), pending_of(shape)
    n_rows = np.full(len(shape.slots), shape.T if live is None else min(live, shape.T), dtype=np.int32)
    with OpRun() as run:
        rows = [run.source(x) for x in case.rows]
        memory = case.memory(run, pending)
        node = run.op("gdn_advance", *rows, *memory, run.source(n_rows))
        run.compute(node)
        out, state, log = run.read(node), run.read(memory[0]), run.read(memory[1])

    want_out, want_state = gdn.advance(*case.rows, case.state, case.log, case.slots, pending, n_rows)
    np.testing.assert_allclose(out.reshape(want_out.shape), want_out, **TOLERANCE)
    np.testing.assert_allclose(state.reshape(want_state.shape), want_state, **TOLERANCE)
    assert log.tobytes() == case.log.tobytes()


def test_commit(shape: Shape) -> None:
    case, pending = Case(shape, seed=2), pending_of(shape)
    with OpRun() as run:
        memory = case.memory(run, pending)
        node = run.op("gdn_commit", *memory)
        run.compute(node)
        out, state = run.read(node), run.read(memory[0])

    want = gdn.commit(case.state, case.log, case.slots, pending)
    np.testing.assert_allclose(state.reshape(want.shape), want, **TOLERANCE)
    assert out.tobytes() == state.tobytes(), "the result is not a view of the state"
    for slot in shape.slots:
        if slot >= 0:  # the kernel's own arithmetic, emulated
            replayed = gdn.replay_float32(case.state[slot], case.log[slot, : pending[slot]])
            np.testing.assert_array_max_ulp(state.reshape(want.shape)[slot], replayed, maxulp=1)


def test_commit_orders_the_next_node() -> None:
    """A verify on the view that commit returns sees the promoted state."""
    s = Shape(32, 1, 2, 4, 2, 8, (1,))
    case = Case(s)
    with OpRun() as run:
        rows = [run.source(x) for x in case.rows]
        state, log, slots, pending = case.memory(run, [0, 3])
        none = run.source(np.zeros(s.N, dtype=np.int32))
        committed = run.op("gdn_commit", state, log, slots, pending)
        node = run.op("gdn_verify", *rows, committed, log, slots, none)
        run.compute(node)  # the commit is in the graph only because the verify depends on it
        out = run.read(node)
    want, _, _ = gdn.verify(*case.rows, case.state, case.log, case.slots, np.array([0, 3], dtype=np.int32))
    np.testing.assert_allclose(out.reshape(want.shape), want, **TOLERANCE)


def test_refusal_has_a_reason() -> None:
    case = Case(SHAPES[1])
    with OpRun() as run:
        rows = [run.source(x) for x in case.rows]
        memory = case.memory(run, np.zeros(4))
        rows[3] = run.source(case.rows[3][:, :4])
        with pytest.raises(Refused, match=r"gdn_verify: g has shape \[6,4,3,1\], must be \[6,5,3,1\]"):
            run.op("gdn_verify", *rows, *memory)


def test_replay_of_the_reference_is_its_forward_pass() -> None:
    """The reference agrees with itself: log rows of a run, replayed, give the state of the run."""
    case = Case(Shape(16, 2, 4, 6, 1, 8, (0,)))
    rows = [x[0].astype(np.float64) for x in case.rows]
    _, state, log = gdn.run(case.state[0].astype(np.float64), *rows)
    np.testing.assert_allclose(gdn.replay(case.state[0].astype(np.float64), log), state, rtol=0, atol=1e-13)


def test_reference_by_elements() -> None:
    """One step of the reference, element by element as the formula reads."""
    case = Case(Shape(16, 1, 2, 1, 1, 1, (0,)))
    q, k, v, g, beta = (x[0, 0].astype(np.float64) for x in case.rows)
    state = case.state[0].astype(np.float64)
    out, new, _ = gdn.step(state, q, k, v, g, beta)
    for h in range(2):
        for j in range(16):
            seen = sum(np.exp(g[h]) * state[h, j, i] * k[0, i] for i in range(16))
            column = [np.exp(g[h]) * state[h, j, i] + k[0, i] * beta[h] * (v[h, j] - seen) for i in range(16)]
            np.testing.assert_allclose(new[h, j], column, rtol=0, atol=1e-12)
            assert out[h, j] == pytest.approx(sum(c * x for c, x in zip(column, q[0], strict=True)) / 4, abs=1e-12)
