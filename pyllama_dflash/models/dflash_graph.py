"""The draft's graphs: injecting taps into the ring, and the block with its proposals.

D = n_embd, V vocabulary, n = T * L rows (T the block, L lanes).
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import family
from ..batch import Batch
from ..cache import PagedKV
from ..ggml import Graph, Tensor
from ..ggml.composed.draft import LatticeNodes
from .dflash import DFlashParams
from .dflash_weights import DFlashLayer, DFlashWeights, DynamicConv
from .layers import each, linear, products, windows
from .qwen35_weights import Qwen35Weights

WITHOUT_SELECTOR_K = 16
"""Candidates a row of a DFlash1 block keeps."""


def inject(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], ring: PagedKV, taps: Sequence[Tensor], positions: Tensor,
    rows: Tensor,
) -> None:  # fmt: skip
    """e = RMS(fc [taps]); each layer keeps K = rope(RMS(Wk e)), V = Wv e of these positions."""
    fused = taps[0]
    for tap in taps[1:]:
        fused = g.concat(fused, tap, 0)
    e = g.rms_norm(linear(g, w.fc, fused), p.rms_eps, w.enc_norm)
    for i, (layer, projected) in enumerate(zip(w.layers, _appended(g, w, e), strict=True)):
        k, v = _keys_values(g, p, w, layer, projected, positions)
        ring.write(g, i, k, v, rows)


def block(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], target: Qwen35Weights[Tensor], ring: PagedKV, batch: Batch
) -> Tensor | LatticeNodes:
    """From the batch's tokens [anchor, mask, ...]: hidden rows, the target's head on rows 1.., :func:`family.select`.

    The block's own keys and values go to the ring at their positions; the next injection or block overwrites them.
    """
    x = g.get_rows(w.token_embd or target.token_embd, batch.tokens)
    x = x if p.embedding_scale == 1.0 else g.scale(x, p.embedding_scale)
    for i, layer in enumerate(w.layers):
        x = _layer(g, p, w, layer, i, ring, batch, x)
    hidden = g.rms_norm(x, p.rms_eps, w.output_norm)
    behind, lanes, row = batch.rows - 1, batch.lanes, hidden.strides[1]
    hidden = g.cont(g.view(hidden, (p.n_embd, behind, lanes), (row, row * batch.rows), row))
    hidden = g.reshape(hidden, p.n_embd, behind * lanes)
    logits = linear(g, w.head or target.head, hidden)
    vocabulary = logits.shape[0]
    if w.selector is None:
        top_k = min(WITHOUT_SELECTOR_K, vocabulary)
        return family.select(g, batch, g.reshape(logits, vocabulary, behind, lanes), None, top_k)
    logits = g.reshape(_capped(g, p, logits), vocabulary, behind, lanes)
    gate = g.reshape(linear(g, w.selector.hidden, hidden), p.selector_rank, behind, lanes)
    return family.select(g, batch, logits, (gate, w.selector.predecessor, w.selector.successor), p.selector_top_k)


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
    both = products(g, layer.gate_up, h, linear)
    gate, up = both.parts
    activated = g.swiglu(gate, up) if p.activation == "silu" else g.mul(each(g, g.gelu, both)[0], up)
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
    q, *projected = products(g, layer.qkv, a, linear).parts
    q = g.rms_norm(g.view(q, (d, heads, n), (4 * d, q.strides[1])), p.rms_eps, layer.q_norm)
    q = g.rope(q, batch.positions, p.rope_dims, p.rope_base, w.rope_freqs)
    k, v = _keys_values(g, p, w, layer, projected, batch.positions)
    keys, values = ring.write(g, i, k, v, batch.ring_rows)
    q = g.reshape(q, d, heads, batch.rows, batch.lanes)
    seen = family.attention(g, batch, ring, q, keys, values, scale=p.attn_scale, window=p.windows[i], causal=p.causal)
    y = linear(g, layer.output, g.reshape(seen, d * heads, n))
    return y if p.value_scale == 1.0 else g.scale(y, p.value_scale)


def _appended(g: Graph, w: DFlashWeights[Tensor], e: Tensor) -> list[Sequence[Tensor]]:
    """Wk e, and Wv e where there is a Wv, of each layer, [kv width, n]. Where they are no matrix of their own but one
    with the layer's q, so is the product."""
    if w.append is not None:
        rows = [part.weight.shape[1] for layer in w.layers for part in layer.qkv.parts[1:]]
        cut = iter(windows(g, g.product(w.append, e), rows))
        return [[next(cut) for _ in layer.qkv.parts[1:]] for layer in w.layers]
    return [
        [linear(g, part, e) for part in layer.qkv.parts[1:]]
        if layer.qkv.whole is None
        else products(g, layer.qkv, e, linear).parts[1:]
        for layer in w.layers
    ]


def _keys_values(
    g: Graph, p: DFlashParams, w: DFlashWeights[Tensor], layer: DFlashLayer[Tensor],
    projected: Sequence[Tensor], positions: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """K = rope(RMS(Wk x)) [head_dim, kv_heads, n] and V = Wv x [kv width, n] (without Wv: the raw keys, RMS-normed)
    of `projected`: Wk x, and Wv x where there is a Wv."""
    key, *value = projected
    raw = g.view(key, (p.head_dim, p.n_head_kv, positions.shape[0]), (4 * p.head_dim, key.strides[1]))
    k = g.rope(g.rms_norm(raw, p.rms_eps, layer.k_norm), positions, p.rope_dims, p.rope_base, w.rope_freqs)
    return k, value[0] if value else g.rms_norm(raw, p.rms_eps)


class _Convolutions:
    """The two sides of a dynamic convolution, both with the coefficients of the same input; nothing in DFlash1."""

    def __init__(self, g: Graph, conv: DynamicConv[Tensor] | None, x: Tensor, rows: int) -> None:
        self._g, self._conv, self._rows = g, conv, rows
        self._coefficients = None if conv is None else linear(g, conv.proj, x)

    def __call__(self, x: Tensor, side: int) -> Tensor:
        """Side 0 goes before the sub-block, side 1 behind it."""
        if self._conv is None or self._coefficients is None:
            return x
        return family.dynamic_conv(self._g, x, self._coefficients, self._conv.base, side, self._rows)


def _capped(g: Graph, p: DFlashParams, logits: Tensor) -> Tensor:
    """The target's output transforms, which the selector's unary scores need."""
    if p.logit_scale != 1.0:
        logits = g.scale(logits, p.logit_scale)
    if p.softcap > 0:
        logits = g.scale(g.tanh(g.scale(logits, 1 / p.softcap)), p.softcap)
    return logits
