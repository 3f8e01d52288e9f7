"""The draft's ops: the grouped dynamic convolution, and the lattice that stands in for `select`."""

from __future__ import annotations

from dataclasses import dataclass

from ..dflash_ops import check_dynamic_conv
from ..graph import Graph
from ..tensors import Tensor


def dynamic_conv(g: Graph, x: Tensor, coefficients: Tensor, base: Tensor, side: int, block: int) -> Tensor:
    """y[e, t] = sum_tap (base[e, tap, side] + coefficients[g(e), tap, side, t]) x[e, t - tap], x zero before a block.

    x [E, n], coefficients [G K 2, n], base [E, K, 2]. -> [E, T, L].
    """
    groups = check_dynamic_conv(x, coefficients, base, side, block)
    (width, n), taps = x.shape[:2], base.shape[1]

    def term(tap: int) -> Tensor:
        part = tap + taps * side
        dynamic = g.view(coefficients, (1, groups, n), (4, coefficients.strides[1]), 4 * groups * part)
        spread = g.repeat(dynamic, width // groups, groups, n)
        fixed = g.view(base, (width // groups, groups), (), 4 * width * part)
        weight = g.reshape(g.add(spread, fixed), width, block, n // block)
        return g.mul(weight, _delayed(g, x, tap, block))

    total = term(0)
    for tap in range(1, min(taps, block)):
        total = g.add(total, term(tap))
    return total


def _delayed(g: Graph, x: Tensor, tap: int, block: int) -> Tensor:
    """x later by `tap` rows inside each block, zeros in front. [E, T, L]."""
    shape = (x.shape[0], block - tap, x.shape[1] // block)
    kept = g.view(x, shape, (x.strides[1], x.strides[1] * block))
    return g.pad_front(kept, tap) if tap else kept


@dataclass(frozen=True)
class LatticeNodes:
    """Outputs for P rows behind the anchor: ids I32 [k, P L]; first [k, L], scores of row 0 behind the anchor.

    edges [k, k, P-1, L]: scores of a row's candidates behind each candidate of the row before, None for P = 1.
    """

    ids: Tensor
    first: Tensor
    edges: Tensor | None


def unary_lattice(g: Graph, logits: Tensor, top_k: int) -> LatticeNodes:
    """Candidates by their logits [V, P, L], whatever stands before them."""
    rows, lanes = logits.shape[1:3]
    ids, unary = _candidates(g, logits, top_k)
    first = g.cont(g.view(unary, (top_k, lanes), (unary.strides[2],)))
    edges = None
    if rows > 1:
        shape = (top_k, top_k, rows - 1, lanes)
        later = g.cont(g.view(unary, (top_k, rows - 1, lanes), unary.strides[1:3], unary.strides[1]))
        edges = g.output(g.repeat(g.reshape(later, top_k, 1, rows - 1, lanes), *shape), "edges")
    return LatticeNodes(ids, g.output(first, "first"), edges)


def selector_lattice(
    g: Graph, logits: Tensor, anchors: Tensor, gate: Tensor, predecessor: Tensor, successor: Tensor, top_k: int
) -> LatticeNodes:
    """score(row, a, b) = sum_r predecessor[r, a] gate[r, row] successor[r, b] + logit[row, b].

    logits [V, P, L], anchors I32 [L], gate [R, P, L], codebooks [R, V]. Row 0's predecessor is the anchor; a later
    row's are the candidates of the row before.
    """
    (_, n_rows, lanes, _), rank = logits.shape, gate.shape[0]
    ids, unary = _candidates(g, logits, top_k)
    flat = g.reshape(ids, top_k * n_rows * lanes)
    after = g.reshape(g.get_rows(successor, flat), rank, top_k, n_rows, lanes)
    gates = g.reshape(gate, rank, 1, n_rows, lanes)
    logit = g.reshape(unary, top_k, 1, n_rows, lanes)

    def rows(x: Tensor, start: int, stop: int) -> Tensor:
        shape = (x.shape[0], x.shape[1], stop - start, lanes)
        return g.cont(g.view(x, shape, x.strides[1:], start * x.strides[2]))

    def scores(before: Tensor, start: int, stop: int) -> Tensor:
        gated = g.mul(before, rows(gates, start, stop))
        return g.add(g.mul_mat(rows(after, start, stop), gated), rows(logit, start, stop))

    first = g.output(scores(g.reshape(g.get_rows(predecessor, anchors), rank, 1, 1, lanes), 0, 1), "first")
    edges = None
    if n_rows > 1:
        before = g.reshape(g.get_rows(predecessor, flat), rank, top_k, n_rows, lanes)
        edges = g.output(scores(rows(before, 0, n_rows - 1), 1, n_rows), "edges")
    return LatticeNodes(ids, first, edges)


def _candidates(g: Graph, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids of the largest logits of each row, an output [k, P L], and these logits [k, P, L]."""
    vocabulary, rows, lanes = logits.shape[:3]
    flat = g.reshape(logits, vocabulary, rows * lanes)
    ids = g.output(g.top_k(flat, top_k), "ids")
    return ids, g.reshape(g.pick(flat, ids), top_k, rows, lanes)
