"""What runs on the device: graphs of a target and its draft, each shape built once and kept.

A round is `propose` (the draft's block) and `verify` (the target on anchor and proposals, which also feeds the rows'
taps to the draft's ring, draws, and compares). `advance` is prefill. Nothing here decides when a request ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from . import family
from .answers import Answer, answer_of
from .batch import Batch, LaneRows, physical_rows
from .cache import LaneCache
from .errors import EngineClosed
from .ggml import Backend, Graph, Tensor, Type
from .ggml.composed.draft import LatticeNodes
from .ggml.dflash_ops import PathName
from .host_path import Floats, Ints, Lattice, walk
from .models import dflash_graph, qwen35_graph
from .models.dflash import DFlashParams
from .models.dflash_weights import DFlashWeights
from .models.layers import linear
from .models.qwen35 import Qwen35Params
from .models.qwen35_weights import Qwen35Weights

COMPOSED_ROWS = 8
"""Rows of a prefill graph whose gated delta rule is composed row by row."""


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
    """The target on T rows of L lanes. `answer` is None in prefill; `ring_rows` only with a draft."""

    graph: Graph
    batch: Batch
    answer: Answer | None
    ring_rows: Tensor | None


@dataclass(frozen=True)
class DraftShape:
    """The draft's block of T rows of L lanes: proposals I32 [T - 1, L], or the lattice that the host walks."""

    graph: Graph
    batch: Batch
    result: Tensor | LatticeNodes


