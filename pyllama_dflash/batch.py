"""The inputs of a graph over L lanes of T rows each. Row t of lane l is column l * T + t."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import LaneCache
from .errors import RequestError
from .ggml import Graph, Tensor, Type
from .lane_rows import LaneRows
from .places import Places

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


@dataclass
class Batch:
    """Which lanes run: slots, live (rows that count) I32 [L]. What the device makes of it: the fields of
    :class:`Places`. And `asked`, what single ops need.

    A lane with fewer than T rows is filled with dead rows: they write to the cache's spare page and are seen by nobody.
    While the same lanes run with the same number of rows, nothing is sent.
    """

    lanes: int
    rows: int
    slots: Tensor
    live: Tensor
    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    ring_rows: Tensor
    base: Tensor
    asked: AskedInputs
    places: Places | None = None
    _sent: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, graph: Graph, cache: LaneCache, lanes: int, rows: int, fill: int = -1) -> Batch:
        """Make the inputs in `graph`. `fill`: the token of rows behind the anchor, -1: as in the slots' histories."""
        slots, live = (graph.input(name, Type.I32, lanes) for name in ("slots", "live"))
        at = Places.of(graph, cache, slots, live, rows, fill)
        return cls(
            lanes, rows, slots, live, at.tokens, at.positions, at.kv_rows, at.ring_rows, at.base, AskedInputs(graph), at
        )

    def fill(self, work: Sequence[LaneRows], n_slots: int) -> None:
        """Upload what is new in a run. RequestError before anything is when a slot is not there or named twice."""
        lanes = [(item.slot, item.rows) for item in work]
        if lanes != self._sent:
            check_slots(work, n_slots)
            self.slots.set(np.array([slot for slot, _ in lanes], np.int32))
            self.live.set(np.array([rows for _, rows in lanes], np.int32))
            self._sent = lanes
        if self.places is not None:
            self.places.cache.kv.send()
            self.places.fill_in(work)
        self.asked.fill(work)


def check_slots(work: Sequence[LaneRows], n_slots: int) -> None:
    """RequestError when a lane with rows names a slot that is not there, or one that another lane names too.

    The kernels treat such a lane as padded; a caller that means it has lost track of its lanes.
    """
    named: set[int] = set()
    for lane, item in enumerate(work):
        if not item.rows:
            continue
        if not 0 <= item.slot < n_slots:
            raise RequestError(f"slot of lane {lane}", item.slot, f"0..{n_slots - 1}")
        if item.slot in named:
            raise RequestError(f"slot of lane {lane}", item.slot, "a slot that no other lane of the run has")
        named.add(item.slot)
