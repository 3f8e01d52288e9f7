"""The end of a verify graph: which of a block's tokens are final, decided on the device as far as it has kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from . import family
from .batch import Batch, LaneRows
from .cache import RecurrentState
from .ggml import Graph, Tensor
from .host_path import Floats, accepted, drawn


class Answer(Protocol):
    """What is read behind a run. `on_device`: whether `pending` and `anchors` are written there."""

    @property
    def on_device(self) -> bool:
        """See :class:`Answer`."""
        ...

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """The final tokens of each lane, whose rows are [anchor, *proposals]."""
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
class Sampled:
    """`sample` ran, the host compares: tokens I32 [T, L]."""

    node: Tensor
    on_device = False

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """See :class:`Answer`."""
        lanes: list[list[int]] = self.node.get().reshape(len(work), -1).tolist()
        return [accepted(tokens, item.tokens[1:]) for tokens, item in zip(lanes, work, strict=True)]


@dataclass(frozen=True)
class Logits:
    """The host draws and compares: logits [V, T, L]."""

    node: Tensor
    on_device = False

    def rows(self, lanes: int) -> Floats:
        """[L, T, V]."""
        logits: Floats = self.node.get().reshape(lanes, -1, self.node.shape[0])
        return logits

    def read(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """See :class:`Answer`."""
        items = zip(self.rows(len(work)), work, strict=True)
        return [
            accepted(drawn(rows[: len(item.tokens)], item.params, item.base), item.tokens[1:]) for rows, item in items
        ]


def answer_of(g: Graph, b: Batch, memory: RecurrentState, logits: Tensor) -> Answer:
    """End the graph with `sample` and `accept` on logits [V, T * L], or leave to the host what has no kernel."""
    tokens = family.sample(g, b, g.reshape(logits, logits.shape[0], b.rows, b.lanes))
    final = family.accept(g, b, memory, tokens)
    if tokens is None:
        return Logits(g.output(logits, "logits"))
    if final is None:
        return Sampled(g.output(tokens, "tokens"))
    return Accepted(g.output(final, "final"))
