"""Retained graphs: each made once, found again by what it is, and released as one object."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .answers import Answer
from .batch import Batch
from .errors import EngineClosed
from .ggml import Graph
from .ggml.composed.draft import LatticeNodes

Kind = Literal["advance", "verify", "round"]


@dataclass(frozen=True)
class ShapeKey:
    """What a graph computes: prefill (`advance`), rows whose tokens the histories hold (`verify`), or a block that the
    draft proposes first (`round`); for so many lanes of so many rows. `feeds`: whether the rows' taps go to the ring.

    Models, cache and backend are those of the :class:`Shapes` that keeps it. Nothing depends on the context's length,
    so there are no buckets of it.
    """

    kind: Kind
    lanes: int
    rows: int
    feeds: bool


@dataclass(frozen=True)
class Shape:
    """A retained graph with its inputs, allocator and backend.

    `answer` is what is read behind a run: nothing in prefill. `lattice`: the graph ends behind the draft, whose
    proposals the host walks.
    """

    graph: Graph
    batch: Batch
    answer: Answer | None = None
    lattice: LatticeNodes | None = None


@dataclass
class Counters:
    """How often a retained shape was found, built, dropped."""

    hits: int = 0
    builds: int = 0
    evictions: int = 0


class Shapes:
    """The graphs of one set of models, cache and backend, the least recently used dropped beyond `limit`."""

    def __init__(self, build: Callable[[ShapeKey], Shape], limit: int) -> None:
        self._build = build
        self._limit = limit
        self._kept: OrderedDict[ShapeKey, Shape] = OrderedDict()
        self.counters = Counters()
        self.closed = False

    def get(self, key: ShapeKey) -> Shape:
        """The graph for this key, built if need be. A build that fails leaves nothing behind."""
        if self.closed:
            raise EngineClosed("the engine is closed")
        if key in self._kept:
            self._kept.move_to_end(key)
            self.counters.hits += 1
            return self._kept[key]
        while len(self._kept) >= self._limit:
            self._kept.popitem(last=False)[1].graph.close()
            self.counters.evictions += 1
        shape = self._build(key)
        self.counters.builds += 1
        self._kept[key] = shape
        return shape

    @property
    def keys(self) -> list[ShapeKey]:
        """What is kept, the least recently used first."""
        return list(self._kept)

    def close(self) -> None:
        """Release all graphs. Idempotent."""
        self.closed = True
        while self._kept:
            self._kept.popitem()[1].graph.close()