@dataclass
class Round:
    """The retained graphs of one engine. Calls come from one thread at a time.

    `paths` counts by (op, path) how the ops of all graphs built so far are computed, `refusals` says of an op why a
    node of it has no kernel.
    """

    backend: Backend
    models: Models
    cache: LaneCache
    limit: int = 8
    counters: Counters = field(default_factory=Counters)
    paths: Counter[tuple[str, PathName]] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._verify = Shapes(self._build_verify, self.limit, self.counters)
        self._advance = Shapes(self._build_advance, self.limit, self.counters)
        self._propose = Shapes(self._build_propose, self.limit, self.counters)

    def prepare(self) -> None:
        """Build the graphs of one lane: prefill, plain step and, with a draft, its block and the block's check."""
        self._advance.get(1, COMPOSED_ROWS)
        self._verify.get(1, 1)
        if self.models.draft is not None:
            self._propose.get(1, self.models.block)
            self._verify.get(1, self.models.block)

    def probe(self) -> None:
        """Count in `paths` how every op is computed: :meth:`prepare`, and the commits, which no round needs."""
        self.prepare()
        recurrent = self.cache.recurrent
        with Graph(self.backend) as graph:
            batch = Batch.of(graph, 1, 1)
            for i in recurrent.state:
                family.gdn_commit(graph, batch, recurrent, i)
                family.conv_commit(graph, batch, recurrent, i, self.models.target.conv_kernel)
            self._count(graph)

    def advance(self, work: Sequence[LaneRows], rows: int) -> None:
        """Prefill: run `work` (at most `rows` rows a lane) and keep the state behind it. Pending rows are used up."""
        if rows > COMPOSED_ROWS and self._composes_advance:
            for start in range(0, max(len(item.tokens) for item in work), COMPOSED_ROWS):
                self.advance([_part(item, start) for item in work], COMPOSED_ROWS)
            return
        shape = self._advance.get(len(work), rows)
        self._run_target(shape, work)
        for item in work:
            if item.tokens:
                self.cache.recurrent.use_up_pending(item.slot)

    def verify(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """Run [anchor, *proposals] of each lane; the tokens of the lane that are final, as many as it has rows at most.

        So many rows are pending in its slot afterwards. A lane without any is padded, or its logits are not finite.
        """
        shape = self._verify.get(len(work), max(len(item.tokens) for item in work))
        self._run_target(shape, work)
        assert shape.answer is not None
        final, recurrent = shape.answer.read(work), self.cache.recurrent
        told = recurrent.note_pending if shape.answer.on_device else recurrent.set_pending
        for item, tokens in zip(work, final, strict=True):
            if item.tokens:
                told(item.slot, len(tokens))
        return final

    def propose(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """The draft's proposals behind each lane's anchor, the one token of its rows; none for a padded lane."""
        draft, ring = self.models.draft, self.cache.ring
        assert draft is not None and ring is not None
        masks = [draft.mask_token] * (draft.block_size - 1)
        shape = self._propose.get(len(work), draft.block_size)
        blocks = [replace(item, tokens=[*item.tokens, *masks]) if item.tokens else item for item in work]
        shape.batch.fill(blocks, ring)
        shape.graph.run()
        if isinstance(shape.result, LatticeNodes):
            lattices = read_lattices(shape.result, len(work))
            walks = [walk(lattice, item.params, item.base) for lattice, item in zip(lattices, work, strict=True)]
        else:
            walks = shape.result.get().reshape(len(work), -1).tolist()
        return [proposals if item.tokens else [] for proposals, item in zip(walks, work, strict=True)]

    def close(self) -> None:
        """Release all graphs. Idempotent."""
        for shapes in (self._verify, self._advance, self._propose):
            shapes.close()

    # -- running -----------------------------------------------------------------------------------------------

    @cached_property
    def _composes_advance(self) -> bool:
        """Whether prefill has no GDN kernel: composed, every row is nodes of its own, so pieces are kept short."""
        return self._advance.get(1, COMPOSED_ROWS).graph.paths["gdn_advance", "composed"] > 0

    def _run_target(self, shape: TargetShape, work: Sequence[LaneRows]) -> None:
        shape.batch.fill(work, self.cache.kv)
        if shape.ring_rows is not None:
            assert self.cache.ring is not None
            shape.ring_rows.set(physical_rows(self.cache.ring, work, shape.batch.rows))
        shape.graph.run()

    # -- building ----------------------------------------------------------------------------------------------

    def _build_verify(self, lanes: int, rows: int) -> TargetShape:
        return self._build_target(lanes, rows, qwen35_graph.Verify, with_answer=True)

    def _build_advance(self, lanes: int, rows: int) -> TargetShape:
        return self._build_target(lanes, rows, qwen35_graph.Advance, with_answer=False)

    def _build_target(
        self, lanes: int, rows: int, mixing: type[qwen35_graph.Verify | qwen35_graph.Advance], *, with_answer: bool
    ) -> TargetShape:
        def build(graph: Graph) -> TargetShape:
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
            answer = None
            if with_answer:
                logits = linear(graph, m.target_weights.head, hidden)
                answer = answer_of(graph, batch, cache.recurrent, logits)
            return TargetShape(graph, batch, answer, ring)

        return self._built(build)

    def _build_propose(self, lanes: int, rows: int) -> DraftShape:
        def build(graph: Graph) -> DraftShape:
            m, ring = self.models, self.cache.ring
            assert m.draft is not None and m.draft_weights is not None and ring is not None
            batch = Batch.of(graph, lanes, rows)
            result = dflash_graph.block(graph, m.draft, m.draft_weights, m.target_weights, ring, batch)
            return DraftShape(graph, batch, result)

        return self._built(build)

    def _built(self, build: Callable[[Graph], S]) -> S:
        """A shape with its graph ready to run, counted; nothing stays open if that fails."""
        graph = Graph(self.backend)
        try:
            shape = build(graph)
            graph.build()
        except BaseException:
            graph.close()
            raise
        self._count(graph)
        return shape

    def _count(self, graph: Graph) -> None:
        self.paths.update(graph.paths)
        self.refusals = {**graph.refusals, **self.refusals}


def _part(item: LaneRows, start: int) -> LaneRows:
    """At most COMPOSED_ROWS rows of `item` from row `start` on."""
    return replace(item, base=item.base + start, tokens=item.tokens[start : start + COMPOSED_ROWS])


def read_lattices(nodes: LatticeNodes, lanes: int) -> list[Lattice]:
    """The lattice of each lane, behind a run."""
    k = nodes.ids.shape[0]
    ids: Ints = nodes.ids.get().reshape(lanes, -1, k)
    first: Floats = nodes.first.get().reshape(lanes, k)
    edges: Floats = np.zeros((lanes, 0, k, k), np.float32)
    if nodes.edges is not None:
        edges = nodes.edges.get().reshape(lanes, -1, k, k)
    return [Lattice(ids[lane], first[lane], edges[lane]) for lane in range(lanes)]
