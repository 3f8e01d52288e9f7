"""The draft's graphs: injecting taps into the ring, the block, and the selector's lattice.

D = n_embd, V vocabulary, n = T * L rows (T the block, L lanes), k = top_k, r = selector rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Batch
from ..cache import PagedKV
from ..ggml import Graph, Tensor
from .dflash import DFlashParams
from .dflash_weights import DFlashLayer, DFlashWeights, DynamicConv, Selector
from .layers import linear
from .qwen35_weights import Qwen35Weights

WITHOUT_SELECTOR_K = 16
"""Candidates a row of a DFlash1 block keeps."""


@dataclass(frozen=True)
class LatticeNodes:
    """Outputs of a block for rows 1..T-1: ids [k, T-1, L], first [k, L], edges [k, k, T-2, L] (or [k, 1, T-2, L])."""

    ids: Tensor
    first: Tensor
    edges: Tensor | None


def inject(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], ring: PagedKV, taps: Sequence[Tensor], positions: Tensor,
    rows: Tensor,
) -> None:  # fmt: skip
    """e = RMS(fc [taps]); each layer keeps K = rope(RMS(Wk e)), V = Wv e of these positions."""
    fused = taps[0]
    for tap in taps[1:]:
        fused = g.concat(fused, tap, 0)
    e = g.rms_norm(linear(g, w.fc, fused), p.rms_eps, w.enc_norm)
    for i, layer in enumerate(w.layers):
        k, v = _keys_values(g, p, w, layer, e, positions)
        ring.write(g, i, k, v, rows)


def block(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], target: Qwen35Weights[Tensor], ring: PagedKV, batch: Batch
) -> LatticeNodes:
    """The block [anchor, mask, ...]: hidden rows, the target's head on rows 1.., and the selector's scores.

    The block's own keys and values go to the ring at their positions; the next injection or block overwrites them.
    """
    x = g.get_rows(w.token_embd or target.token_embd, batch.tokens)
    x = x if p.embedding_scale == 1.0 else g.scale(x, p.embedding_scale)
    for i, layer in enumerate(w.layers):
        x = _layer(g, p, w, layer, i, ring, batch, x)
    hidden = g.rms_norm(x, p.rms_eps, w.output_norm)
    t, lanes, row = batch.rows, batch.lanes, hidden.strides[1]
    hidden = g.cont(g.view(hidden, (p.n_embd, t - 1, lanes), (row, row * t), row))
    hidden = g.reshape(hidden, p.n_embd, (t - 1) * lanes)
    logits = linear(g, w.head or target.head, hidden)
    if w.selector is None:
        return _unary_lattice(g, logits, batch)
    return _selector_lattice(g, p, w.selector, hidden, _capped(g, p, logits), batch)


def _layer(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], layer: DFlashLayer[Tensor], i: int, ring: PagedKV,
    batch: Batch, x: Tensor,
) -> Tensor:  # fmt: skip
    a = g.rms_norm(x, p.rms_eps, layer.attn_norm)
    conv = _Convolutions(g, layer.attn_conv, a, batch.rows)
    y = conv(_attention(g, p, w, layer, i, ring, batch, conv(a, side=0)), side=1)
    if layer.attn_post_norm is not None:
        y = g.rms_norm(y, p.rms_eps, layer.attn_post_norm)
    x = g.add(x, y)
    b = g.rms_norm(x, p.rms_eps, layer.ffn_norm)
    conv = _Convolutions(g, layer.ffn_conv, b, batch.rows)
    h = conv(b, side=0)
    gate, up = linear(g, layer.ffn_gate, h), linear(g, layer.ffn_up, h)
    activated = g.swiglu(gate, up) if p.activation == "silu" else g.mul(g.gelu(gate), up)
    y = conv(linear(g, layer.ffn_down, activated), side=1)
    if layer.ffn_post_norm is not None:
        y = g.rms_norm(y, p.rms_eps, layer.ffn_post_norm)
    x = g.add(x, y)
    return x if layer.out_scale is None else g.mul(x, layer.out_scale)


def _attention(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], layer: DFlashLayer[Tensor], i: int, ring: PagedKV,
    batch: Batch, a: Tensor,
) -> Tensor:  # fmt: skip
    """All rows of the block see the injected positions within the window and, unless causal, the whole block."""
    d, heads, n = p.head_dim, p.n_head, batch.lanes * batch.rows
    q = g.rms_norm(g.reshape(linear(g, layer.q, a), d, heads, n), p.rms_eps, layer.q_norm)
    q = g.rope(q, batch.positions, p.rope_dims, p.rope_base, w.rope_freqs)
    k, v = _keys_values(g, p, w, layer, a, batch.positions)
    keys, values = ring.write(g, i, k, v, batch.kv_rows)
    seen = g.attention(
        g.reshape(q, d, heads, batch.rows, batch.lanes), keys, values, ring.table, batch.slots, batch.base, batch.live,
        scale=p.attn_scale, window=p.windows[i], causal=p.causal,
    )  # fmt: skip
    y = linear(g, layer.output, g.reshape(seen, d * heads, n))
    return y if p.value_scale == 1.0 else g.scale(y, p.value_scale)


def _keys_values(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], layer: DFlashLayer[Tensor], x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """K = rope(RMS(Wk x)) and V = Wv x (without Wv: the raw keys, RMS-normed), [head_dim, kv_heads, n]."""
    shape = (p.head_dim, p.n_head_kv, positions.shape[0])
    raw = g.reshape(linear(g, layer.k, x), *shape)
    k = g.rope(g.rms_norm(raw, p.rms_eps, layer.k_norm), positions, p.rope_dims, p.rope_base, w.rope_freqs)
    v = g.rms_norm(raw, p.rms_eps) if layer.v is None else g.reshape(linear(g, layer.v, x), *shape)
    return k, v


class _Convolutions:
    """The two sides of a dynamic convolution, both with the coefficients of the same input; nothing in DFlash1."""

    def __init__(self, g: Graph, conv: DynamicConv[Tensor] | None, x: Tensor, rows: int) -> None:
        self._g, self._conv, self._rows = g, conv, rows
        self._coefficients = None if conv is None else linear(g, conv.proj, x)

    def __call__(self, x: Tensor, side: int) -> Tensor:
        """Side 0 goes before the sub-block, side 1 behind it."""
        if self._conv is None or self._coefficients is None:
            return x
        return self._g.dynamic_conv(x, self._coefficients, self._conv.base, side, self._rows)


def _capped(g: Graph, p: DFlashParams, logits: Tensor) -> Tensor:
    """The target's output transforms, which the selector's unary scores need."""
    if p.logit_scale != 1.0:
        logits = g.scale(logits, p.logit_scale)
    if p.softcap > 0:
        logits = g.scale(g.tanh(g.scale(logits, 1 / p.softcap)), p.softcap)
    return logits


def _unary_lattice(g: Graph, logits: Tensor, batch: Batch) -> LatticeNodes:
    """DFlash1: candidates by their logits, whatever stands before them."""
    t, lanes, k = batch.rows, batch.lanes, min(WITHOUT_SELECTOR_K, logits.shape[0])
    ids = g.top_k(logits, k)
    unary = g.reshape(g.pick(logits, ids), k, t - 1, lanes)
    first = g.cont(g.view(unary, (k, lanes), (unary.strides[2],)))
    edges = None
    if t > 2:
        later = g.view(unary, (k, t - 2, lanes), unary.strides[1:3], unary.strides[1])
        edges = g.output(g.repeat(g.reshape(g.cont(later), k, 1, t - 2, lanes), k, k, t - 2, lanes), "edges")
    return LatticeNodes(g.output(ids, "ids"), g.output(first, "first"), edges)


def _selector_lattice(
    g: Graph, p: DFlashParams, w: Selector[Tensor], hidden: Tensor, logits: Tensor, batch: Batch
) -> LatticeNodes:
    """s(row, a, b) = sum_r predecessor[r, a] gate[r, row] successor[r, b] + logit[row, b].

    Row 1's predecessor is the anchor; a later row's are the candidates of the row before.
    """
    t, lanes, k, r = batch.rows, batch.lanes, p.selector_top_k, p.selector_rank
    ids = g.top_k(logits, k)
    unary = g.reshape(g.pick(logits, ids), k, 1, t - 1, lanes)
    gate = g.reshape(linear(g, w.hidden, hidden), r, 1, t - 1, lanes)
    flat = g.reshape(ids, k * (t - 1) * lanes)
    after = g.reshape(g.get_rows(w.successor, flat), r, k, t - 1, lanes)
    anchors = g.cont(g.view(batch.tokens, (1, lanes), (4 * t,)))
    before = g.reshape(g.get_rows(w.predecessor, g.reshape(anchors, lanes)), r, 1, 1, lanes)

    def rows(x: Tensor, start: int, stop: int) -> Tensor:
        shape = (x.shape[0], x.shape[1], stop - start, lanes)
        return g.cont(g.view(x, shape, x.strides[1:], start * x.strides[2]))

    def scores(predecessors: Tensor, start: int, stop: int) -> Tensor:
        gated = g.mul(predecessors, rows(gate, start, stop))
        return g.add(g.mul_mat(rows(after, start, stop), gated), rows(unary, start, stop))

    first = g.output(scores(before, 0, 1), "first")
    edges = None
    if t > 2:
        candidates = g.reshape(g.get_rows(w.predecessor, flat), r, k, t - 1, lanes)
        edges = g.output(scores(rows(candidates, 0, t - 2), 1, t - 1), "edges")
    return LatticeNodes(g.output(ids, "ids"), first, edges)
