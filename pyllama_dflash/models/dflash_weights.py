"""The tensors of a draft: how they group, and the one table of their names (both spellings) and shapes.

D = n_embd, V = n_vocab, taps = len(target_layers), groups = D / conv_group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from ..gguf_file import GGUFFile, TensorInfo
from ..vocabulary import token_count
from .metadata import Keys
from .tensor_table import Binder, FileTensors, Linear, Source, Stack, T, refuse_unknown

if TYPE_CHECKING:
    from .dflash import DFlashParams

SELECTOR = ("selector_hidden.weight", "dflash.selector.hproj.weight")
PREDECESSOR = ("selector_predecessor.weight", "dflash.selector.pred_cb", "dflash.selector.pred_cb.weight")
SUCCESSOR = ("selector_successor.weight", "dflash.selector.succ_cb", "dflash.selector.succ_cb.weight")
FUSION = ("fc.weight", "dflash.fc.weight")
ROPE_FREQS = "rope_freqs.weight"

_CONV_TENSORS = ("_conv_base", "_conv.base", "_conv_proj.weight", "_conv.proj.weight")
_UNSUPPORTED = {
    "d2t": "a reduced draft vocabulary",
    "markov_w1.weight": "DSpark's Markov head",
    "markov_w2.weight": "DSpark's Markov head",
    "conf_proj.weight": "DSpark's confidence head",
    "conf_proj.bias": "DSpark's confidence head",
}


@dataclass(frozen=True)
class DynamicConv(Generic[T]):
    """A grouped dynamic convolution: fixed part [D, taps, 2 sides], projection to the per-row part."""

    base: T
    proj: Linear[T]


@dataclass(frozen=True)
class DFlashLayer(Generic[T]):
    """One draft layer. Where `qkv` has no v the values are the keys' projection, RMS-normed without a weight."""

    attn_norm: T
    attn_conv: DynamicConv[T] | None
    qkv: Stack[T]
    output: Linear[T]
    q_norm: T
    k_norm: T
    attn_post_norm: T | None
    ffn_norm: T
    ffn_conv: DynamicConv[T] | None
    gate_up: Stack[T]
    ffn_down: Linear[T]
    ffn_post_norm: T | None
    out_scale: T | None


@dataclass(frozen=True)
class Selector(Generic[T]):
    """DFlash2's selector: gate projection [D, rank] and two codebooks [rank, V]."""

    hidden: Linear[T]
    predecessor: T
    successor: T


@dataclass(frozen=True)
class DFlashWeights(Generic[T]):
    """All tensors of a draft. `token_embd` and `head` are None where the target's are used.

    `append`: the K and V projections of all layers as one matrix, layer by layer, where there can be one. It is a copy:
    where they lie, K and V of a layer stand behind its q.
    """

    fc: Linear[T]
    enc_norm: T
    layers: tuple[DFlashLayer[T], ...]
    output_norm: T
    selector: Selector[T] | None
    token_embd: T | None
    head: Linear[T] | None
    rope_freqs: T | None
    append: T | None = None


