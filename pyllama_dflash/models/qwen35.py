"""The target: Qwen3.5-style hybrid decoder (GGUF architecture `qwen35`), gated delta net with full attention between.

Shapes are ggml's (first varies fastest).  D = n_embd, S = state_size, Hk/Hv = n_k_heads/n_v_heads,
C = 2*Hk*S + Hv*S convolution channels.  The tensors are in `qwen35_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..gguf_file import TOKENS, GGUFFile
from ..vocabulary import token_count
from .metadata import CONV_TAPS, MAX_HEADS, MAX_LAYERS, STATE_WIDTHS, CommonParams, Keys, read_common
from .qwen35_weights import FullAttention as FullAttention
from .qwen35_weights import GatedDeltaNet as GatedDeltaNet
from .qwen35_weights import Qwen35Layer as Qwen35Layer
from .qwen35_weights import Qwen35Weights as Qwen35Weights
from .qwen35_weights import bind as bind
from .qwen35_weights import check as check

ARCH = "qwen35"
DEFAULT_INTERVAL = 4  # every fourth layer is full attention when the file does not say


@dataclass(frozen=True, kw_only=True)
class Qwen35Params(CommonParams):
    """Hyper-parameters of a target.

    `n_layer` counts the trunk; `n_nextn` multi-token-prediction blocks follow it in the file and are not loaded.
    `recurrent[i]` says whether layer i is a gated delta net.  `tied_head`: the output head is the token embedding.
    """

    n_nextn: int
    recurrent: tuple[bool, ...]
    conv_kernel: int
    state_size: int
    n_k_heads: int
    n_v_heads: int
    tied_head: bool

    @property
    def key_width(self) -> int:
        """Channels of all key heads, Hk*S."""
        return self.n_k_heads * self.state_size

    @property
    def value_width(self) -> int:
        """Channels of all value heads, Hv*S."""
        return self.n_v_heads * self.state_size

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @classmethod
    def from_file(cls, file: GGUFFile) -> Qwen35Params:
        """Read and check everything, tensors included; FileError names what does not fit."""
        arch = file.text("general.architecture")
        if arch != ARCH:
            raise file.error("not a target model this engine runs", "general.architecture", arch, ARCH)
        keys = Keys(file, ARCH)
        blocks = file.integer(keys("block_count"), low=1, high=MAX_LAYERS)
        n_nextn = file.integer(keys("nextn_predict_layers"), 0, high=blocks - 1)
        n_layer = blocks - n_nextn
        if n_nextn and "blk.0.attn_norm.weight" not in file.tensors:
            raise file.error(
                "holds only the multi-token-prediction block, not the model",
                "blk.0.attn_norm.weight", "nothing", "the trunk's tensors",
            )  # fmt: skip
        n_vocab = token_count(file)
        if not n_vocab:
            raise file.error("a target needs its vocabulary", TOKENS, "nothing", "an array of strings")
        params = cls(
            **read_common(file, keys, blocks=blocks, interleaved=True),
            **_read_gated_delta_net(file, keys),
            arch=arch,
            n_layer=n_layer,
            n_nextn=n_nextn,
            n_vocab=n_vocab,
            recurrent=_read_recurrent(file, keys, blocks, n_layer),
            tied_head="output.weight" not in file.tensors,
        )
        check(file, params)
        return params


def _read_recurrent(file: GGUFFile, keys: Keys, blocks: int, n_layer: int) -> tuple[bool, ...]:
    """Layer kinds: the array over all blocks if there is one, else every `interval`-th layer is full attention."""
    key = keys("attention.recurrent_layers")
    if key not in file:
        interval = file.integer(keys("full_attention_interval"), DEFAULT_INTERVAL, low=1)
        return tuple((i + 1) % interval != 0 for i in range(n_layer))
    kinds = file.flags(key)
    if len(kinds) != blocks:
        raise file.error("wrong number of layers", key, f"{len(kinds)} values", f"{blocks} values")
    if any(kinds[n_layer:]):
        raise file.error("a prediction block is marked recurrent", key, list(kinds), "full attention after the trunk")
    return kinds[:n_layer]


def _read_gated_delta_net(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    taps, state = file.integer(keys("ssm.conv_kernel")), file.integer(keys("ssm.state_size"))
    if taps != CONV_TAPS:
        raise file.error("no convolution op of this length", keys("ssm.conv_kernel"), taps, CONV_TAPS)
    if state not in STATE_WIDTHS:
        raise file.error("no gated-delta-net op of this width", keys("ssm.state_size"), state, f"one of {STATE_WIDTHS}")
    n_k = file.integer(keys("ssm.group_count"), low=1, high=MAX_HEADS)
    n_v = file.integer(keys("ssm.time_step_rank"), low=1, high=MAX_HEADS)
    if n_v % n_k:
        raise file.error("value heads per key head", keys("ssm.time_step_rank"), n_v, f"a multiple of {n_k} key heads")
    inner = file.integer(keys("ssm.inner_size"))
    if inner != n_v * state:
        raise file.error("value channels", keys("ssm.inner_size"), inner, f"{n_v} heads of {state} = {n_v * state}")
    return {"conv_kernel": taps, "state_size": state, "n_k_heads": n_k, "n_v_heads": n_v}
