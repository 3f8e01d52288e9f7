"""What runs on the device: graphs of a target and its draft, each shape built once and kept.

A round is `propose` (the draft's block) and `verify` (the target on anchor and proposals, which also feeds the rows'
taps to the draft's ring). `advance` is prefill. Nothing here decides anything: no stop, no acceptance, no drawing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, LaneRows, ring_rows
from .cache import LaneCache
from .errors import EngineClosed
from .ggml import Backend, Graph, Tensor, Type
from .models import dflash_graph, qwen35_graph
from .models.dflash import DFlashParams
from .models.dflash_weights import DFlashWeights
from .models.layers import linear
from .models.qwen35 import Qwen35Params
from .models.qwen35_weights import Qwen35Weights

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Models:
    """A target, perhaps its draft, and the weights of both on one device."""

    target: Qwen35Params
    target_weights: Qwen35Weights[Tensor]
    draft: DFlashParams | None = None
    draft_weights: DFlashWeights[Tensor] | None = None

    @property
    def block(self) -> int:
        """Rows of a speculative round: anchor and proposals; 1 without a draft."""
        return 1 if self.draft is None else self.draft.block_size


@dataclass(frozen=True)
class Lattice:
    """What a draft says about the rows 1.. of one lane's block.

    ids [T - 1, k] candidate tokens; first [k] scores of row 1 behind the anchor; edges [T - 2, k, k] scores of
    candidate b (last axis) of a row behind candidate a of the row before. Without a selector a row's scores do not
    depend on the row before.
    """

    ids: Ints
    first: Floats
    edges: Floats


class Shape(Protocol):
    """A retained graph."""

    @property
    def graph(self) -> Graph:
        """What runs."""
        ...


S = TypeVar("S", bound=Shape)


@dataclass
class Counters:
    """How often a retained shape was found, built, dropped."""

    hits: int = 0
    builds: int = 0
    evictions: int = 0


class Shapes(Generic[S]):
    """Graphs of one kind by (lanes, rows), the least recently used dropped beyond `limit`."""

    def __init__(self, build: Callable[[int, int], S], limit: int, counters: Counters) -> None:
        self._build = build
        self._limit = limit
        self._kept: OrderedDict[tuple[int, int], S] = OrderedDict()
        self._counters = counters
        self.closed = False

    def get(self, lanes: int, rows: int) -> S:
        """The graph for this shape, built if need be."""
        if self.closed:
            raise EngineClosed("the engine is closed")
        key = (lanes, rows)
        if key in self._kept:
            self._kept.move_to_end(key)
            self._counters.hits += 1
            return self._kept[key]
        while len(self._kept) >= self._limit:
            self._kept.popitem(last=False)[1].graph.close()
            self._counters.evictions += 1
        shape = self._build(lanes, rows)
        self._counters.builds += 1
        self._kept[key] = shape
        return shape

    def close(self) -> None:
        """Release all graphs. Idempotent."""
        self.closed = True
        while self._kept:
            self._kept.popitem()[1].graph.close()


@dataclass(frozen=True)
class TargetShape:
    """The target on T rows of L lanes. `logits` [V, T * L], or None in prefill; `ring_rows` only with a draft."""

    graph: Graph
    batch: Batch
    logits: Tensor | None
    ring_rows: Tensor | None


@dataclass(frozen=True)
class DraftShape:
    """The draft's block of T rows of L lanes."""

    graph: Graph
    batch: Batch
    lattice: dflash_graph.LatticeNodes


