"""The tensors of a target: how they group, and the one table of their names and shapes.

D = n_embd, S = state_size, Hk/Hv = n_k_heads/n_v_heads, C = 2*Hk*S + Hv*S convolution channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from ..gguf_file import GGUFFile, TensorInfo
from .tensor_table import Binder, FileTensors, Linear, Source, Stack, T, refuse_unknown

if TYPE_CHECKING:
    from .qwen35 import Qwen35Params


@dataclass(frozen=True)
class FullAttention(Generic[T]):
    """Softmax attention; the first of `qkv` holds for each head its query rows, then its gate rows."""

    qkv: Stack[T]
    output: Linear[T]
    q_norm: T
    k_norm: T


@dataclass(frozen=True)
class GatedDeltaNet(Generic[T]):
    """Linear attention with state; `a` is -exp(A_log) already.

    `qkv_z`: queries, keys and values in one, and the output's gate; `alpha_beta`: decay and strength per head.
    """

    qkv_z: Stack[T]
    conv: T
    alpha_beta: Stack[T]
    dt_bias: T
    a: T
    norm: T
    output: Linear[T]


@dataclass(frozen=True)
class Qwen35Layer(Generic[T]):
    """One trunk layer: exactly one of `attention` and `gdn`, then the feed-forward part."""

    attn_norm: T
    attention: FullAttention[T] | None
    gdn: GatedDeltaNet[T] | None
    ffn_norm: T
    gate_up: Stack[T]
    ffn_down: Linear[T]


@dataclass(frozen=True)
class Qwen35Weights(Generic[T]):
    """All tensors of a target; with a tied head `head.weight` is `token_embd` itself."""

    token_embd: T
    layers: tuple[Qwen35Layer[T], ...]
    output_norm: T
    head: Linear[T]


def bind(params: Qwen35Params, source: Source[T]) -> Qwen35Weights[T]:
    """The weights, each tensor asked from `source` by its spec: this is the table of tensors."""
    ask = Binder(source)
    token_embd = ask.tensor("token_embd.weight", params.n_embd, params.n_vocab)
    return Qwen35Weights(
        token_embd=token_embd,
        layers=tuple(_bind_layer(params, ask, i) for i in range(params.n_layer)),
        output_norm=ask.vector("output_norm.weight", params.n_embd),
        head=ask.optional_linear("output", params.n_embd, params.n_vocab) or Linear(token_embd),
    )


def _bind_layer(p: Qwen35Params, ask: Binder[T], i: int) -> Qwen35Layer[T]:
    blk = f"blk.{i}."
    return Qwen35Layer(
        attn_norm=ask.vector(blk + "attn_norm.weight", p.n_embd),
        attention=None if p.recurrent[i] else _bind_attention(p, ask, blk),
        gdn=_bind_gated_delta_net(p, ask, blk) if p.recurrent[i] else None,
        ffn_norm=ask.vector(blk + "post_attention_norm.weight", p.n_embd),
        gate_up=ask.stack(p.n_embd, (blk + "ffn_gate", p.n_ff), (blk + "ffn_up", p.n_ff)),
        ffn_down=ask.linear(blk + "ffn_down", p.n_ff, p.n_embd),
    )


def _bind_attention(p: Qwen35Params, ask: Binder[T], blk: str) -> FullAttention[T]:
    q_width, kv_width = p.n_head * p.head_dim, p.n_head_kv * p.head_dim
    return FullAttention(
        qkv=ask.stack(p.n_embd, (blk + "attn_q", 2 * q_width), (blk + "attn_k", kv_width), (blk + "attn_v", kv_width)),
        output=ask.linear(blk + "attn_output", q_width, p.n_embd),
        q_norm=ask.vector(blk + "attn_q_norm.weight", p.head_dim),
        k_norm=ask.vector(blk + "attn_k_norm.weight", p.head_dim),
    )


def _bind_gated_delta_net(p: Qwen35Params, ask: Binder[T], blk: str) -> GatedDeltaNet[T]:
    return GatedDeltaNet(
        qkv_z=ask.stack(p.n_embd, (blk + "attn_qkv", p.conv_channels), (blk + "attn_gate", p.value_width)),
        conv=ask.vector(blk + "ssm_conv1d.weight", p.conv_kernel, p.conv_channels),
        alpha_beta=ask.stack(p.n_embd, (blk + "ssm_alpha", p.n_v_heads), (blk + "ssm_beta", p.n_v_heads)),
        dt_bias=ask.vector(blk + "ssm_dt.bias", p.n_v_heads),
        a=ask.vector(blk + "ssm_a", p.n_v_heads),
        norm=ask.vector(blk + "ssm_norm.weight", p.state_size),
        output=ask.linear(blk + "ssm_out", p.value_width, p.n_embd),
    )


def check(file: GGUFFile, params: Qwen35Params) -> Qwen35Weights[TensorInfo]:
    """Where each tensor lies in the file; FileError if one is missing, unknown, or has another shape or type."""
    for i, recurrent in enumerate(params.recurrent):
        fused = f"blk.{i}.attn_qkv.weight"
        if not recurrent and fused in file.tensors:
            raise file.error(
                "fused query/key/value in a full attention layer is not supported; convert with separate tensors",
                fused, list(file.tensors[fused].shape), "attn_q, attn_k and attn_v",
            )  # fmt: skip
    source = FileTensors(file)
    weights = bind(params, source)
    skipped = tuple(f"blk.{params.n_layer + i}." for i in range(params.n_nextn))
    refuse_unknown(file, source.used | {name for name in file.tensors if name.startswith(skipped)}, params.arch)
    return weights
