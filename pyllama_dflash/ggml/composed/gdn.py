"""Gated delta rule with a replay log, row by row.

A log row is (gate | key | delta), and its transition of a state is  s[j, i] <- gate s[j, i] + k[i] delta[j].
Shapes: state [S, S, Hv, N] with key i fastest, log [2 S + 1, Hv, B, N], q, k [S, Hk, T, L], v [S, Hv, T, L], decay,
beta [Hv, T, L]. E = (2 S + 1) Hv numbers of a log row.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph import Graph
from ..ops import need
from ..tensors import Tensor, Type
from .rows import Kept, Shown, keep, pick, show, stack


@dataclass(frozen=True)
class Replay:
    """What is pending: read I32, write I64 [L] name the lanes' slots, for a padded lane one that no lane has.

    rows I32 [B * L]: log row t of lane l is l * B + t while it is pending, B * L afterwards: `neutral` F32 [E], the row
    (1 | 0 | -0), whose transition changes no bit of a state.
    """

    read: Tensor
    write: Tensor
    rows: Tensor
    neutral: Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, checked against the memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def check(self, state: Tensor) -> None:
        """ShapeError unless all of them fit `state`."""
        s, hv = state.shape[1:3]
        hk, (t, lanes) = self.k.shape[1], self.v.shape[2:]
        need(self.q.shape == self.k.shape == (s, hk, t, lanes) and hv % hk == 0, "gdn", "q, k [S, Hk, T, L]", self.q)
        need(self.v.shape == (s, hv, t, lanes), "gdn", "v [S, Hv, T, L]", self.v, state)
        need(self.decay.shape == self.beta.shape == (hv, t, lanes, 1), "gdn", "decay, beta [Hv, T, L]", self.decay)


def commit(g: Graph, state: Tensor, log: Tensor, at: Replay) -> Tensor:
    """Promote the states of the lanes' slots. `state` behind the write."""
    return _store(g, state, promoted(g, state, log, at), at)


def verify(g: Graph, rows: Rows, state: Tensor, log: Tensor, at: Replay, kept: Kept, shown: Shown) -> Tensor:
    """Promote and store, then run the rows without storing, and log them. -> [S, Hv, T, L]."""
    rows.check(state)
    current = promoted(g, state, log, at)
    _store(g, state, current, at)
    runner = _Runner(g, rows)
    logged, seen = [], []
    for t in range(runner.n_rows):
        row = runner.log_row(current, t)
        current = transition(g, current, row)
        logged.append(g.reshape(row, row.shape[0] * row.shape[1], row.shape[2]))
        seen.append(runner.read(current, t))
    width, block = logged[0].shape[0], log.shape[2] * log.shape[3]
    new = g.reshape(stack(g, logged), width, runner.n_rows * runner.n_lanes)
    keep(g, g.reshape(log, width, block), new, kept)
    return runner.result(seen, shown)


def advance(g: Graph, rows: Rows, state: Tensor, log: Tensor, at: Replay, taken: Tensor, shown: Shown) -> Tensor:
    """Promote, run the rows and store. taken I32 [L, T]: l for a live row of lane l, else L, which changes nothing."""
    rows.check(state)
    current = promoted(g, state, log, at)
    runner = _Runner(g, rows)
    seen = []
    for t in range(runner.n_rows):
        row = runner.log_row(current, t)
        flat = g.reshape(row, row.shape[0] * row.shape[1], row.shape[2])
        live = g.view(taken, (runner.n_lanes,), (), t * taken.strides[1])
        current = transition(g, current, g.reshape(pick(g, flat, at.neutral, live), *row.shape))
        seen.append(runner.read(current, t))
    _store(g, state, current, at)
    return runner.result(seen, shown)


