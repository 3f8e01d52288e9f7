"""What runs on the device: graphs of a target and its draft, each shape built once and kept.

`run` is a round of some lanes, one graph: the draft's block behind each anchor, the target on anchor and proposals, the
draws, the comparison, and the rows' taps for the draft's next block. `advance` is prefill. Nothing here decides which
lanes run or when a request ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from . import family
from .answers import answer_of
from .batch import Batch
from .cache import LaneCache
from .ggml import Backend, Graph, Tensor
from .ggml.composed.draft import LatticeNodes
from .ggml.dflash_ops import PathName
from .host_path import Floats, Ints, Lattice, walk
from .lane_rows import LaneRows
from .models import dflash_graph, qwen35_graph
from .models.dflash import DFlashParams
from .models.dflash_weights import DFlashWeights
from .models.qwen35 import Qwen35Params
from .models.qwen35_weights import Qwen35Weights
from .shapes import Shape, ShapeKey, Shapes

COMPOSED_ROWS = 8
"""Rows of a prefill graph whose gated delta rule is composed row by row."""

KEPT = 32
"""Graphs that are kept."""


@dataclass(frozen=True)
class Models:
    """A target, perhaps its draft, and the weights of both on one device."""

    target: Qwen35Params
    target_weights: Qwen35Weights[Tensor]
    draft: DFlashParams | None = None
    draft_weights: DFlashWeights[Tensor] | None = None

    @property
    def block(self) -> int:
        """Rows of the widest round: anchor and proposals; 1 without a draft."""
        return 1 if self.draft is None else self.draft.block_size


@dataclass
class Round:
    """The retained graphs of one engine. Calls come from one thread at a time.

    `paths` counts by (op, path) how the ops of all graphs built so far are computed, `refusals` says of an op why a
    node of it has no kernel.
    """

    backend: Backend
    models: Models
    cache: LaneCache
    limit: int = KEPT
    paths: Counter[tuple[str, PathName]] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes = Shapes(self._build, self.limit)

    def prepare(self) -> None:
        """Build the graphs of one lane: prefill, plain step and, with a draft, a round of a whole block."""
        feeds = self.models.draft is not None
        self.shapes.get(ShapeKey("advance", 1, COMPOSED_ROWS, feeds))
        self.shapes.get(ShapeKey("verify", 1, 1, feeds))
        if feeds:
            self._drafted(1, self.models.block)

    def probe(self) -> None:
        """Count in `paths` how every op is computed: :meth:`prepare`, and the commits, which no round needs."""
        self.prepare()
        recurrent = self.cache.recurrent
        with Graph(self.backend) as graph:
            batch = Batch.of(graph, self.cache, 1, 1)
            for i in recurrent.state:
                family.gdn_commit(graph, batch, recurrent, i)
                family.conv_commit(graph, batch, recurrent, i, self.models.target.conv_kernel)
            self._count(graph)

    def advance(self, item: LaneRows, rows: int, *, feeds: bool = True) -> None:
        """Prefill: compute the next `item.rows` tokens of its history (in a graph of `rows` rows) and keep the state
        behind them; the anchor moves on by as many. Pending rows are used up."""
        if rows > COMPOSED_ROWS and self._composes_advance:
            for start in range(0, item.rows, COMPOSED_ROWS):
                part = replace(item, base=item.base + start, rows=min(COMPOSED_ROWS, item.rows - start))
                self.advance(part, COMPOSED_ROWS, feeds=feeds)
            return
        shape = self.shapes.get(ShapeKey("advance", 1, rows, feeds and self.models.draft is not None))
        shape.batch.fill([item], self.cache.slots)
        shape.graph.run()
        self.cache.recurrent.use_up_pending(item.slot)
        self.cache.history.set_base(item.slot, item.base + item.rows)

    def run(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """A round: row 0 of a lane is its anchor, the others are the draft's proposals.

        The tokens of each lane that are final, as many as it has rows at most. They are in its history afterwards, the
        last of them as the anchor, and so many rows are pending in its slot. A lane without any is padded, or its
        logits are not finite.
        """
        rows = max(item.rows for item in work)
        if rows == 1:
            return self.verify(work)
        shape = self._drafted(len(work), rows)
        if shape.lattice is None:
            return self._finish(shape, work)
        shape.batch.fill(work, self.cache.slots)
        shape.graph.run()
        for lattice, item in zip(read_lattices(shape.lattice, len(work)), work, strict=True):
            if item.rows > 1:
                proposals = walk(lattice, item.params, item.base)[: item.rows - 1]
                self.cache.history.put(item.slot, item.base + 1, proposals)
        return self.verify(work)

    def verify(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """As :meth:`run`, with the proposals that the histories hold behind the anchors."""
        draft = self.models.draft
        feeds = draft is not None and any(item.params.width != 1 for item in work)
        key = ShapeKey("verify", len(work), max(item.rows for item in work), feeds)
        return self._finish(self.shapes.get(key), work)

    def close(self) -> None:
        """Release all graphs. Idempotent."""
        self.shapes.close()

    # -- running -----------------------------------------------------------------------------------------------

    @cached_property
    def _composes_advance(self) -> bool:
        """Whether prefill has no GDN kernel: composed, every row is nodes of its own, so pieces are kept short."""
        shape = self.shapes.get(ShapeKey("advance", 1, COMPOSED_ROWS, self.models.draft is not None))
        return shape.graph.paths["gdn_advance", "composed"] > 0

    def _drafted(self, lanes: int, rows: int) -> Shape:
        return self.shapes.get(ShapeKey("round", lanes, rows, True))

    def _finish(self, shape: Shape, work: Sequence[LaneRows]) -> list[list[int]]:
        """Run a graph that ends in an answer, and take note of what became final."""
        assert shape.answer is not None
        shape.batch.fill(work, self.cache.slots)
        shape.graph.run()
        final, recurrent, history = shape.answer.read(work), self.cache.recurrent, self.cache.history
        on_device = shape.answer.on_device
        counted = recurrent.note_pending if on_device else recurrent.set_pending
        appended = history.note if on_device else history.append
        for item, tokens in zip(work, final, strict=True):
            if item.rows:
                counted(item.slot, len(tokens))
                appended(item.slot, tokens)
        return final

    # -- building ----------------------------------------------------------------------------------------------

    def _build(self, key: ShapeKey) -> Shape:
        """A shape with its graph ready to run, counted; nothing stays open if that fails."""
        graph = Graph(self.backend)
        try:
            shape = self._draft_and_target(graph, key) if key.kind == "round" else self._target(graph, key)
            graph.build()
        except BaseException:
            graph.close()
            raise
        self._count(graph)
        return shape

    def _draft_and_target(self, graph: Graph, key: ShapeKey) -> Shape:
        m, ring = self.models, self.cache.ring
        assert m.draft is not None and m.draft_weights is not None and ring is not None
        batch = Batch.of(graph, self.cache, key.lanes, key.rows, fill=m.draft.mask_token)
        block = dflash_graph.block(graph, m.draft, m.draft_weights, m.target_weights, ring, batch)
        if isinstance(block, LatticeNodes):
            return Shape(graph, batch, lattice=block)
        return self._verified(graph, batch, graph.effect(block), feeds=True)

    def _target(self, graph: Graph, key: ShapeKey) -> Shape:
        batch = Batch.of(graph, self.cache, key.lanes, key.rows)
        if key.kind == "verify":
            return self._verified(graph, batch, None, feeds=key.feeds)
        mixing = qwen35_graph.Advance(self.cache.recurrent, batch)
        self._trunk(graph, batch, mixing, batch.tokens, feeds=key.feeds)
        return Shape(graph, batch)

    def _verified(self, graph: Graph, batch: Batch, block: Tensor | None, *, feeds: bool) -> Shape:
        """`block` I32 [T, L]: anchor and proposals of each lane; None: the batch's own tokens."""
        tokens = batch.tokens if block is None else graph.reshape(block, batch.rows * batch.lanes)
        mixing = qwen35_graph.Verify(self.cache.recurrent, batch)
        hidden = self._trunk(graph, batch, mixing, tokens, feeds=feeds)
        logits = mixing.linear(graph, self.models.target_weights.head, hidden)
        return Shape(graph, batch, answer_of(graph, batch, self.cache, block, logits))

    def _trunk(
        self, graph: Graph, batch: Batch, mixing: qwen35_graph.Mixing, tokens: Tensor, *, feeds: bool
    ) -> Tensor:  # fmt: skip
        """The target's normed stream [D, T * L]; `feeds`: the rows' taps go to the draft's ring."""
        m, cache = self.models, self.cache
        taps = m.draft.target_layers if feeds and m.draft is not None else ()
        hidden, kept = qwen35_graph.forward(
            graph, m.target, m.target_weights, cache.kv, mixing, batch, tokens, taps
        )  # fmt: skip
        if feeds:
            assert m.draft is not None and m.draft_weights is not None and cache.ring is not None
            dflash_graph.inject(graph, m.draft, m.draft_weights, cache.ring, kept, batch.positions, batch.ring_rows)
        return hidden

    def _count(self, graph: Graph) -> None:
        self.paths.update(graph.paths)
        self.refusals = {**graph.refusals, **self.refusals}


def read_lattices(nodes: LatticeNodes, lanes: int) -> list[Lattice]:
    """The lattice of each lane, behind a run."""
    k = nodes.ids.shape[0]
    ids: Ints = nodes.ids.get().reshape(lanes, -1, k)
    first: Floats = nodes.first.get().reshape(lanes, k)
    edges: Floats = np.zeros((lanes, 0, k, k), np.float32)
    if nodes.edges is not None:
        edges = nodes.edges.get().reshape(lanes, -1, k, k)
    return [Lattice(ids[lane], first[lane], edges[lane]) for lane in range(lanes)]
