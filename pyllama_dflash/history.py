"""What a request is on the device: its tokens so far, where its anchor stands, and how it adjusts its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .ggml import TensorSet, Type
from .penalties import bias_of, penalties_of
from .sampling import MAX_BIASES, SamplingParams


class History:
    """history I32 [n_ctx, N]: the token at each position of a slot; base I32 [N]: the position of its anchor, the token
    whose row comes next. penalties F32 [2, N] and bias I32 [2, MAX_BIASES, N] as the op `penalise` reads them.

    `tokens` [N, n_ctx] and `bases` [N] are what the host knows of it. The device moves on by itself (`accept`), so a
    round sends nothing of it back: the host only takes note.
    """

    def __init__(self, tensors: TensorSet, n_ctx: int, slots: int) -> None:
        self.history = tensors.new("history", Type.I32, n_ctx, slots)
        self.base = tensors.new("base", Type.I32, slots)
        self.penalties = tensors.new("penalties", Type.F32, 2, slots)
        self.bias = tensors.new("bias", Type.I32, 2, MAX_BIASES, slots)
        self.tokens = np.zeros((slots, n_ctx), np.int32)
        self.bases = np.zeros(slots, np.int32)

    def start(self, slot: int, tokens: Sequence[int], params: SamplingParams) -> None:
        """A new request: its prompt, nothing of it computed yet."""
        self.put(slot, 0, tokens)
        self.penalties.set(penalties_of(params), 8 * slot)
        self.bias.set(bias_of(params, MAX_BIASES), 8 * MAX_BIASES * slot)
        self.set_base(slot, 0)

    def put(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """Write tokens at positions `position`.. of a slot."""
        n_ctx = self.tokens.shape[1]
        kept = np.asarray(tokens[: max(0, n_ctx - position)], np.int32)
        self.tokens[slot, position : position + len(kept)] = kept
        self.history.set(kept, 4 * (slot * n_ctx + position))

    def set_base(self, slot: int, base: int) -> None:
        """Rows up to `base` are computed."""
        self.bases[slot] = base
        self.base.set(self.bases[slot : slot + 1], 4 * slot)

    def note(self, slot: int, tokens: Sequence[int]) -> None:
        """The device has written these tokens behind the anchor and moved the anchor to the last of them."""
        first = int(self.bases[slot]) + 1
        room = self.tokens.shape[1] - first
        self.tokens[slot, first : first + min(len(tokens), room)] = tokens[:room]
        self.bases[slot] += len(tokens)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens that the host found final: write them behind the anchor, and move the anchor to the last of them."""
        base = int(self.bases[slot])
        self.put(slot, base + 1, tokens)
        self.set_base(slot, base + len(tokens))
