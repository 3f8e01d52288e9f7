"""The end of a verify graph: which of a block's tokens are final, decided on the device as far as it has kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from . import family
from .batch import Batch
from .cache import LaneCache
from .ggml import Graph, Tensor
from .host_path import Floats, Ints, accepted, drawn
from .lane_rows import LaneRows


class Answer(Protocol):
    """What is read behind a run. `on_device`: whether the counts, anchors and histories are written there."""

    @property
    def on_device(self) -> bool:
        """See :class:`Answer`."""
        ...

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """The final tokens of each lane."""
        ...


@dataclass(frozen=True)
class Accepted:
    """`accept` ran: counts and tokens, I32 [T + 1, L]."""

    node: Tensor
    on_device = True

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """See :class:`Answer`."""
        lanes: list[list[int]] = self.node.get().reshape(len(work), -1).tolist()
        return [lane[1 : 1 + lane[0]] for lane in lanes]


@dataclass(frozen=True)
class Blocks:
    """The rows' tokens, for a host that compares: a node I32 [T, L], None where the histories hold them."""

    node: Tensor | None
    cache: LaneCache

    def read(self, work: Sequence[LaneRows]) -> list[Ints]:
        """Of each lane its rows' tokens."""
        if self.node is not None:
            blocks = self.node.get().reshape(len(work), -1)
            return [block[: item.rows] for block, item in zip(blocks, work, strict=True)]
        return [self.cache.history.tokens[item.slot, item.base : item.base + item.rows] for item in work]


@dataclass(frozen=True)
class Sampled:
    """`sample` ran, the host compares: tokens I32 [T, L]."""

    node: Tensor
    blocks: Blocks
    on_device = False

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """See :class:`Answer`."""
        lanes: list[list[int]] = self.node.get().reshape(len(work), -1).tolist()
        blocks = self.blocks.read(work)
        return [accepted(tokens, block[1:].tolist()) for tokens, block in zip(lanes, blocks, strict=True)]


@dataclass(frozen=True)
class Logits:
    """The host adjusts, draws and compares: logits [V, T, L]."""

    node: Tensor
    blocks: Blocks
    on_device = False

    def rows(self, lanes: int) -> Floats:
        """[L, T, V]."""
        logits: Floats = self.node.get().reshape(lanes, -1, self.node.shape[0])
        return logits

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """See :class:`Answer`."""
        final = []
        for rows, item, block in zip(self.rows(len(work)), work, self.blocks.read(work), strict=True):
            seen = np.concatenate([self.blocks.cache.history.tokens[item.slot, : item.base], block])
            final.append(accepted(drawn(rows[: item.rows], item.params, item.base, seen), block[1:].tolist()))
        return final


def answer_of(g: Graph, b: Batch, cache: LaneCache, block: Tensor | None, logits: Tensor) -> Answer:
    """End the graph with `penalise`, `sample` and `accept` on logits [V, T * L]; the host does what has no kernel.

    `block` I32 [T, L]: anchor and proposals; None: the batch's own tokens, which the histories hold.
    """
    own = g.reshape(b.tokens, b.rows, b.lanes) if block is None else block
    rows = g.reshape(logits, logits.shape[0], b.rows, b.lanes)
    tokens = family.sample(g, b, cache.history, own, rows)
    final = family.accept(g, b, cache.recurrent, cache.history, own, tokens)
    if final is not None:
        return Accepted(g.output(final, "final"))
    blocks = Blocks(block if block is None else g.output(block, "block"), cache)
    if tokens is None:
        return Logits(g.output(logits, "logits"), blocks)
    return Sampled(g.output(tokens, "tokens"), blocks)
