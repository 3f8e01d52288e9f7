"""Drafts: every variant of a good file loads, every bad one is refused with file, key, found, expected."""

from __future__ import annotations

import dataclasses
import re

import pytest
from model_checks import bound_names, key_cases, load_draft, refusal
from tiny_pair import TinyPair

from pyllama_dflash.models.tensor_table import Linear

SMALL = TinyPair(n_vocab=320, n_ff=256).typed("F16")
DRAFT = SMALL.draft()
DRAFT1 = dataclasses.replace(SMALL, dflash2=False, block=16).draft()


# -- good drafts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dflash2": False, "block": 16},
        {"codebooks": "F32", "conv_base": "F16"},
        {"codebooks": "F16", "conv_base": "BF16"},
        {"codebooks": "BF16", "window": 0},
        {"block": 2, "conv_kernel": 3, "conv_group": 32, "rank": 64, "top_k": 15},
        {"draft_sections": False, "draft_layers": 1, "draft_heads": 8, "draft_kv_heads": 1, "draft_head_dim": 32},
        {"taps": (1, 2, 3, 4)},
    ],
    ids=str,
)
def test_good_drafts_in_both_spellings(tmp_path, options):
    c = dataclasses.replace(SMALL, **options)
    model = c.draft()
    p, w = load_draft(model, tmp_path)
    assert (p.kind, p.block_size, p.target_layers) == ("DFlash2" if c.dflash2 else "DFlash1", c.block, c.tap_layers)
    assert (p.n_layer, p.n_head, p.n_head_kv, p.head_dim) == (
        c.draft_layers, c.draft_heads, c.draft_kv_heads, c.draft_head_dim
    )  # fmt: skip
    assert (p.mask_token, p.window, p.windows) == (c.mask, c.window, (c.window,) * c.draft_layers)
    assert p.rope_sections == ((c.draft_head_dim // 2, 0, 0, 0) if c.draft_sections else None)
    assert (p.causal, p.activation, p.softcap) == (False, "silu", 0.0)
    assert (p.logit_scale, p.embedding_scale, p.value_scale) == (1.0, 1.0, 1.0)
    expected = (c.conv_kernel, c.conv_group, c.rank, c.top_k) if c.dflash2 else (0, 0, 0, 0)
    assert (p.conv_kernel, p.conv_group, p.selector_rank, p.selector_top_k) == expected
    assert bound_names(w) == set(model.tensors)
    assert (w.selector is not None) == (w.layers[0].attn_conv is not None) == c.dflash2
    assert w.token_embd is None and w.head is None and w.rope_freqs is None

    other = dataclasses.replace(c, other_spelling=True).draft()
    p2, w2 = load_draft(other, tmp_path)
    assert dataclasses.replace(p2, arch=p.arch) == p and p2.arch == "qwen35-dflash-draft"
    assert bound_names(w2) == set(other.tensors) != set(model.tensors)


def test_optional_draft_parts(tmp_path):
    model = DRAFT.copy()
    numbers = {
        "logit_scale": 0.5,
        "final_logit_softcapping": 30.0,
        "embedding_scale": 16.0,
        "attention.value_scale": 2.0,
    }
    model.kv |= {f"dflash.{key}": ("f32", value) for key, value in numbers.items()}
    model.kv["dflash.attention.sliding_window_pattern"] = ("[i32]", [1, 0])
    model.kv["dflash.attention.causal"] = ("bool", True)
    model.kv["dflash.hidden_activation"] = ("str", "gelu_pytorch_tanh")
    del model.tensors["blk.1.attn_v.weight"]
    for name, shape in {
        "blk.0.post_attention_norm.weight": (256,), "blk.0.post_ffw_norm.weight": (256,),
        "blk.0.layer_output_scale.weight": (1,), "rope_freqs.weight": (32,), "token_embd.weight": (256, 320),
    }.items():  # fmt: skip
        model.reshape(name, *shape)
    assert load_draft(model, tmp_path)[1].rope_freqs is None, "M-RoPE does not use frequency factors"
    del model.kv["dflash.rope.dimension_sections"]
    p, w = load_draft(model, tmp_path)
    assert (p.logit_scale, p.softcap, p.embedding_scale, p.value_scale) == (0.5, 30.0, 16.0, 2.0)
    assert (p.windows, p.window, p.causal, p.activation) == ((2048, 0), 0, True, "gelu")
    assert [len(layer.qkv.parts) for layer in w.layers] == [3, 2]
    optional = [
        w.layers[0].attn_post_norm,
        w.layers[0].ffn_post_norm,
        w.layers[0].out_scale,
        w.rope_freqs,
        w.token_embd,
    ]
    assert None not in optional
    assert w.head == Linear(w.token_embd), "a draft with its own embedding and no head is tied to it"
    model.reshape("output.weight", 256, 320)
    _, w = load_draft(model, tmp_path)
    assert w.head is not None and w.head.weight.name == "output.weight"


def test_dflash1_block_size_has_a_default(tmp_path):
    model = DRAFT1.copy()
    del model.kv["dflash.block_size"]
    assert load_draft(model, tmp_path)[0].block_size == 16


def test_draft_without_tokens_takes_its_codebooks_word(tmp_path):
    model = DRAFT.copy()
    for key in [k for k in model.kv if k.startswith("tokenizer.") and "mask" not in k]:
        del model.kv[key]
    assert load_draft(model, tmp_path)[0].n_vocab == 320


def test_training_layer_ids_of_the_other_spelling(tmp_path):
    """`target_layer_ids` names layers by their output, `target_layers` by their input: one apart."""
    model = dataclasses.replace(SMALL, other_spelling=True).draft()
    taps = model.kv.pop("qwen35-dflash-draft.target_layers")[1]
    model.kv["qwen35-dflash-draft.dflash.target_layer_ids"] = ("[i32]", [t - 1 for t in taps])
    model.kv["qwen35-dflash-draft.dflash.mask_token_id"] = model.kv.pop("tokenizer.ggml.mask_token_id")
    p, _ = load_draft(model, tmp_path)
    assert (p.target_layers, p.mask_token) == (tuple(taps), SMALL.mask)


# -- bad drafts ----------------------------------------------------------------------------------------------------

BAD_DRAFT_KEYS = {
    "block_count": ("u32", 0, "0", "1..512"),
    "embedding_length": ("u32", 0, "0", "1.."),
    "attention.head_count_kv": ("u32", 3, "4 / 3", "a ratio of"),
    "attention.key_length": ("u32", 80, "80", "one of"),
    "block_size": ("-", None, "nothing", "an integer"),
    "block_size#0": ("u32", 0, "0", "2..16"),
    "block_size#1": ("u32", 1, "1", "2..16"),
    "block_size#17": ("u32", 17, "17", "2..16"),
    "conv_kernel_size": ("-", None, "nothing", "an integer"),
    "conv_kernel_size#0": ("u32", 0, "0", "1..16"),
    "conv_group_size": ("u32", 24, "24", "a divisor of 256"),
    "conv_group_size#0": ("u32", 0, "0", "1..256"),
    "selector_rank": ("-", None, "nothing", "an integer"),
    "selector_rank#0": ("u32", 0, "0", "1.."),
    "selector_top_k": ("-", None, "nothing", "an integer"),
    "selector_top_k#16": ("u32", 16, "16", r"k \* \(k \+ 1\) <= hidden size 256"),
    "selector_top_k#257": ("u32", 257, "257", "1..256"),
    "target_layers": ("-", None, "nothing", "an array of integers"),
    "target_layers#0": ("[u32]", [0, 1, 2], "0", "1..512"),
    "target_layers#unsorted": ("[u32]", [2, 1, 3], "2, 1, 3", "rising"),
    "target_layers#twice": ("[u32]", [1, 1, 3], "1, 1, 3", "rising"),
    "target_layers#minus": ("[i32]", [-1, 1, 3], "-1", "1..512"),
    "target_layers#more": (
        "[u32]",
        [1, 2, 3, 4],
        "4 layers, 1024 wide",
        r"3 taps of 256 \(the width of fc.weight, 768\)",
    ),
    "attention.sliding_window_pattern": ("-", None, "nothing", "an array of booleans"),
    "attention.sliding_window_pattern#1": ("[bool]", [True], "1 values", "2 values"),
    "rope.dimension_sections": ("[i32]", [32], "32", "four integers"),
    "rope.dimension_sections#extra": ("[i32]", [16, 8, 0, 8], "16, 8, 0, 8", "sections over 32 pairs"),
    "rope.scaling.type": ("str", "yarn", "yarn", "none"),
    "hidden_activation": ("str", "relu", "relu", "silu, gelu"),
    "final_logit_softcapping": ("f32", -1.0, "-1.0", "0 or more"),
    "tokenizer.ggml.mask_token_id": ("-", None, "nothing", "an integer"),
    "tokenizer.ggml.mask_token_id#320": ("u32", 320, "320", "0..319"),
}


@pytest.mark.parametrize(("key", "kind", "value", "found", "expected"), list(key_cases("dflash", BAD_DRAFT_KEYS)))
def test_bad_draft_metadata(tmp_path, key, kind, value, found, expected):
    model = DRAFT.copy()
    if kind == "-":
        del model.kv[key]
    else:
        model.kv[key] = (kind, value)
    refusal(load_draft, model, tmp_path, key, found, expected)


@pytest.mark.parametrize("arch", ["llama", "qwen35", "eagle3"])
def test_draft_of_another_architecture(tmp_path, arch):
    model = DRAFT.copy()
    model.arch = arch
    refusal(load_draft, model, tmp_path, "general.architecture", f"^{arch}$", "^dflash$")


DRAFT_TENSORS = sorted(DRAFT.tensors)


@pytest.mark.parametrize("name", [n for n in DRAFT_TENSORS if not n.endswith("attn_v.weight")])
def test_missing_draft_tensor(tmp_path, name):
    model = DRAFT.copy()
    del model.tensors[name]
    refusal(load_draft, model, tmp_path, name, "nothing", "matrix|vector|a tensor, as there is")


@pytest.mark.parametrize("name", DRAFT_TENSORS)
def test_draft_tensor_of_another_shape(tmp_path, name):
    model = DRAFT.copy()
    shape = list(model.tensors[name][1].shape[::-1])
    model.reshape(name, *shape[:-1], shape[-1] + 1)
    refusal(load_draft, model, tmp_path, name, str(shape[-1] + 1), re.escape(str(shape)))


def test_codebook_rows_are_the_vocabulary(tmp_path):
    model = DRAFT.copy()
    for key in [k for k in model.kv if k.startswith("tokenizer.") and "mask" not in k]:
        del model.kv[key]
    model.reshape("selector_successor.weight", 32, 319)
    refusal(load_draft, model, tmp_path, "selector_successor.weight", r"\[32, 319\]", r"\[32, 320\]")


def test_candidates_are_tokens(tmp_path):
    model = DRAFT.copy()
    for key in [k for k in model.kv if k.startswith("tokenizer.")]:
        del model.kv[key]
    model.kv["tokenizer.ggml.mask_token_id"] = ("u32", 7)
    for name in ("selector_predecessor.weight", "selector_successor.weight"):
        model.reshape(name, 32, 8)
    refusal(load_draft, model, tmp_path, "dflash.selector_top_k", "12", r"1\.\.8")


@pytest.mark.parametrize(
    ("name", "what"),
    [("d2t", "reduced draft vocabulary"), ("blk.0.attn_sinks.weight", "attention sinks"),
     ("markov_w1.weight", "Markov"), ("conf_proj.weight", "confidence")],
)  # fmt: skip
def test_parts_not_supported_yet(tmp_path, name, what):
    model = DRAFT1.copy()
    model.reshape(name, 4)
    error = refusal(load_draft, model, tmp_path, name, r"\[4\]", "no such tensor")
    assert what in str(error) and "not supported yet" in str(error)


def test_deepseek_drafts_are_not_supported_yet(tmp_path):
    model = DRAFT1.copy()
    model.kv["dflash.hyper_connection.count"] = ("u32", 4)
    refusal(load_draft, model, tmp_path, "dflash.hyper_connection.count", "4", "0")


def test_a_dflash2_file_is_never_run_as_dflash1(tmp_path):
    model = DRAFT.copy()
    for name in [n for n in model.tensors if n.startswith("selector")]:
        del model.tensors[name]
    refusal(load_draft, model, tmp_path, "selector_hidden.weight", "nothing", "as there is blk.0.attn_conv_base")
    for name in [n for n in model.tensors if "conv" in n]:
        del model.tensors[name]
    refusal(load_draft, model, tmp_path, "selector_hidden.weight", "nothing", "as there is dflash.conv_kernel_size")
    for key in [k for k in model.kv if "conv_" in k or "selector_" in k]:
        del model.kv[key]
    assert load_draft(model, tmp_path)[0].kind == "DFlash1"
    model.reshape("selector_successor.weight", 32, 320)
    refusal(load_draft, model, tmp_path, "selector_hidden.weight", "nothing", "as there is selector_successor.weight")


@pytest.mark.parametrize(
    ("standard", "old", "value"),
    [
        ("dflash.target_layers", "dflash.target_layer_ids", ("[i32]", [0, 1, 2])),
        ("tokenizer.ggml.mask_token_id", "dflash.mask_token_id", ("u32", 319)),
    ],
)
def test_private_keys_of_old_files_are_explained(tmp_path, standard, old, value):
    model = DRAFT1.copy()
    del model.kv[standard]
    model.kv[old] = value
    error = refusal(load_draft, model, tmp_path, old, r"\[i32\]|u32", re.escape(standard))
    assert "convert the draft again" in str(error)
