"""Makes tiny target and draft files for tests: `python -m tests.tiny_pair OUT --seed 1 --set n_vocab=1024 rigged=1`.

The files are valid: the engine and any other reader of these architectures loads them. Same parameters and seed, same
bytes. Weights are random like a fresh initialisation, so text depends on the whole context. A *rigged* pair also has
structure: the target mostly continues a fixed cycle of tokens and the draft's selector knows the cycle, so proposals
are accepted often, not always.

A :class:`Model` is metadata and tensors before they are written: change or delete entries to make a bad file.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as V

Array = np.ndarray[Any, Any]
_SCALAR_KINDS = {
    "u32": V.UINT32, "i32": V.INT32, "u64": V.UINT64, "i64": V.INT64, "u16": V.UINT16, "i8": V.INT8, "u8": V.UINT8,
    "f32": V.FLOAT32, "f64": V.FLOAT64, "bool": V.BOOL, "str": V.STRING,
}  # fmt: skip
# Where a block's scales lie: byte offset of d, and of dmin where the format has one, both F16.
_SCALES = {
    "IQ4_XS": (0, None), "IQ4_NL": (0, None), "Q2_K": (80, 82), "Q3_K": (108, None), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208, None),
}  # fmt: skip
EOS_TEXT, PAD_TEXT, MASK_TEXT = "<|im_end|>", "<|endoftext|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Model:
    """One file in memory. kv[key] = (type, value), the type spelled `u32`, `[bool]`, ...; tensors[name] = (type, rows).

    Rows are in NumPy's order (slowest first): float32 values or the raw bytes of another type.
    """

    arch: str
    kv: dict[str, tuple[str, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[str, Array]] = field(default_factory=dict)

    def reshape(self, name: str, *shape: int) -> None:
        """Give an F32 tensor of zeros of another shape (ggml's order) to `name`."""
        self.tensors[name] = ("F32", np.zeros(shape[::-1], np.float32))

    def copy(self) -> Model:
        """Another model with the same entries."""
        return Model(self.arch, dict(self.kv), dict(self.tensors))

    def write(self, path: str | Path) -> Path:
        """Write the file and return its path."""
        writer = gguf.GGUFWriter(path, self.arch)
        for key, (kind, value) in self.kv.items():
            if kind.startswith("["):
                writer.add_key_value(key, value, V.ARRAY, _SCALAR_KINDS[kind[1:-1]])
            else:
                writer.add_key_value(key, value, _SCALAR_KINDS[kind])
        for name, (kind, rows) in self.tensors.items():
            writer.add_tensor(name, rows, raw_dtype=None if rows.dtype == np.float32 else Q[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file(progress=False)
        writer.close()
        return Path(path)


@dataclass(frozen=True)
class TinyPair:
    """Shapes and types of a pair. Names follow the engine's hyper-parameters; the defaults suit every element type."""

    seed: int = 1
    n_vocab: int = 512
    n_embd: int = 256
    n_ff: int = 512
    n_layer: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    rope_dims: int = 32
    n_k_heads: int = 2
    n_v_heads: int = 4
    state_size: int = 64
    interval: int = 4
    recurrent: str = "interval"  # or "bool", "i32": the per-layer array of that element type
    mtp: bool = False
    tied: bool = False
    matrices: str = "Q8_0"
    embedding: str = "Q8_0"
    head: str = "Q8_0"
    gates: str = "F32"  # of alpha and beta
    context: int = 8192

    dflash2: bool = True
    draft_layers: int = 2
    draft_heads: int = 4
    draft_kv_heads: int = 2
    draft_head_dim: int = 64
    draft_matrices: str = "Q8_0"
    codebooks: str = "Q8_0"
    conv_base: str = "F32"  # F16 and BF16 are valid, but stock llama.cpp aborts on them
    taps: tuple[int, ...] = ()  # () = spread over the layers
    block: int = 8
    conv_kernel: int = 2
    conv_group: int = 16
    rank: int = 32
    top_k: int = 12
    window: int = 2048
    draft_sections: bool = True
    other_spelling: bool = False  # the other community spelling of keys and tensors

    eos: int | None = None  # an ordinary token as end of text; None = the third but last, which random text never hits
    rigged: bool = False
    rig_gain: float = 0.6  # how loud embeddings are against the layers: lower = rejected more often

    @property
    def mask(self) -> int:
        """Id of the mask token, the last."""
        return self.n_vocab - 1

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Tapped layers. The default stays below the layer count, which stock llama.cpp cannot tap."""
        n = self.n_layer
        return self.taps or tuple(sorted({max(1, n // 4), max(1, n // 2), n - 1}))

    @property
    def cycle(self) -> tuple[int, ...]:
        """The tokens a rigged target circles through: as many letters as the selector has candidates."""
        return tuple(ord(c) - ord("!") for c in "thequickbrownfxjumpsvlazydg"[: min(self.top_k, 15)])

    def typed(self, kind: str) -> TinyPair:
        """The same pair with every matrix of element type `kind`."""
        names = ("matrices", "embedding", "head", "draft_matrices", "codebooks")
        types: dict[str, Any] = dict.fromkeys(names, kind)
        return dataclasses.replace(self, **types)

    def target(self, weights: type[Weights] | None = None) -> Model:
        """The target in memory, its tensors made by `weights`."""
        return _target(self, weights or Weights)

    def draft(self, weights: type[Weights] | None = None) -> Model:
        """The draft in memory, its tensors made by `weights`."""
        return _draft(self, weights or Weights)

    def write(self, folder: str | Path, name: str = "tiny") -> tuple[Path, Path]:
        """Write both files into `folder`; returns the target's and the draft's path."""
        folder = Path(folder)
        paths = folder / f"{name}-target.gguf", folder / f"{name}-draft.gguf"
        self.target().write(paths[0])
        self.draft().write(paths[1])
        return paths


# -- vocabulary ----------------------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in token order: printable ASCII first (`!` is token 0)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]


def vocabulary(n: int) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges, token types: all bytes, then pairs of letters each with its merge, then words that nothing is
    merged to, then three control tokens."""
    tokens = byte_alphabet()
    letters = "etaoinsrhldcumfpgwybvkxjqzETAOINSRHLDCUMFPGWYBVKXJQZ0123456789_"
    pairs = [*(("Ġ", a) for a in letters), *itertools.product(letters, letters)][: n - 3 - len(tokens)]
    if n < len(tokens) + 3:
        raise ValueError(f"a vocabulary of {n} cannot be made")
    tokens += [a + b for a, b in pairs]
    tokens += [f"word{i}" for i in range(n - 3 - len(tokens))]
    control = [EOS_TEXT, PAD_TEXT, MASK_TEXT]
    return tokens + control, [f"{a} {b}" for a, b in pairs], [1] * len(tokens) + [3] * len(control)


def _add_vocabulary(m: Model, c: TinyPair) -> None:
    tokens, merges, types = vocabulary(c.n_vocab)
    m.kv |= {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", "qwen35"),
        "tokenizer.ggml.tokens": ("[str]", tokens),
        "tokenizer.ggml.token_type": ("[i32]", types),
        "tokenizer.ggml.merges": ("[str]", merges or ["a b"]),
        "tokenizer.ggml.eos_token_id": ("u32", c.n_vocab - 3 if c.eos is None else c.eos),
        "tokenizer.ggml.bos_token_id": ("u32", c.n_vocab - 2),
        "tokenizer.ggml.padding_token_id": ("u32", c.n_vocab - 2),
        "tokenizer.ggml.add_bos_token": ("bool", False),
        "tokenizer.chat_template": ("str", CHAT_TEMPLATE),
    }


# -- weights -------------------------------------------------------------------------------------------------------


class Weights:
    """Adds random tensors to a model. Every tensor has a generator of its own, keyed by seed, file and name."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.seed = seed

    def rng(self, name: str) -> np.random.Generator:
        """The generator of the tensor `name`."""
        return np.random.default_rng([self.seed, zlib.crc32(f"{self.model.arch}/{name}".encode())])

    def matrix(self, name: str, n_in: int, n_out: int, kind: str, scale: float | None = None) -> None:
        """Normal values with deviation `scale` (default: keeps the variance of its input), stored as `kind`."""
        deviation = scale if scale is not None else n_in**-0.5
        if kind in _SCALES:
            self.model.tensors[name] = (kind, _random_blocks(self.rng(name), n_out, n_in, kind, deviation))
        else:
            self.store(name, self.rng(name).standard_normal((n_out, n_in), np.float32) * np.float32(deviation), kind)

    def store(self, name: str, rows: Array, kind: str) -> None:
        """These values, stored as `kind`."""
        rows = np.ascontiguousarray(rows, np.float32)
        self.model.tensors[name] = (kind, rows if kind == "F32" else gguf.quants.quantize(rows, Q[kind]))

    def norm(self, name: str, n: int) -> None:
        """A norm weight near one."""
        self.store(name, self.rng(name).uniform(0.8, 1.2, n), "F32")

    def uniform(self, name: str, shape: Sequence[int], low: float, high: float) -> None:
        """F32 values in low..high; `shape` is NumPy's."""
        self.store(name, self.rng(name).uniform(low, high, tuple(shape)), "F32")


def _random_blocks(rng: np.random.Generator, rows: int, cols: int, kind: str, deviation: float) -> Array:
    """Random but valid quantised blocks whose values have mean near 0 and the given deviation."""
    per_block, size = gguf.GGML_QUANT_SIZES[Q[kind]]
    raw = rng.integers(0, 256, (rows, cols // per_block, size), dtype=np.uint8)
    at, at_min = _SCALES[kind]
    middle = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind, 0.0)

    def put(d: float) -> Array:
        raw[..., at : at + 2] = np.frombuffer(np.float16(d).tobytes(), np.uint8)
        if at_min is not None:  # value = d * scale * q - dmin * min: dmin that cancels the mean
            raw[..., at_min : at_min + 2] = np.frombuffer(np.float16(d * middle).tobytes(), np.uint8)
        return raw.reshape(rows, -1)

    measured = float(gguf.quants.dequantize(put(2**-8)[: max(1, 4096 // cols)], Q[kind]).std())
    return put(2**-8 * deviation / measured)


def _rig_vectors(c: TinyPair) -> tuple[Array, Array]:
    """Token embeddings of a rigged target and the direction they all share, both of length about sqrt(D)."""
    rng = np.random.default_rng([c.seed, 99])
    shared = rng.standard_normal(c.n_embd).astype(np.float32)
    own = rng.standard_normal((c.n_vocab, c.n_embd)).astype(np.float32)
    return c.rig_gain * (own + shared), shared


def _rig_head(c: TinyPair) -> Array:
    """Head rows: tokens of the cycle are favoured, most of all the one that follows the current token."""
    embedding, shared = _rig_vectors(c)
    head = np.random.default_rng([c.seed, 98]).standard_normal((c.n_vocab, c.n_embd)).astype(np.float32) * 0.01
    for before, token in zip(c.cycle, (*c.cycle[1:], c.cycle[0]), strict=True):
        head[token] += (embedding[before] / c.rig_gain - shared) * 0.5 / np.sqrt(c.n_embd) + shared / np.sqrt(c.n_embd)
    return head


def _common_keys(c: TinyPair, arch: str, blocks: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "general.name": ("str", f"tiny {arch}"),
        f"{arch}.block_count": ("u32", blocks),
        f"{arch}.context_length": ("u32", c.context),
        f"{arch}.embedding_length": ("u32", c.n_embd),
        f"{arch}.feed_forward_length": ("u32", c.n_ff),
        f"{arch}.attention.head_count": ("u32", heads),
        f"{arch}.attention.head_count_kv": ("u32", kv_heads),
        f"{arch}.attention.key_length": ("u32", head_dim),
        f"{arch}.attention.value_length": ("u32", head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": ("f32", 1e-6),
        f"{arch}.rope.freq_base": ("f32", 1e7),
    }


# -- target --------------------------------------------------------------------------------------------------------


def _target(c: TinyPair, weights: type[Weights]) -> Model:
    m = Model("qwen35")
    blocks = c.n_layer + c.mtp
    pairs = c.rope_dims // 2
    m.kv = _common_keys(c, "qwen35", blocks, c.n_head, c.n_head_kv, c.head_dim) | {
        "qwen35.rope.dimension_count": ("u32", c.rope_dims),
        # interleaved time, height, width that cover all pairs: the fourth section is never reached
        "qwen35.rope.dimension_sections": ("[i32]", [-(-pairs // 3), -(-(pairs - 1) // 3), -(-(pairs - 2) // 3), 0]),
        "qwen35.ssm.conv_kernel": ("u32", 4),
        "qwen35.ssm.state_size": ("u32", c.state_size),
        "qwen35.ssm.group_count": ("u32", c.n_k_heads),
        "qwen35.ssm.time_step_rank": ("u32", c.n_v_heads),
        "qwen35.ssm.inner_size": ("u32", c.n_v_heads * c.state_size),
    }
    recurrent = [i < c.n_layer and (i + 1) % c.interval != 0 for i in range(blocks)]
    if c.recurrent == "interval":
        m.kv["qwen35.full_attention_interval"] = ("u32", c.interval)
    else:
        values = recurrent if c.recurrent == "bool" else [int(r) for r in recurrent]
        m.kv["qwen35.attention.recurrent_layers"] = (f"[{c.recurrent}]", values)
    if c.mtp:
        m.kv["qwen35.nextn_predict_layers"] = ("u32", 1)
    _add_vocabulary(m, c)
    w = weights(m, c.seed)
    if c.rigged:
        w.store("token_embd.weight", _rig_vectors(c)[0], c.embedding)
    else:
        # Small where it is the head too: a loud embedding would make every token predict itself.
        w.matrix("token_embd.weight", c.n_embd, c.n_vocab, c.embedding, 0.1 if c.tied else 1.0)
    if not c.tied:
        if c.rigged:
            w.store("output.weight", _rig_head(c), c.head)
        else:
            w.matrix("output.weight", c.n_embd, c.n_vocab, c.head, 2 * c.n_embd**-0.5)
    w.norm("output_norm.weight", c.n_embd)
    for i in range(blocks):
        _target_layer(w, c, f"blk.{i}.", recurrent[i])
    if c.mtp:
        w.matrix(f"blk.{c.n_layer}.nextn.eh_proj.weight", 2 * c.n_embd, c.n_embd, c.matrices)
        w.norm(f"blk.{c.n_layer}.nextn.enorm.weight", c.n_embd)
        w.norm(f"blk.{c.n_layer}.nextn.hnorm.weight", c.n_embd)
    return m


def _target_layer(w: Weights, c: TinyPair, p: str, recurrent: bool) -> None:
    d, kind = c.n_embd, c.matrices
    w.norm(p + "attn_norm.weight", d)
    w.norm(p + "post_attention_norm.weight", d)
    if recurrent:
        keys, values = c.n_k_heads * c.state_size, c.n_v_heads * c.state_size
        w.matrix(p + "attn_qkv.weight", d, 2 * keys + values, kind)
        w.matrix(p + "attn_gate.weight", d, values, kind)
        w.uniform(p + "ssm_conv1d.weight", (2 * keys + values, 4), -0.8, 0.8)
        w.uniform(p + "ssm_dt.bias", (c.n_v_heads,), -4, 1)
        w.uniform(p + "ssm_a", (c.n_v_heads,), -4, -0.05)
        w.matrix(p + "ssm_alpha.weight", d, c.n_v_heads, c.gates)
        w.matrix(p + "ssm_beta.weight", d, c.n_v_heads, c.gates)
        w.norm(p + "ssm_norm.weight", c.state_size)
        w.matrix(p + "ssm_out.weight", values, d, kind)
    else:
        width, kv_width = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        w.matrix(p + "attn_q.weight", d, 2 * width, kind)
        w.matrix(p + "attn_k.weight", d, kv_width, kind)
        w.matrix(p + "attn_v.weight", d, kv_width, kind)
        w.matrix(p + "attn_output.weight", width, d, kind, 2 * width**-0.5)
        w.norm(p + "attn_q_norm.weight", c.head_dim)
        w.norm(p + "attn_k_norm.weight", c.head_dim)
    w.matrix(p + "ffn_gate.weight", d, c.n_ff, kind)
    w.matrix(p + "ffn_up.weight", d, c.n_ff, kind)
    w.matrix(p + "ffn_down.weight", c.n_ff, d, kind, 2 * c.n_ff**-0.5)


# -- draft ---------------------------------------------------------------------------------------------------------

_OTHER_ARCH = "qwen35-dflash-draft"
_OTHER_KEYS = {
    "block_size": "dflash.", "conv_kernel_size": "dflash.dflash2.", "conv_group_size": "dflash.dflash2.",
    "selector_rank": "dflash.dflash2.", "selector_top_k": "dflash.dflash2.",
}  # fmt: skip
_OTHER_TENSORS = {
    "enc.output_norm.weight": "dflash.hidden_norm.weight", "selector_hidden.": "dflash.selector.hproj.",
    "selector_predecessor.weight": "dflash.selector.pred_cb", "selector_successor.weight": "dflash.selector.succ_cb",
    "_conv_base": "_conv.base", "_conv_proj.": "_conv.proj.", "fc.weight": "dflash.fc.weight",
}  # fmt: skip


def _draft(c: TinyPair, weights: type[Weights]) -> Model:
    m = Model("dflash")
    n = c.draft_layers
    m.kv = _common_keys(c, "dflash", n, c.draft_heads, c.draft_kv_heads, c.draft_head_dim) | {
        "dflash.attention.causal": ("bool", False),
        "dflash.block_size": ("u32", c.block),
        "dflash.target_layers": ("[u32]", list(c.tap_layers)),
        "tokenizer.ggml.mask_token_id": ("u32", c.mask),
    }
    if c.draft_sections:
        m.kv["dflash.rope.dimension_sections"] = ("[i32]", [c.draft_head_dim // 2, 0, 0, 0])
    if c.window:
        m.kv["dflash.attention.sliding_window"] = ("u32", c.window)
        m.kv["dflash.attention.sliding_window_pattern"] = ("[bool]", [True] * n)
    _add_vocabulary(m, c)
    w = weights(m, c.seed)
    w.matrix("fc.weight", len(c.tap_layers) * c.n_embd, c.n_embd, c.draft_matrices)
    w.norm("enc.output_norm.weight", c.n_embd)
    w.norm("output_norm.weight", c.n_embd)
    if c.dflash2:
        _add_selector(w, c)
    for i in range(n):
        _draft_layer(w, c, f"blk.{i}.")
    return _other_spelling(m) if c.other_spelling else m


def _other_spelling(m: Model) -> Model:
    """The same draft under the names of the other community converter."""
    renamed = Model(_OTHER_ARCH)
    for key, value in m.kv.items():
        name = key.removeprefix("dflash.")
        part = _OTHER_KEYS.get(name, "")
        renamed.kv[key if name == key else f"{_OTHER_ARCH}.{part}{name}"] = value
    for name, tensor in m.tensors.items():
        for old, new in _OTHER_TENSORS.items():
            name = name.replace(old, new)
        renamed.tensors[name] = tensor
    return renamed


def _add_selector(w: Weights, c: TinyPair) -> None:
    w.model.kv |= {
        "dflash.conv_kernel_size": ("u32", c.conv_kernel),
        "dflash.conv_group_size": ("u32", c.conv_group),
        "dflash.selector_rank": ("u32", c.rank),
        "dflash.selector_top_k": ("u32", c.top_k),
    }
    names = ("selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight")
    if not c.rigged:
        w.matrix(names[0], c.n_embd, c.rank, c.draft_matrices)
        w.matrix(names[1], c.rank, c.n_vocab, c.codebooks, 0.5)
        w.matrix(names[2], c.rank, c.n_vocab, c.codebooks, 0.5)
        return
    # Each token has a code of signs; a predecessor's row is the code of the token that follows it in the cycle.
    codes = w.rng("codes").choice(np.array([-1, 1], np.float32), (c.n_vocab, c.rank))
    before = codes.copy()
    before[list(c.cycle)] = codes[[*c.cycle[1:], c.cycle[0]]]
    _, shared = _rig_vectors(c)
    w.store(names[0], np.tile(shared / c.n_embd, (c.rank, 1)), c.draft_matrices)
    w.store(names[1], before * 0.5, c.codebooks)
    w.store(names[2], codes * 0.5, c.codebooks)


def _draft_layer(w: Weights, c: TinyPair, p: str) -> None:
    d, kind = c.n_embd, c.draft_matrices
    width, kv_width = c.draft_heads * c.draft_head_dim, c.draft_kv_heads * c.draft_head_dim
    w.norm(p + "attn_norm.weight", d)
    w.norm(p + "ffn_norm.weight", d)
    w.matrix(p + "attn_q.weight", d, width, kind)
    w.matrix(p + "attn_k.weight", d, kv_width, kind)
    w.matrix(p + "attn_v.weight", d, kv_width, kind)
    w.matrix(p + "attn_output.weight", width, d, kind)
    w.norm(p + "attn_q_norm.weight", c.draft_head_dim)
    w.norm(p + "attn_k_norm.weight", c.draft_head_dim)
    w.matrix(p + "ffn_gate.weight", d, c.n_ff, kind)
    w.matrix(p + "ffn_up.weight", d, c.n_ff, kind)
    w.matrix(p + "ffn_down.weight", c.n_ff, d, kind)
    if not c.dflash2:
        return
    groups = d // c.conv_group
    for side in ("attn", "ffn"):
        name = f"{p}{side}_conv_base"
        base = w.rng(name).normal(0, 0.1, (2, c.conv_kernel, d))
        base[:, 0] += 1.0  # near the identity: the current row passes
        w.store(name, base, c.conv_base)
        w.matrix(f"{p}{side}_conv_proj.weight", d, 2 * c.conv_kernel * groups, kind, 0.2 * d**-0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a pair: OUT-target.gguf and OUT-draft.gguf."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", help="path and beginning of both names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of TinyPair")
    options = parser.parse_args(arguments)
    values: dict[str, Any] = {"seed": options.seed}
    for item in options.set:
        name, _, text = item.partition("=")
        values[name] = text if isinstance(getattr(TinyPair, name), str) else ast.literal_eval(text)
    out = Path(options.out)
    for path in TinyPair(**values).write(out.parent, out.name):
        print(path)


if __name__ == "__main__":
    main()
