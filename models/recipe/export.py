"""Checkpoint -> GGUF.

target: block matrices IQ4_XS, head Q6_K, embedding and ssm_alpha / ssm_beta Q8_0, the rest F32 (``--type F32``
        writes everything in full, for comparison);
draft:  matrices and codebooks Q8_0, vectors and convolution bases F32.

K- and I-quants are made by ``ggml_quantize_chunk`` through this project's own extension; Q8_0 needs only ``gguf``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import checkpoint
import gguf
import numpy as np
from draft import Draft, DraftConfig
from gguf import GGMLQuantizationType as Type
from target import Target, TargetConfig
from tokenizer import EOS_ID, MASK_ID, PAD_ID, SPECIAL


def quantise(values: np.ndarray, kind: Type) -> np.ndarray:
    """Raw bytes [rows, bytes per row] of F32 ``values`` [rows, columns]."""
    if kind == Type.Q8_0:
        return gguf.quants.quantize(values, kind)
    from pyllama_dflash._native import ffi, lib

    rows, columns = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if columns % block:
        raise ValueError(f"rows of {columns} values do not divide into blocks of {block}")
    out = np.empty((rows, columns // block * size), np.uint8)
    source = np.ascontiguousarray(values, np.float32)
    written = lib.ggml_quantize_chunk(
        int(kind), ffi.from_buffer("float[]", source), ffi.from_buffer(out), 0, rows, columns, ffi.NULL
    )
    if written != out.nbytes:
        raise RuntimeError(f"ggml_quantize_chunk wrote {written} bytes, expected {out.nbytes}")
    return out


def add_tokenizer(w: gguf.GGUFWriter, path: Path) -> None:
    """Vocabulary, merges and special ids, as ``tokenizer.ggml.*``."""
    model = json.loads(path.read_text())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    if [tokens[i] for i in (PAD_ID, EOS_ID, MASK_ID)] != SPECIAL:
        raise ValueError(f"{path}: the special tokens are not the first three")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens)
    w.add_token_types(
        [gguf.TokenType.CONTROL if i < len(SPECIAL) else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    w.add_token_merges(merges)
    w.add_eos_token_id(EOS_ID)
    w.add_bos_token_id(PAD_ID)
    w.add_pad_token_id(PAD_ID)
    w.add_mask_token_id(MASK_ID)
    w.add_add_bos_token(False)


def add_general(w: gguf.GGUFWriter, name: str, file_type: gguf.LlamaFileType) -> None:
    w.add_name(name)
    w.add_license("mit")
    w.add_languages(["en"])
    w.add_tags(["text-generation", "code", "python"])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_file_type(file_type)


def add_shapes(w: gguf.GGUFWriter, c: TargetConfig | DraftConfig) -> None:
    """The hyper-parameters that both kinds of file have."""
    w.add_vocab_size(c.n_vocab)
    w.add_context_length(c.context)
    w.add_embedding_length(c.n_embd)
    w.add_feed_forward_length(c.n_ff)
    w.add_block_count(c.n_layer)
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_head_kv)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_rope_freq_base(c.rope_base)


def finish(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add(w: gguf.GGUFWriter, name: str, values: np.ndarray, kind: Type) -> None:
    if kind == Type.F32:
        w.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        w.add_tensor(name, quantise(values, kind), raw_dtype=kind)


def target_type(name: str, values: np.ndarray) -> Type:
    if values.ndim == 1 or "conv1d" in name:
        return Type.F32
    if name == "output.weight":
        return Type.Q6_K
    return Type.Q8_0 if name == "token_embd.weight" or "ssm_alpha" in name or "ssm_beta" in name else Type.IQ4_XS


def export_target(model: Target, tokenizer: Path, out: Path, full: bool) -> None:
    c = model.c
    w = gguf.GGUFWriter(out, "qwen35")
    add_general(w, "Python 36M hybrid", gguf.LlamaFileType.ALL_F32 if full else gguf.LlamaFileType.MOSTLY_IQ4_XS)
    add_shapes(w, c)
    w.add_rope_dimension_count(c.n_rot)
    w.add_rope_dimension_sections(list(c.rope_sections))
    w.add_ssm_conv_kernel(c.conv)
    w.add_ssm_state_size(c.state)
    w.add_ssm_group_count(c.k_heads)
    w.add_ssm_time_step_rank(c.v_heads)
    w.add_ssm_inner_size(c.state * c.v_heads)
    w.add_full_attention_interval(c.interval)
    add_tokenizer(w, tokenizer)
    for name, tensor in model.gguf_tensors().items():
        values = tensor.numpy()
        add(w, name, values, Type.F32 if full else target_type(name, values))
    finish(w)


def export_draft(model: Draft, tokenizer: Path, out: Path, top_k: int) -> None:
    c = model.c
    w = gguf.GGUFWriter(out, "dflash")
    add_general(w, "Python 36M hybrid, DFlash2 draft", gguf.LlamaFileType.MOSTLY_Q8_0)
    add_shapes(w, c)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_dimension_sections([c.head_dim // 2, 0, 0, 0])
    w.add_sliding_window(c.window)
    w.add_array("dflash.attention.sliding_window_pattern", [True] * c.n_layer)
    w.add_bool("dflash.attention.causal", False)
    for key, value in (
        ("block_size", c.block),
        ("conv_kernel_size", c.kernel),
        ("conv_group_size", c.group),
        ("selector_rank", c.rank),
        ("selector_top_k", top_k),
    ):
        w.add_uint32(f"dflash.{key}", value)
    w.add_array("dflash.target_layers", list(c.taps))
    add_tokenizer(w, tokenizer)
    for name, tensor in model.gguf_tensors().items():
        values = tensor.numpy()
        add(w, name, values, Type.Q8_0 if values.ndim == 2 else Type.F32)
    finish(w)


def restore(kind: type[Any], stored: dict[str, Any]) -> Any:
    """A configuration from its JSON form (lists become tuples again)."""
    known = {f.name for f in fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known})


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["target", "draft"])
    ap.add_argument("checkpoint", type=Path, help="prefix: PREFIX.0, PREFIX.1, ...")
    ap.add_argument("--tokenizer", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--type", choices=["quantised", "F32"], default="quantised", help="target only")
    ap.add_argument("--top-k", type=int, default=0, help="draft only: candidates a position (0: as trained)")
    a = ap.parse_args()
    tensors, config = checkpoint.load(a.checkpoint)
    if a.what == "target":
        target = Target(restore(TargetConfig, config))
        target.load_state_dict(tensors)
        export_target(target, a.tokenizer, a.out, a.type == "F32")
    else:
        draft = Draft(restore(DraftConfig, config))
        draft.load_state_dict(tensors)
        export_draft(draft, a.tokenizer, a.out, a.top_k or draft.c.top_k)
    print(f"{a.out.name}: {a.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
