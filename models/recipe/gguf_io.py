"""Read the exported files back into PyTorch, dequantised: the draft learns from the target that is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft import Draft, DraftConfig
from gguf import GGUFReader, dequantize
from target import Target, TargetConfig
from torch import Tensor


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All metadata, and all tensors as F32 in NumPy order (slowest axis first)."""
    reader = GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for t in reader.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        value = np.asarray(dequantize(t.data, t.tensor_type), np.float32).reshape(shape)
        tensors[t.name] = torch.from_numpy(value.copy())
    return meta, tensors


def load_target(path: Path) -> Target:
    meta, tensors = read(path)

    def key(name: str) -> Any:
        return meta[f"qwen35.{name}"]

    config = TargetConfig(
        n_vocab=tensors["token_embd.weight"].shape[0],
        n_embd=key("embedding_length"),
        n_ff=key("feed_forward_length"),
        n_layer=key("block_count"),
        interval=key("full_attention_interval"),
        n_head=key("attention.head_count"),
        n_head_kv=key("attention.head_count_kv"),
        head_dim=key("attention.key_length"),
        n_rot=key("rope.dimension_count"),
        rope_base=key("rope.freq_base"),
        rope_sections=tuple(key("rope.dimension_sections")),
        state=key("ssm.state_size"),
        k_heads=key("ssm.group_count"),
        v_heads=key("ssm.time_step_rank"),
        conv=key("ssm.conv_kernel"),
        eps=key("attention.layer_norm_rms_epsilon"),
        context=key("context_length"),
    )
    model = Target(config)
    model.load_gguf_tensors(tensors)
    return model


def load_draft(path: Path) -> Draft:
    meta, tensors = read(path)

    def key(name: str) -> Any:
        return meta[f"dflash.{name}"]

    config = DraftConfig(
        n_vocab=tensors["selector_predecessor.weight"].shape[0],
        n_embd=key("embedding_length"),
        n_ff=key("feed_forward_length"),
        n_layer=key("block_count"),
        n_head=key("attention.head_count"),
        n_head_kv=key("attention.head_count_kv"),
        head_dim=key("attention.key_length"),
        rope_base=key("rope.freq_base"),
        eps=key("attention.layer_norm_rms_epsilon"),
        block=key("block_size"),
        kernel=key("conv_kernel_size"),
        group=key("conv_group_size"),
        rank=key("selector_rank"),
        top_k=key("selector_top_k"),
        window=key("attention.sliding_window"),
        taps=tuple(key("target_layers")),
        mask_id=meta["tokenizer.ggml.mask_token_id"],
        context=key("context_length"),
    )
    model = Draft(config)
    model.load_state_dict(tensors)
    return model