@dataclass
class Round:
    """The retained graphs of one engine. Calls come from one thread at a time."""

    backend: Backend
    models: Models
    cache: LaneCache
    limit: int = 8
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._verify = Shapes(self._build_verify, self.limit, self.counters)
        self._advance = Shapes(self._build_advance, self.limit, self.counters)
        self._propose = Shapes(self._build_propose, self.limit, self.counters)

    def advance(self, work: Sequence[LaneRows], rows: int) -> None:
        """Prefill: run `work` (at most `rows` rows a lane) and keep the state behind it. Pending rows are used up."""
        shape = self._advance.get(len(work), rows)
        self._run_target(shape, work)
        for item in work:
            self.cache.recurrent.set_pending(item.slot, 0)

    def verify(self, work: Sequence[LaneRows]) -> Floats:
        """Logits [L, T, V] behind each row; all lanes have T rows. No row is final until :meth:`accept` says so."""
        shape = self._verify.get(len(work), len(work[0].tokens))
        self._run_target(shape, work)
        for item in work:
            self.accept(item.slot, 0)
        assert shape.logits is not None
        logits: Floats = shape.logits.get().reshape(len(work), shape.batch.rows, -1)
        return logits

    def accept(self, slot: int, rows: int) -> None:
        """The first `rows` rows of the slot's last verified block are final; the rest never was."""
        self.cache.recurrent.set_pending(slot, rows)

    def propose(self, slots: Sequence[int], bases: Sequence[int], anchors: Sequence[int]) -> list[Lattice]:
        """The draft's candidates behind each lane's anchor, which stands at position `bases` of its slot."""
        draft, ring = self.models.draft, self.cache.ring
        assert draft is not None and ring is not None
        masks = [draft.mask_token] * (draft.block_size - 1)
        items = zip(slots, bases, anchors, strict=True)
        work = [LaneRows(slot, base, [anchor, *masks]) for slot, base, anchor in items]
        shape = self._propose.get(len(work), draft.block_size)
        shape.batch.fill(work, ring)
        shape.graph.run()
        return _lattices(shape.lattice, len(work), draft.block_size)

    def close(self) -> None:
        """Release all graphs. Idempotent."""
        for shapes in (self._verify, self._advance, self._propose):
            shapes.close()

    # -- building ----------------------------------------------------------------------------------------------

    def _run_target(self, shape: TargetShape, work: Sequence[LaneRows]) -> None:
        shape.batch.fill(work, self.cache.kv)
        if shape.ring_rows is not None:
            assert self.cache.ring is not None
            shape.ring_rows.set(ring_rows(self.cache.ring, work, shape.batch.rows))
        shape.graph.run()

    def _build_verify(self, lanes: int, rows: int) -> TargetShape:
        return self._build_target(lanes, rows, qwen35_graph.Verify, with_logits=True)

    def _build_advance(self, lanes: int, rows: int) -> TargetShape:
        return self._build_target(lanes, rows, qwen35_graph.Advance, with_logits=False)

    def _build_target(
        self, lanes: int, rows: int, mixing: type[qwen35_graph.Verify | qwen35_graph.Advance], *, with_logits: bool
    ) -> TargetShape:
        graph = Graph(self.backend)
        try:
            m, cache = self.models, self.cache
            batch = Batch.of(graph, lanes, rows)
            taps = () if m.draft is None else m.draft.target_layers
            hidden, kept = qwen35_graph.forward(
                graph, m.target, m.target_weights, cache.kv, mixing(cache.recurrent, batch), batch, taps
            )
            ring = None
            if m.draft is not None and m.draft_weights is not None and cache.ring is not None:
                ring = graph.input("ring_rows", Type.I64, lanes * rows)
                dflash_graph.inject(graph, m.draft, m.draft_weights, cache.ring, kept, batch.positions, ring)
            logits = graph.output(linear(graph, m.target_weights.head, hidden), "logits") if with_logits else None
            graph.build()
            return TargetShape(graph, batch, logits, ring)
        except BaseException:
            graph.close()
            raise

    def _build_propose(self, lanes: int, rows: int) -> DraftShape:
        graph = Graph(self.backend)
        try:
            m, ring = self.models, self.cache.ring
            assert m.draft is not None and m.draft_weights is not None and ring is not None
            batch = Batch.of(graph, lanes, rows)
            lattice = dflash_graph.block(graph, m.draft, m.draft_weights, m.target_weights, ring, batch)
            graph.build()
            return DraftShape(graph, batch, lattice)
        except BaseException:
            graph.close()
            raise


def _lattices(nodes: dflash_graph.LatticeNodes, lanes: int, rows: int) -> list[Lattice]:
    ids: Ints = nodes.ids.get().reshape(lanes, rows - 1, -1)
    k = ids.shape[-1]
    first: Floats = nodes.first.get().reshape(lanes, k)
    if nodes.edges is None:
        edges: Floats = np.zeros((lanes, 0, k, k), np.float32)
    else:
        edges = nodes.edges.get().reshape(lanes, rows - 2, k, k)
    return [Lattice(ids[lane], first[lane], edges[lane]) for lane in range(lanes)]
