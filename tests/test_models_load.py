"""Targets: every variant of a good file loads, every bad one is refused with file, key, found, expected."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from model_checks import bound_names, key_cases, load_draft, load_target, refusal
from tiny_pair import TinyPair

from pyllama_dflash.models import metadata

SMALL = TinyPair(n_vocab=320, n_ff=256).typed("F16")
TARGET = SMALL.target()


# -- good targets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recurrent": "bool"},
        {"recurrent": "i32"},
        {"recurrent": "bool", "mtp": True},
        {"mtp": True, "tied": True, "n_layer": 5, "interval": 2},
        {"interval": 1},
        {"n_head_kv": 4, "head_dim": 32, "rope_dims": 32, "n_k_heads": 4, "state_size": 16},
        {"state_size": 128, "head_dim": 256, "n_head": 6, "n_head_kv": 1, "rope_dims": 64},
        {"n_embd": 512, "n_layer": 8, "n_vocab": 4096},
    ],
    ids=str,
)
def test_good_targets(tmp_path, options):
    c = dataclasses.replace(SMALL, **options)
    model = c.target()
    p, w = load_target(model, tmp_path)
    assert (p.n_layer, p.n_embd, p.n_ff, p.n_vocab) == (c.n_layer, c.n_embd, c.n_ff, c.n_vocab)
    assert (p.n_head, p.n_head_kv, p.head_dim, p.rope_dims) == (c.n_head, c.n_head_kv, c.head_dim, c.rope_dims)
    assert (p.n_k_heads, p.n_v_heads, p.state_size) == (c.n_k_heads, c.n_v_heads, c.state_size)
    assert p.recurrent == tuple((i + 1) % c.interval != 0 for i in range(c.n_layer))
    assert (p.n_nextn, p.tied_head) == (int(c.mtp), c.tied)
    assert p.attn_scale == pytest.approx(c.head_dim**-0.5) and p.rope_base == 1e7 and p.rms_eps == pytest.approx(1e-6)
    assert [layer.gdn is not None for layer in w.layers] == list(p.recurrent)
    assert [layer.attention is None for layer in w.layers] == list(p.recurrent)
    trunk = {name for name in model.tensors if not name.startswith(f"blk.{c.n_layer}.")}
    assert bound_names(w) == trunk
    assert w.head.weight.name == ("token_embd.weight" if c.tied else "output.weight")


def test_numbers_of_the_published_target(tmp_path):
    """Layer kinds and channel counts of the 27B shapes, from metadata in both notations."""
    c = TinyPair(n_layer=64, interval=4, n_vocab=320, n_embd=32, n_ff=32, matrices="F16", head_dim=32, state_size=16,
                 n_head=6, n_head_kv=1, n_k_heads=16, n_v_heads=48)  # fmt: skip
    p, _ = load_target(c.target(), tmp_path)
    assert [i for i in range(64) if not p.recurrent[i]] == list(range(3, 64, 4))
    assert p.conv_channels == 2 * 16 * 16 + 48 * 16 and p.value_width == 48 * 16 and p.key_width == 16 * 16


MATRIX_TYPES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL IQ4_XS Q2_K Q3_K Q4_K Q5_K Q6_K".split()


@pytest.mark.parametrize("kind", MATRIX_TYPES)
def test_matrix_types(tmp_path, kind):
    c = TinyPair(n_vocab=320).typed(kind)
    if kind.endswith(("_K", "_XS")):
        c = dataclasses.replace(c, rank=256)
    _, w = load_target(c.target(), tmp_path)
    gdn = w.layers[0].gdn
    assert gdn is not None and gdn.qkv_z.parts[0].weight.type_name == w.token_embd.type_name == kind
    _, d = load_draft(c.draft(), tmp_path)
    assert d.selector is not None and d.selector.predecessor.type_name == d.fc.weight.type_name == kind


def test_values_written_per_layer_or_in_another_width(tmp_path):
    model = TARGET.copy()
    model.kv["qwen35.attention.head_count_kv"] = ("[i32]", [2, 2, 2, 2])
    model.kv["qwen35.feed_forward_length"] = ("[u32]", [256] * 4)
    model.kv["qwen35.embedding_length"] = ("u64", 256)
    model.kv["qwen35.ssm.state_size"] = ("i32", 64)
    model.kv["qwen35.rope.dimension_sections"] = ("[u32]", [6, 5, 5, 0])
    assert load_target(model, tmp_path)[0] == load_target(TARGET, tmp_path)[0]


def test_optional_target_values(tmp_path):
    model = TARGET.copy()
    model.kv["qwen35.attention.scale"] = ("f32", 0.5)
    model.kv["qwen35.rope.scaling.type"] = ("str", "none")
    for key in ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "full_attention_interval"):
        del model.kv[f"qwen35.{key}"]
    for name in ("blk.3.attn_k.weight", "blk.3.attn_v.weight"):
        model.reshape(name, 256, 256)
    p, _ = load_target(model, tmp_path)
    assert (p.attn_scale, p.n_head_kv, p.rope_base, p.rope_dims) == (0.5, 4, 10000.0, 64)
    assert p.recurrent == (True, True, True, False)


def test_scale_companions(tmp_path):
    model = TARGET.copy()
    names = ("blk.0.attn_qkv", "blk.3.attn_q", "blk.1.ffn_down", "output")
    for name in names:
        model.reshape(f"{name}.scale", 1)
    _, w = load_target(model, tmp_path)
    assert w.layers[0].gdn is not None and w.layers[3].attention is not None
    found = [w.layers[0].gdn.qkv_z.parts[0], w.layers[3].attention.qkv.parts[0], w.layers[1].ffn_down, w.head]
    assert [linear.scale.name for linear in found if linear.scale] == [f"{name}.scale" for name in names]
    assert w.layers[1].gate_up.parts[1].scale is None


# -- bad targets ---------------------------------------------------------------------------------------------------


BAD_TARGET_KEYS = {
    "block_count": ("-", None, "nothing", "an integer"),
    "block_count#0": ("u32", 0, "0", "1..512"),
    "block_count#513": ("u32", 513, "513", "1..512"),
    "nextn_predict_layers": ("u32", 4, "4", "0..3"),
    "context_length": ("-", None, "nothing", "an integer"),
    "embedding_length": ("str", "256", "str", "an integer"),
    "embedding_length#0": ("u32", 0, "0", "1.."),
    "feed_forward_length": ("[u32]", [256, 256, 256, 512], "512", "equal values"),
    "feed_forward_length#short": ("[u32]", [256, 256], "2 values", "4 values"),
    "attention.head_count": ("-", None, "nothing", "an integer"),
    "attention.head_count#0": ("u32", 0, "0", "1..1024"),
    "attention.head_count_kv": ("u32", 3, "4 / 3", "a ratio of"),
    "attention.head_count_kv#layers": ("[u32]", [0, 0, 0, 2], "0", "1..1024"),
    "attention.head_count_kv#differ": ("[u32]", [1, 1, 1, 2], "1, 2", "equal values"),
    "attention.key_length": ("u32", 48, "48", "one of 16, 32, 64, 128, 256"),
    "attention.value_length": ("u32", 32, "32", "64"),
    "attention.layer_norm_rms_epsilon": ("-", None, "nothing", "a number"),
    "attention.layer_norm_rms_epsilon#0": ("f32", 0.0, "0.0", "more than 0"),
    "rope.dimension_count": ("u32", 31, "31", "an even number up to 64"),
    "rope.dimension_count#wide": ("u32", 66, "66", "an even number up to 64"),
    "rope.freq_base": ("f32", -1.0, "-1.0", "more than 0"),
    "rope.dimension_sections": ("-", None, "nothing", "an array of integers"),
    "rope.dimension_sections#3": ("[i32]", [6, 5, 5], "6, 5, 5", "four integers"),
    "rope.dimension_sections#0": ("[i32]", [0, 0, 0, 16], "0, 0, 0, 16", "above 0"),
    "rope.dimension_sections#wide": ("[i32]", [30, 30, 30, 0], "30, 30, 30, 0", "1..64 together"),
    "rope.dimension_sections#extra": ("[i32]", [6, 5, 4, 1], "6, 5, 4, 1", "sections over 16 pairs"),
    "rope.dimension_sections#minus": ("[i32]", [6, -5, 5, 0], "-5", "0..64"),
    "rope.scaling.factor": ("f32", 4.0, "4.0", "1.0"),
    "rope.scaling.type": ("str", "yarn", "yarn", "none"),
    "ssm.conv_kernel": ("u32", 3, "3", "4"),
    "ssm.state_size": ("u32", 96, "96", "16, 32, 64, 128"),
    "ssm.group_count#0": ("u32", 0, "0", "1..1024"),
    "ssm.time_step_rank": ("u32", 3, "3", "a multiple of 2 key heads"),
    "ssm.time_step_rank#0": ("u32", 0, "0", "1..1024"),
    "ssm.inner_size": ("u32", 255, "255", "4 heads of 64 = 256"),
    "full_attention_interval": ("u32", 0, "0", "1.."),
    "attention.recurrent_layers": ("[bool]", [True, False], "2 values", "4 values"),
    "attention.recurrent_layers#2": ("[i32]", [1, 1, 1, 2], "2", "0..1"),
    "attention.recurrent_layers#kind": ("bool", True, "bool", "an array of booleans"),
    "tokenizer.ggml.tokens": ("-", None, "nothing", "an array of strings"),
    "tokenizer.ggml.tokens#kind": ("[u32]", [1, 2], r"\[u32\]", "an array of strings"),
    "tokenizer.ggml.token_type": ("[i32]", [1] * 319, r"319 of \[i32\]", "320 of"),
    "tokenizer.ggml.token_type#kind": ("[f32]", [1.0] * 320, r"320 of \[f32\]", r"320 of \[i32\]"),
    "tokenizer.ggml.scores": ("[f32]", [0.0] * 5, r"5 of \[f32\]", "320 of"),
    "tokenizer.ggml.eos_token_id": ("u32", 320, "320", "0..319"),
}


@pytest.mark.parametrize(("key", "kind", "value", "found", "expected"), list(key_cases("qwen35", BAD_TARGET_KEYS)))
def test_bad_target_metadata(tmp_path, key, kind, value, found, expected):
    model = TARGET.copy()
    if kind == "-":
        del model.kv[key]
    else:
        model.kv[key] = (kind, value)
    refusal(load_target, model, tmp_path, key, found, expected)


@pytest.mark.parametrize("arch", ["llama", "qwen35moe", "dflash"])
def test_target_of_another_architecture(tmp_path, arch):
    model = TARGET.copy()
    model.arch = arch
    refusal(load_target, model, tmp_path, "general.architecture", f"^{arch}$", "^qwen35$")


def test_recurrent_prediction_block(tmp_path):
    model = dataclasses.replace(SMALL, mtp=True, recurrent="bool").target()
    model.kv["qwen35.attention.recurrent_layers"] = ("[bool]", [True, True, True, False, True])
    refusal(load_target, model, tmp_path, "qwen35.attention.recurrent_layers", "True", "full attention")


def test_file_with_the_prediction_block_only(tmp_path):
    model = dataclasses.replace(SMALL, mtp=True).target()
    for name in [n for n in model.tensors if re.match(r"blk\.[0-3]\.", n)]:
        del model.tensors[name]
    error = refusal(load_target, model, tmp_path, "blk.0.attn_norm.weight", "nothing", "trunk")
    assert "multi-token-prediction" in str(error)


TARGET_TENSORS = sorted(TARGET.tensors)


@pytest.mark.parametrize("name", [n for n in TARGET_TENSORS if n != "output.weight"])
def test_missing_target_tensor(tmp_path, name):
    model = TARGET.copy()
    shape = list(model.tensors.pop(name)[1].shape[::-1])
    error = refusal(load_target, model, tmp_path, name, "nothing", "(matrix|vector) ")
    assert error.expected in (f"matrix {shape}", f"vector {shape}")


@pytest.mark.parametrize("name", TARGET_TENSORS)
def test_target_tensor_of_another_shape(tmp_path, name):
    model = TARGET.copy()
    shape = list(model.tensors[name][1].shape[::-1])
    model.reshape(name, *shape[:-1], shape[-1] + 1)
    found, expected = re.escape(str([*shape[:-1], shape[-1] + 1])), re.escape(str(shape))
    refusal(load_target, model, tmp_path, name, found, expected)


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("blk.0.attn_norm.weight", "Q8_0", "Q8_0"),
        ("blk.0.ssm_conv1d.weight", "I16", "I16"),
        ("blk.0.ssm_a", "F64", "F64"),
        ("blk.0.attn_qkv.weight", "I32", "I32"),
        ("blk.3.attn_q.weight", "IQ2_XXS", "IQ2_XXS"),
        ("token_embd.weight", "TQ1_0", "TQ1_0"),
    ],
)
def test_target_tensor_of_another_type(tmp_path, name, kind, found):
    model = TARGET.copy()
    shape = model.tensors[name][1].shape
    model.tensors[name] = (kind, raw_zeros(kind, shape))
    error = refusal(load_target, model, tmp_path, name, found, "one of .*BF16, F16, F32")
    assert ("IQ4_XS" in str(error.expected)) == name.endswith(("qkv.weight", "_q.weight", "embd.weight"))


def raw_zeros(kind: str, shape):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)


def test_unknown_tensors_are_refused(tmp_path):
    model = TARGET.copy()
    model.reshape("blk.3.attn_q.bias", 512)
    refusal(load_target, model, tmp_path, "blk.3.attn_q.bias", r"\[512\]", "no such tensor")


def test_fused_attention_is_refused(tmp_path):
    model = TARGET.copy()
    for part in "qkv":
        del model.tensors[f"blk.3.attn_{part}.weight"]
    model.reshape("blk.3.attn_qkv.weight", 256, 768)
    refusal(load_target, model, tmp_path, "blk.3.attn_qkv.weight", "768", "attn_q, attn_k and attn_v")


# -- limits --------------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_ops():
    header = Path(__file__).parents[1] / "ggml_patches/src/src/ggml-dflash-limits.h"
    text = header.read_text(encoding="utf-8")

    def listed(name: str) -> tuple[int, ...]:
        line = re.search(rf"#define {name}\(X\) (.*)", text)
        assert line, name
        return tuple(int(n) for n in re.findall(r"X\((\d+)\)", line[1]))

    def number(name: str) -> int:
        line = re.search(rf"#define {name} (\d+)$", text, re.MULTILINE)
        assert line, name
        return int(line[1])

    assert metadata.STATE_WIDTHS == listed("GGML_DFLASH_STATE_WIDTHS")
    assert metadata.HEAD_DIMS == listed("GGML_DFLASH_HEAD_DIMS")
    assert metadata.GQA_RATIOS == listed("GGML_DFLASH_GQA_RATIOS")
    assert metadata.CONV_TAPS == number("GGML_DFLASH_CONV_TAPS")
    assert metadata.MAX_BLOCK == number("GGML_DFLASH_MAX_BLOCK")
    assert metadata.MAX_HEADS == number("GGML_DFLASH_MAX_HEADS")
