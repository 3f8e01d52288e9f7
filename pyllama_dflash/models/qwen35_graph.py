"""The target's graph. Letters as in :mod:`.qwen35`; n = T * L rows of a batch, h the normed stream [D, n]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .. import family
from ..batch import Batch
from ..cache import PagedKV, RecurrentState
from ..ggml import Graph, Tensor
from ..ggml.composed.gdn import Rows
from .layers import each, linear, linear_by_column, products, side_by_side
from .qwen35 import Qwen35Params
from .qwen35_weights import FullAttention, GatedDeltaNet, Qwen35Weights
from .tensor_table import Linear


class Mixing(Protocol):
    """How a batch treats its rows: `Verify` keeps the state open for rollback and no row depends on how many there are,
    `Advance` moves the state on, over rows that are always the same ones together."""

    def linear(self, g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
        """W x of the rows x [k, n]."""
        ...

    def conv(self, g: Graph, i: int, x: Tensor, w: Tensor) -> Tensor:
        """SiLU of the causal convolution of layer i; x and result [C, T, L]."""
        ...

    def gdn(self, g: Graph, i: int, rows: Rows) -> Tensor:
        """The gated delta rule of layer i; result [S, Hv, T, L]."""
        ...


@dataclass(frozen=True)
class Verify:
    """Rows that may still be rejected: logged, not stored."""

    recurrent: RecurrentState
    batch: Batch

    def linear(self, g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
        """See :class:`Mixing`."""
        return linear_by_column(g, w, x)

    def conv(self, g: Graph, i: int, x: Tensor, w: Tensor) -> Tensor:
        """See :class:`Mixing`."""
        return family.conv_verify(g, self.batch, self.recurrent, i, x, w)

    def gdn(self, g: Graph, i: int, rows: Rows) -> Tensor:
        """See :class:`Mixing`."""
        return family.gdn_verify(g, self.batch, self.recurrent, i, rows)


@dataclass(frozen=True)
class Advance:
    """Rows that are final (prefill): the state moves behind the live ones.

    A prompt is always cut into the same pieces, so a product may depend on how many rows it has.
    """

    recurrent: RecurrentState
    batch: Batch

    def linear(self, g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
        """See :class:`Mixing`."""
        return linear(g, w, x)

    def conv(self, g: Graph, i: int, x: Tensor, w: Tensor) -> Tensor:
        """See :class:`Mixing`."""
        return family.conv_advance(g, self.batch, self.recurrent, i, x, w)

    def gdn(self, g: Graph, i: int, rows: Rows) -> Tensor:
        """See :class:`Mixing`."""
        return family.gdn_advance(g, self.batch, self.recurrent, i, rows)


def forward(
    g: Graph, p: Qwen35Params, w: Qwen35Weights[Tensor], kv: PagedKV, mixing: Mixing, batch: Batch, tokens: Tensor,
    taps: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The trunk on `tokens` I32 [n]: the normed stream for the head, and the streams entering layers `taps`, [D, n]."""
    x = g.get_rows(w.token_embd, tokens)
    streams = [x]
    unit = g.constant("unit", np.full(p.state_size, p.state_size**-0.5, np.float32))
    for i, layer in enumerate(w.layers):
        h = g.rms_norm(x, p.rms_eps, layer.attn_norm)
        if layer.gdn is not None:
            x = g.add(x, _gated_delta_net(g, p, layer.gdn, mixing, i, batch, h, unit))
        elif layer.attention is not None:
            x = g.add(x, _full_attention(g, p, layer.attention, kv, mixing, i, batch, h))
        h = g.rms_norm(x, p.rms_eps, layer.ffn_norm)
        gate, up = products(g, layer.gate_up, h, mixing.linear).parts
        x = g.add(x, mixing.linear(g, layer.ffn_down, g.swiglu(gate, up)))
        streams.append(x)
    return g.rms_norm(x, p.rms_eps, w.output_norm), [streams[i] for i in taps]


def _full_attention(
    g: Graph, p: Qwen35Params, w: FullAttention[Tensor], kv: PagedKV, mixing: Mixing, i: int, batch: Batch, h: Tensor
) -> Tensor:
    """softmax(rope(q) rope(k)^T / sqrt(d)) v * sigmoid(gate), then the output projection."""
    d, heads, n = p.head_dim, p.n_head, batch.lanes * batch.rows
    both, k, v = products(g, w.qkv, h, mixing.linear).parts  # of `both` per head d query rows, then d gate rows
    strides = (8 * d, both.strides[1])
    q = g.rms_norm(g.view(both, (d, heads, n), strides), p.rms_eps, w.q_norm)
    gate = g.reshape(g.cont(g.view(both, (d, heads, n), strides, 4 * d)), d * heads, n)
    k = g.rms_norm(g.view(k, (d, p.n_head_kv, n), (4 * d, k.strides[1])), p.rms_eps, w.k_norm)
    q, k = (g.rope(t, batch.positions, p.rope_dims, p.rope_base) for t in (q, k))
    keys, values = kv.write(g, i, k, v, batch.kv_rows)
    q = g.reshape(q, d, heads, batch.rows, batch.lanes)
    seen = family.attention(g, batch, kv, q, keys, values, scale=p.attn_scale, window=0, causal=True)
    return mixing.linear(g, w.output, g.mul(g.reshape(seen, d * heads, n), g.sigmoid(gate)))


def _gated_delta_net(
    g: Graph, p: Qwen35Params, w: GatedDeltaNet[Tensor], mixing: Mixing, i: int, batch: Batch, h: Tensor, unit: Tensor
) -> Tensor:
    """S <- exp(a softplus(alpha + dt)) S; S <- S + k beta (v - S^T k)^T; o = S^T q / sqrt(S); RMS(o) silu(z).

    q and k are x / sqrt(sum x^2 + eps) per head: an RMS norm with 1 / sqrt(S) for a weight, `unit`.
    """
    s, hk, hv, c, t, lanes = p.state_size, p.n_k_heads, p.n_v_heads, p.conv_channels, batch.rows, batch.lanes
    numbers = products(g, w.alpha_beta, h, mixing.linear)
    mixed = products(g, w.qkv_z, h, mixing.linear)
    side_by_side(g, numbers, mixed)
    qkv, z = mixed.parts
    decay = g.reshape(g.mul(g.softplus(g.add(numbers.parts[0], w.dt_bias)), w.a), hv, t, lanes)
    beta = _by_lane(g, each(g, g.sigmoid, numbers)[1], batch)
    u = mixing.conv(g, i, _by_lane(g, qkv, batch), w.conv)
    rows = (4 * c, 4 * c * t)
    qk = g.rms_norm(g.view(u, (s, 2 * hk, t, lanes), (4 * s, *rows)), p.rms_eps / s, unit)
    q, k = (g.view(qk, (s, hk, t, lanes), qk.strides[1:], 4 * s * hk * i) for i in range(2))
    v = g.view(u, (s, hv, t, lanes), (4 * s, *rows), 8 * s * hk)
    o = mixing.gdn(g, i, Rows(q, k, v, decay, beta))
    o = g.reshape(g.rms_norm(o, p.rms_eps, w.norm), s * hv, t * lanes)
    return mixing.linear(g, w.output, g.swiglu(z, o))


def _by_lane(g: Graph, x: Tensor, batch: Batch) -> Tensor:
    """x [m, n], whose columns may have gaps between them, as [m, T, L]."""
    return g.view(x, (x.shape[0], batch.rows, batch.lanes), (x.strides[1], x.strides[1] * batch.rows))
