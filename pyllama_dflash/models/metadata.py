"""What target and draft files share: limits and common hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..gguf_file import GGUFFile

# What the engine's ops implement (ggml-dflash-limits.h).
STATE_WIDTHS = (16, 32, 64, 128)
HEAD_DIMS = (16, 32, 64, 128, 256)
GQA_RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
CONV_TAPS = 4
MIN_BLOCK, MAX_BLOCK = 2, 16

MAX_LAYERS = 512
MAX_WIDTH = 1 << 20
MAX_HEADS = 1024
MAX_CONTEXT = 1 << 30


class Keys:
    """Spells metadata keys: the architecture's prefix, or another spelling where the file has that one."""

    def __init__(self, file: GGUFFile, arch: str, spellings: Iterable[str] = ()) -> None:
        self._file = file
        self._prefixes = (f"{arch}.", *(f"{arch}.{spelling}" for spelling in spellings))

    def __call__(self, name: str) -> str:
        """The full key of `name`: the first spelling that the file has, else the standard one."""
        names = [prefix + name for prefix in self._prefixes]
        return next((key for key in names if key in self._file), names[0])


@dataclass(frozen=True, kw_only=True)
class CommonParams:
    """Hyper-parameters of both model kinds.

    `rope_dims` is how many of `head_dim` are rotated; `rope_sections` the four M-RoPE sections or None.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    attn_scale: float
    rope_dims: int
    rope_base: float
    rope_sections: tuple[int, int, int, int] | None
    rms_eps: float
    context_length: int
    n_vocab: int


def read_common(file: GGUFFile, keys: Keys, *, blocks: int, interleaved: bool) -> dict[str, Any]:
    """The :class:`CommonParams` fields that are plain metadata.

    `blocks` is the length of per-layer arrays; `interleaved`: rope sections are required and take turns pair by pair.
    """
    n_embd = file.integer(keys("embedding_length"), low=1, high=MAX_WIDTH)
    n_head = _constant(file, keys("attention.head_count"), blocks, high=MAX_HEADS)
    n_head_kv = _constant(file, keys("attention.head_count_kv"), blocks, default=n_head, high=MAX_HEADS)
    key = keys("attention.head_count_kv")
    if n_head % n_head_kv or n_head // n_head_kv not in GQA_RATIOS:
        raise file.error("query heads per kv head", key, f"{n_head} / {n_head_kv}", f"a ratio of {one_of(GQA_RATIOS)}")
    head_dim = file.integer(keys("attention.key_length"), n_embd // n_head)
    if head_dim not in HEAD_DIMS:
        raise file.error("no attention op of this width", keys("attention.key_length"), head_dim, one_of(HEAD_DIMS))
    value_dim = file.integer(keys("attention.value_length"), head_dim)
    if value_dim != head_dim:
        raise file.error("keys and values differ in width", keys("attention.value_length"), value_dim, head_dim)
    eps_key = keys("attention.layer_norm_rms_epsilon")
    eps = file.number(eps_key)
    if not 0 < eps < 1:
        raise file.error("out of range", eps_key, eps, "more than 0, less than 1")
    return {
        "n_embd": n_embd,
        "n_ff": _constant(file, keys("feed_forward_length"), blocks, high=MAX_WIDTH),
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "head_dim": head_dim,
        "attn_scale": file.number(keys("attention.scale"), 0.0) or 1 / math.sqrt(head_dim),
        "rms_eps": eps,
        "context_length": file.integer(keys("context_length"), low=1, high=MAX_CONTEXT),
        **_read_rope(file, keys, head_dim, interleaved),
    }


def _constant(file: GGUFFile, key: str, blocks: int, default: int | None = None, *, high: int) -> int:
    """A positive integer that is the same for all layers, written once or as an array."""
    values = file.per_layer(key, blocks, default, low=1, high=high)
    if len(set(values)) > 1:
        raise file.error("differs between layers, which is not supported", key, list(values), "equal values")
    return values[0]


def _read_rope(file: GGUFFile, keys: Keys, head_dim: int, interleaved: bool) -> dict[str, Any]:
    key = keys("rope.dimension_count")
    dims = file.integer(key, head_dim)
    if dims % 2 or not 0 < dims <= head_dim:
        raise file.error("rotated dimensions", key, dims, f"an even number up to {head_dim}")
    base = file.number(keys("rope.freq_base"), 10000.0)
    if base <= 0:
        raise file.error("out of range", keys("rope.freq_base"), base, "more than 0")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        if file.number(keys(name), 1.0) not in (0.0, 1.0):
            raise file.error("scaled rope is not supported yet", keys(name), file.number(keys(name)), 1.0)
    kind = file.text(keys("rope.scaling.type"), "none")
    if kind not in ("none", "linear"):
        raise file.error("scaled rope is not supported yet", keys("rope.scaling.type"), kind, "none")
    return {
        "rope_dims": dims,
        "rope_base": base,
        "rope_sections": _read_sections(file, keys, head_dim, dims, interleaved),
    }


def _read_sections(file: GGUFFile, keys: Keys, head_dim: int, dims: int, interleaved: bool) -> tuple[int, ...] | None:
    """M-RoPE's sections (time, height, width, extra), None if the file has none.

    Text stands at the same time, height and width and at extra 0, so M-RoPE is plain rope as long as no rotated pair
    falls to the extra axis; a file where one does is refused.
    """
    key = keys("rope.dimension_sections")
    if not interleaved and key not in file:
        return None
    sections = file.integers(key, high=head_dim)
    if len(sections) != 4 or not any(sections[:3]) or sum(sections) > head_dim:
        raise file.error(
            "sections of M-RoPE",
            key,
            list(sections),
            f"four integers, 1..{head_dim} together, one before the last above 0",
        )
    for pair in range(dims // 2):
        turn = pair % sum(sections)
        if turn >= (3 * sections[turn % 3] if interleaved else sum(sections[:3])):
            raise file.error(
                "text does not reach all rotated pairs", key, list(sections), f"sections over {dims // 2} pairs"
            )
    return sections


def one_of(values: Iterable[object]) -> str:
    """How a refusal lists what it takes."""
    return "one of " + ", ".join(str(v) for v in values)
