"""The draft: a block-diffusion decoder over the target's taps (GGUF architecture `dflash`), DFlash1 and DFlash2.

DFlash2 adds dynamic convolutions around both halves of a layer and a selector that walks the candidates; its file is
known by the selector's tensor.  Shapes are ggml's (first varies fastest).  The tensors are in `dflash_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ..gguf_file import GGUFFile
from .dflash_weights import DFlashLayer as DFlashLayer
from .dflash_weights import DFlashWeights as DFlashWeights
from .dflash_weights import DynamicConv as DynamicConv
from .dflash_weights import Selector as Selector
from .dflash_weights import bind as bind
from .dflash_weights import check as check
from .dflash_weights import check_fusion, has_selector, vocabulary_size
from .metadata import MAX_BLOCK, MAX_LAYERS, MAX_WIDTH, MIN_BLOCK, CommonParams, Keys, read_common

ARCH = "dflash"
ARCHS = (ARCH, "qwen35-dflash-draft", "dflash-draft")
MAX_TOP_K = 256
DEFAULT_BLOCK = 16  # of DFlash1 files that do not say
MASK_KEY = "tokenizer.ggml.mask_token_id"
_SPELLINGS = ("dflash.dflash2.", "dflash.")


@dataclass(frozen=True, kw_only=True)
class DFlashParams(CommonParams):
    """Hyper-parameters of a draft.

    `target_layers[i]`: the target's residual stream entering that layer is tap i (the layer count itself: leaving the
    last).  `windows[i]`: positions layer i sees, 0 for all.  The factors `logit_scale`, `embedding_scale` and
    `value_scale` are 1 and `softcap` is 0 where the file has none.  The `conv_*` and `selector_*` fields are 0 in
    DFlash1.
    """

    is_dflash2: bool
    block_size: int
    target_layers: tuple[int, ...]
    mask_token: int
    windows: tuple[int, ...]
    causal: bool
    activation: Literal["silu", "gelu"]
    logit_scale: float
    softcap: float
    embedding_scale: float
    value_scale: float
    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_top_k: int

    @property
    def kind(self) -> str:
        """`DFlash1` or `DFlash2`."""
        return "DFlash2" if self.is_dflash2 else "DFlash1"

    @property
    def window(self) -> int:
        """Positions that must be kept for the block: the largest window, 0 if some layer sees all."""
        return 0 if 0 in self.windows else max(self.windows)

    @classmethod
    def from_file(cls, file: GGUFFile) -> DFlashParams:
        """Read and check everything, tensors included; FileError names what does not fit."""
        arch = file.text("general.architecture")
        if arch not in ARCHS:
            raise file.error("not a draft model this engine runs", "general.architecture", arch, ARCH)
        keys = Keys(file, arch, _SPELLINGS)
        hyper = keys("hyper_connection.count")
        if file.integer(hyper, 0):
            raise file.error("DeepSeek-V4 drafts are not supported yet", hyper, file.integer(hyper), 0)
        n_layer = file.integer(keys("block_count"), low=1, high=MAX_LAYERS)
        common = read_common(file, keys, blocks=n_layer, interleaved=False)
        is_dflash2 = has_selector(file, keys)
        n_vocab = vocabulary_size(file, keys)
        params = cls(
            **common,
            **_read_selector(file, keys, common["n_embd"], n_vocab) if is_dflash2 else _NO_SELECTOR,
            **_read_factors(file, keys),
            arch=arch,
            n_layer=n_layer,
            n_vocab=n_vocab,
            is_dflash2=is_dflash2,
            block_size=file.integer(
                keys("block_size"), None if is_dflash2 else DEFAULT_BLOCK, low=MIN_BLOCK, high=MAX_BLOCK
            ),
            target_layers=_read_taps(file, keys, arch, common["n_embd"]),
            mask_token=_read_mask(file, keys, arch, n_vocab),
            windows=_read_windows(file, keys, n_layer),
            causal=file.flag(keys("attention.causal"), False),
            activation=_read_activation(file, keys),
        )
        check(file, params)
        return params


_NO_SELECTOR: dict[str, Any] = {"conv_kernel": 0, "conv_group": 0, "selector_rank": 0, "selector_top_k": 0}


def _read_selector(file: GGUFFile, keys: Keys, n_embd: int, n_vocab: int) -> dict[str, Any]:
    kernel = file.integer(keys("conv_kernel_size"), low=1, high=MAX_BLOCK)
    group = file.integer(keys("conv_group_size"), low=1, high=n_embd)
    if n_embd % group:
        raise file.error("does not divide the hidden size", keys("conv_group_size"), group, f"a divisor of {n_embd}")
    rank = file.integer(keys("selector_rank"), low=1, high=MAX_WIDTH)
    top_k = file.integer(keys("selector_top_k"), low=1, high=min(MAX_TOP_K, n_vocab))
    if top_k * (top_k + 1) > n_embd:
        limit = f"k with k * (k + 1) <= hidden size {n_embd}"
        raise file.error("lattice row does not fit the hidden size", keys("selector_top_k"), top_k, limit)
    return {"conv_kernel": kernel, "conv_group": group, "selector_rank": rank, "selector_top_k": top_k}


def _read_factors(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    """Optional scalars; 0 in a file means the same as a missing key."""
    softcap = file.number(keys("final_logit_softcapping"), 0.0)
    if softcap < 0:
        raise file.error("out of range", keys("final_logit_softcapping"), softcap, "0 or more")
    return {
        "softcap": softcap,
        "logit_scale": file.number(keys("logit_scale"), 0.0) or 1.0,
        "embedding_scale": file.number(keys("embedding_scale"), 0.0) or 1.0,
        "value_scale": file.number(keys("attention.value_scale"), 0.0) or 1.0,
    }


def _read_taps(file: GGUFFile, keys: Keys, arch: str, n_embd: int) -> tuple[int, ...]:
    """Tapped layers by the layer whose input they are.

    `target_layer_ids` is the training configuration's convention, the layer whose output is tapped: one less.
    """
    key, shift = keys("target_layers"), 0
    ids = keys("target_layer_ids")
    if key not in file and ids in file:
        if arch == ARCH:
            _refuse_old(file, ids, key)
        key, shift = ids, 1
    taps = tuple(tap + shift for tap in file.integers(key, low=1 - shift, high=MAX_LAYERS))
    if not taps or any(a >= b for a, b in pairwise(taps)):
        raise file.error("tapped layers", key, list(taps), "layers in rising order")
    check_fusion(file, key, len(taps), n_embd)
    return taps


def _read_mask(file: GGUFFile, keys: Keys, arch: str, n_vocab: int) -> int:
    key, own = MASK_KEY, keys("mask_token_id")
    if key not in file and own in file:
        if arch == ARCH:
            _refuse_old(file, own, key)
        key = own
    return file.integer(key, high=n_vocab - 1 if n_vocab else 2**31 - 1)


def _refuse_old(file: GGUFFile, key: str, standard: str) -> None:
    raise file.error("private key of an early converter; convert the draft again", key, file.kind(key), standard)


def _read_windows(file: GGUFFile, keys: Keys, n_layer: int) -> tuple[int, ...]:
    window = file.integer(keys("attention.sliding_window"), 0)
    if not window:
        return (0,) * n_layer
    key = keys("attention.sliding_window_pattern")
    windowed = file.flags(key)
    if len(windowed) != n_layer:
        raise file.error("wrong number of layers", key, f"{len(windowed)} values", f"{n_layer} values")
    return tuple(window if w else 0 for w in windowed)


def _read_activation(file: GGUFFile, keys: Keys) -> Literal["silu", "gelu"]:
    name = file.text(keys("hidden_activation"), "silu")
    if name == "silu":
        return "silu"
    if name in ("gelu", "gelu_pytorch_tanh"):
        return "gelu"
    raise file.error("activation is not supported", keys("hidden_activation"), name, "silu, gelu or gelu_pytorch_tanh")