def promoted(g: Graph, state: Tensor, log: Tensor, at: Replay) -> Tensor:
    """The lanes' states behind what is pending, [S, S, Hv, L]."""
    s, _, heads, slots = state.shape
    block, lanes, width = log.shape[2], at.read.shape[0], (2 * s + 1) * heads
    need(state.type == log.type == Type.F32 and log.shape == (2 * s + 1, heads, block, slots), "gdn", "log", state, log)
    current = g.reshape(g.get_rows(g.reshape(state, s * s * heads, slots), at.read), s, s, heads, lanes)
    logs = g.reshape(g.get_rows(g.reshape(log, width * block, slots), at.read), width, block * lanes)
    rows = g.reshape(pick(g, logs, at.neutral, at.rows), 2 * s + 1, heads, block, lanes)
    for t in range(block):
        row = g.view(rows, (2 * s + 1, heads, lanes), (rows.strides[1], rows.strides[3]), t * rows.strides[2])
        current = transition(g, current, row)
    return current


def transition(g: Graph, state: Tensor, row: Tensor) -> Tensor:
    """gate s + k delta^T for state [S, S, Hv, L] and log row [2 S + 1, Hv, L]."""
    s, _, heads, lanes = state.shape
    strides = row.strides[1:3]
    gate = g.view(row, (1, 1, heads, lanes), (4, *strides))
    key = g.view(row, (s, 1, heads, lanes), (4 * s, *strides), 4)
    delta = g.view(row, (1, s, heads, lanes), (4, *strides), 4 + 4 * s)
    return g.add(g.mul(state, gate), g.mul(g.repeat(key, *state.shape), delta))


def _store(g: Graph, state: Tensor, values: Tensor, at: Replay) -> Tensor:
    width, slots = values.nelements // values.shape[3], state.shape[3]
    stored = g.set_rows(g.reshape(state, width, slots), g.reshape(values, width, values.shape[3]), at.write)
    return g.reshape(g.effect(stored), *state.shape)


class _Runner:
    """Row t of all lanes, one after another."""

    def __init__(self, g: Graph, rows: Rows) -> None:
        self._g, self._rows = g, rows
        self.width, self.heads, self.n_rows, self.n_lanes = rows.v.shape
        self._gate = g.exp(g.cont(rows.decay))

    def _row(self, x: Tensor, t: int) -> Tensor:
        """Row t of x [S, H, T, L], with heads repeated to value head h's key head h mod H. [S, Hv, L]."""
        row = self._g.view(x, (self.width, x.shape[1], self.n_lanes), (x.strides[1], x.strides[3]), t * x.strides[2])
        return self._g.repeat(row, self.width, self.heads, self.n_lanes)

    def _number(self, x: Tensor, t: int) -> Tensor:
        """Row t of a number per head, x [Hv, T, L]. [1, Hv, L]."""
        return self._g.view(x, (1, self.heads, self.n_lanes), (4, x.strides[2]), t * x.strides[1])

    def _times(self, state: Tensor, x: Tensor) -> Tensor:
        """s . x of every value column; x [S, Hv, L]. [S, Hv, L]."""
        column = self._g.reshape(x, self.width, 1, self.heads, self.n_lanes)
        return self._g.reshape(self._g.mul_mat(state, column), self.width, self.heads, self.n_lanes)

    def log_row(self, state: Tensor, t: int) -> Tensor:
        """(gate | k | delta) with delta = beta (v - gate (s . k)). [2 S + 1, Hv, L]."""
        g, gate, key = self._g, self._number(self._gate, t), self._row(self._rows.k, t)
        missing = g.sub(self._row(self._rows.v, t), g.mul(self._times(state, key), gate))
        return g.concat(g.concat(gate, key, 0), g.mul(missing, self._number(self._rows.beta, t)), 0)

    def read(self, state: Tensor, t: int) -> Tensor:
        """(s . q) / sqrt(S). [S Hv, L]."""
        seen = self._times(state, self._row(self._rows.q, t))
        return self._g.reshape(self._g.scale(seen, self.width**-0.5), self.width * self.heads, self.n_lanes)

    def result(self, seen: list[Tensor], shown: Shown) -> Tensor:
        """All rows, [S, Hv, T, L], zeros where they are not shown."""
        return self._g.reshape(show(self._g, stack(self._g, seen), shown), *self._rows.v.shape)
