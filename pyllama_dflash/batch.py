"""The inputs of a graph over L lanes of T rows each. Row t of lane l is column l * T + t."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import PagedKV, Rows
from .errors import RequestError
from .ggml import Graph, Tensor, Type
from .sampling import SamplingParams

GREEDY = SamplingParams()


@dataclass(frozen=True)
class LaneRows:
    """The rows of one lane in one run: `tokens` stand at positions base, base + 1, ... of `slot`.

    `params` say how the lane draws what comes behind them. A padded lane has slot -1 and no tokens.
    """

    slot: int
    base: int
    tokens: Sequence[int]
    params: SamplingParams = GREEDY


Make = Callable[[Sequence[LaneRows]], NDArray[Any]]


class AskedInputs:
    """Inputs that only some ops need: made when the first of them asks, filled with every run from then on.

    A graph whose ops did not ask for any costs nothing here.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._asked: dict[str, tuple[Tensor, Make]] = {}
        self._filled: dict[str, NDArray[Any]] = {}

    def get(self, name: str, kind: Type, shape: tuple[int, ...], make: Make) -> Tensor:
        """The input of this name. `make` gives a run's values; the very array of the run before is not sent again."""
        if name not in self._asked:
            self._asked[name] = self._graph.input(name, kind, *shape), make
        return self._asked[name][0]

    def fill(self, work: Sequence[LaneRows]) -> None:
        """Upload one run's values."""
        for name, (tensor, make) in self._asked.items():
            values = make(work)
            if values is not self._filled.get(name):
                tensor.set(values)
                self._filled[name] = values


@dataclass(frozen=True)
class Batch:
    """Input tensors: tokens, positions, kv_rows [T * L]; slots, base, live [L]; and `asked`, what single ops need.

    Lanes shorter than T are filled with dead rows: they write to the cache's spare page and are seen by nobody.
    """

    lanes: int
    rows: int
    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    slots: Tensor
    base: Tensor
    live: Tensor
    asked: AskedInputs

    @classmethod
    def of(cls, graph: Graph, lanes: int, rows: int) -> Batch:
        """Make the inputs in `graph`."""
        n, i32 = lanes * rows, Type.I32
        return cls(
            lanes,
            rows,
            tokens=graph.input("tokens", i32, n),
            positions=graph.input("positions", i32, n),
            kv_rows=graph.input("kv_rows", Type.I64, n),
            slots=graph.input("slots", i32, lanes),
            base=graph.input("base", i32, lanes),
            live=graph.input("live", i32, lanes),
            asked=AskedInputs(graph),
        )

    def fill(self, work: Sequence[LaneRows], kv: PagedKV) -> None:
        """Upload one run's rows; `kv` says where their keys and values go. RequestError before anything is uploaded
        when a slot is not there or named twice."""
        check_slots(work, len(kv.pages))
        tokens = np.zeros((self.lanes, self.rows), np.int32)
        positions = np.zeros((self.lanes, self.rows), np.int32)
        for lane, item in enumerate(work):
            n = len(item.tokens)
            tokens[lane, :n] = item.tokens
            positions[lane, :n] = np.arange(item.base, item.base + n)
        self.tokens.set(tokens)
        self.positions.set(positions)
        self.kv_rows.set(physical_rows(kv, work, self.rows))
        self.slots.set(np.array([item.slot for item in work], np.int32))
        self.base.set(np.array([item.base for item in work], np.int32))
        self.live.set(np.array([len(item.tokens) for item in work], np.int32))
        self.asked.fill(work)


def check_slots(work: Sequence[LaneRows], n_slots: int) -> None:
    """RequestError when a lane with rows names a slot that is not there, or one that another lane names too.

    The kernels treat such a lane as padded; a caller that means it has lost track of its lanes.
    """
    named: set[int] = set()
    for lane, item in enumerate(work):
        if not item.tokens:
            continue
        if not 0 <= item.slot < n_slots:
            raise RequestError(f"slot of lane {lane}", item.slot, f"0..{n_slots - 1}")
        if item.slot in named:
            raise RequestError(f"slot of lane {lane}", item.slot, "a slot that no other lane of the run has")
        named.add(item.slot)


def physical_rows(kv: PagedKV, work: Sequence[LaneRows], rows: int) -> Rows:
    """Rows of `kv` for a run's positions, spare rows for dead ones. [L, T]."""
    out: Rows = np.empty((len(work), rows), np.int64)
    for lane, item in enumerate(work):
        n = len(item.tokens)
        out[lane, :n] = kv.rows(item.slot, item.base, n)
        if n < rows:
            out[lane, n:] = kv.spare_rows(rows - n)
    return out