def bind(params: DFlashParams, source: Source[T]) -> DFlashWeights[T]:
    """The weights, each tensor asked from `source` by its spec: this is the table of tensors."""
    ask, d, v = Binder(source), params.n_embd, params.n_vocab
    fused = len(params.target_layers) * d
    token_embd = ask.optional("token_embd.weight", d, v)
    own_head = ask.optional_linear("output", d, v)
    return DFlashWeights(
        fc=ask.linear("fc", fused, d, also=FUSION[1:]),
        enc_norm=ask.vector("enc.output_norm.weight", d, also=("dflash.hidden_norm.weight",)),
        layers=tuple(_bind_layer(params, ask, f"blk.{i}.") for i in range(params.n_layer)),
        output_norm=ask.vector("output_norm.weight", d),
        selector=_bind_selector(params, ask) if params.is_dflash2 else None,
        token_embd=token_embd,
        head=own_head or (None if token_embd is None else Linear(token_embd)),
        # Frequency factors belong to plain rope; a draft with M-RoPE sections does not use them.
        rope_freqs=None if params.rope_sections else ask.optional(ROPE_FREQS, params.head_dim // 2, kind="vector"),
    )


def append_parts(weights: DFlashWeights[T]) -> list[T]:
    """The matrices that are applied to the same fused taps: K, and V where there is one, of each layer. Empty when one
    has a scale of its own, since their products cannot be one then."""
    linears = [linear for layer in weights.layers for linear in layer.qkv.parts[1:]]
    return [] if any(linear.scale is not None for linear in linears) else [linear.weight for linear in linears]


def _bind_selector(p: DFlashParams, ask: Binder[T]) -> Selector[T]:
    rank = p.selector_rank
    return Selector(
        hidden=Linear(ask.tensor(SELECTOR[0], p.n_embd, rank, also=SELECTOR[1:])),
        predecessor=ask.tensor(PREDECESSOR[0], rank, p.n_vocab, also=PREDECESSOR[1:]),
        successor=ask.tensor(SUCCESSOR[0], rank, p.n_vocab, also=SUCCESSOR[1:]),
    )


def _bind_layer(p: DFlashParams, ask: Binder[T], blk: str) -> DFlashLayer[T]:
    q_width, kv_width = p.n_head * p.head_dim, p.n_head_kv * p.head_dim
    return DFlashLayer(
        attn_norm=ask.vector(blk + "attn_norm.weight", p.n_embd),
        attn_conv=_bind_conv(p, ask, blk + "attn_conv"),
        qkv=ask.stack(
            p.n_embd, (blk + "attn_q", q_width), (blk + "attn_k", kv_width), optional=[(blk + "attn_v", kv_width)]
        ),
        output=ask.linear(blk + "attn_output", q_width, p.n_embd),
        q_norm=ask.vector(blk + "attn_q_norm.weight", p.head_dim),
        k_norm=ask.vector(blk + "attn_k_norm.weight", p.head_dim),
        attn_post_norm=ask.optional(blk + "post_attention_norm.weight", p.n_embd, kind="vector"),
        ffn_norm=ask.vector(blk + "ffn_norm.weight", p.n_embd),
        ffn_conv=_bind_conv(p, ask, blk + "ffn_conv"),
        gate_up=ask.stack(p.n_embd, (blk + "ffn_gate", p.n_ff), (blk + "ffn_up", p.n_ff)),
        ffn_down=ask.linear(blk + "ffn_down", p.n_ff, p.n_embd),
        ffn_post_norm=ask.optional(blk + "post_ffw_norm.weight", p.n_embd, kind="vector"),
        out_scale=ask.optional(blk + "layer_output_scale.weight", 1, kind="vector"),
    )


def _bind_conv(p: DFlashParams, ask: Binder[T], name: str) -> DynamicConv[T] | None:
    if not p.is_dflash2:
        return None
    projected = 2 * p.conv_kernel * (p.n_embd // p.conv_group)
    return DynamicConv(
        base=ask.vector(f"{name}_base", p.n_embd, p.conv_kernel, 2, also=(f"{name}.base",)),
        proj=Linear(ask.tensor(f"{name}_proj.weight", p.n_embd, projected, also=(f"{name}.proj.weight",))),
    )


def check(file: GGUFFile, params: DFlashParams) -> DFlashWeights[TensorInfo]:
    """Where each tensor lies in the file; FileError if one is missing, unknown, or has another shape or type."""
    sinks = {name: "attention sinks" for name in file.tensors if name.endswith(".attn_sinks.weight")}
    for name, what in (_UNSUPPORTED | sinks).items():
        if name in file.tensors:
            raise file.error(f"{what} is not supported yet", name, list(file.tensors[name].shape), "no such tensor")
    source = FileTensors(file)
    weights = bind(params, source)
    refuse_unknown(file, source.used | {ROPE_FREQS}, f"{params.kind} {params.arch}")
    return weights


def has_selector(file: GGUFFile, keys: Keys) -> bool:
    """Whether the selector is there; a file with other DFlash2 parts but without it is refused, not run as DFlash1."""
    if any(name in file.tensors for name in SELECTOR):
        return True
    codebooks = {*PREDECESSOR, *SUCCESSOR}
    parts = [name for name in file.tensors if name.endswith(_CONV_TENSORS) or name in codebooks]
    parts += [key for key in map(keys, ("conv_kernel_size", "selector_rank", "selector_top_k")) if key in file]
    if parts:
        expected = f"a tensor, as there is {parts[0]}"
        raise file.error("a DFlash2 draft lacks its selector", SELECTOR[0], "nothing", expected)
    return False


def vocabulary_size(file: GGUFFile, keys: Keys) -> int:
    """Size of the token list, else of a codebook or table, else `vocab_size`; 0 if the file does not say."""
    tokens = token_count(file)
    if tokens:
        return tokens
    for name in (*PREDECESSOR, "token_embd.weight", "output.weight"):
        if name in file.tensors and len(file.tensors[name].shape) == 2:
            return file.tensors[name].shape[1]
    return file.integer(keys("vocab_size"), 0)


def check_fusion(file: GGUFFile, key: str, taps: int, n_embd: int) -> None:
    """FileError if `key` lists another number of taps than the fusion matrix, the ground truth, is wide."""
    fc = next((file.tensors[name] for name in FUSION if name in file.tensors), None)
    if fc is not None and fc.shape[0] != taps * n_embd:
        found = f"{taps} layers, {taps * n_embd} wide"
        holds = f"{fc.shape[0] / n_embd:g} taps of {n_embd} (the width of {fc.name}, {fc.shape[0]})"
        raise file.error("disagrees with the width of the fusion matrix", key, found, holds)
