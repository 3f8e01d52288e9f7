"""One request: what it has, what its next rows are, and when it ends. Host decisions only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from .clock import Clock
from .errors import DeviceError, RequestError
from .result import Chunk, FinishReason, Result
from .sampling import SamplingParams
from .stops import StopMatcher
from .tokenizer import StreamDecoder, Tokenizer
from .width import Acceptance


@dataclass(eq=False)
class Lane:
    """A request in a slot (-1: it waits for one).

    `tokens` are the prompt and everything emitted; the first `base` of them are in the cache. While decoding,
    tokens[base] is the anchor: emitted (or the prompt's last) and not yet computed.
    """

    tokens: list[int]
    params: SamplingParams
    n_ctx: int
    tokenizer: Tokenizer
    slot: int = -1
    base: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    clock: Clock = field(default_factory=Clock)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self._text = LaneText(self.tokenizer, self.params.stop)
        self._parts: list[str] = []

    @property
    def emitted(self) -> Sequence[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    def piece(self, size: int) -> int:
        """Rows of the next prefill piece, 0 when the prompt but for its last token is computed. Pieces are cut at
        multiples of `size`: cuts depend on the request alone."""
        return max(0, min(self.base - self.base % size + size, self.prompt_tokens - 1) - self.base)

    @property
    def room(self) -> int:
        """Rows of the next round that can be of use: positions left in the context, and tokens left to emit."""
        return min(self.n_ctx - self.base, 2 * self._left - 1)

    @property
    def _left(self) -> int:
        """Tokens that max_tokens leaves to emit."""
        return self.params.max_tokens - (len(self.tokens) - self.prompt_tokens)

    def take(self, final: Sequence[int], rows: int) -> Chunk:
        """Emit the final tokens of a round of `rows` rows up to the request's end. DeviceError if there is none.

        final[t] is the target's token behind row t, so all but the last are accepted proposals. When the request ends
        inside the block the rows behind its end are final in the cache too, which nobody sees: the slot starts anew
        with its next request.
        """
        if not final:
            raise DeviceError(f"logits at position {self.base + 1} are not finite")
        before = len(self.tokens)
        self._count(rows, len(final))
        kept = self._until_end(final)
        stopped = self._text.feed(kept)
        if stopped is not None:
            kept, self.finish = kept[:stopped], "stop"
        self.tokens += kept
        self.base += len(final)
        return self._chunk(before)

    def cancel(self) -> Chunk:
        """End the request here."""
        self.finish = "cancelled"
        return self._chunk(len(self.tokens))

    def result(self) -> Result:
        """What came of it."""
        return Result(
            text="".join(self._parts),
            tokens=tuple(self.emitted),
            finish_reason=self.finish or "cancelled",
            prompt_tokens=self.prompt_tokens,
            rounds=self.rounds,
            proposed=self.proposed,
            accepted_per_position=tuple(self.accepted),
            timings=self.clock.timings(),
        )

    def _count(self, rows: int, final: int) -> None:
        self.rounds += 1
        self.proposed += rows - 1
        self.accepted.extend([0] * (rows - 1 - len(self.accepted)))
        for t in range(final - 1):
            self.accepted[t] += 1
        self.acceptance.note(rows, final)

    def _chunk(self, before: int) -> Chunk:
        text = self._text.take() if self.finish is None else self._text.finish(self.finish == "stop")
        self._parts.append(text)
        return Chunk(text, tuple(self.tokens[before:]), self.finish)

    def _until_end(self, final: Sequence[int]) -> Sequence[int]:
        """The tokens up to the end by an end token, max_tokens or the context; sets `finish` if it is there."""
        kept = final
        if not self.params.ignore_eos:
            end = next((t for t, token in enumerate(final) if self.tokenizer.is_eog(token)), None)
            if end is not None:
                kept, self.finish = final[:end], "eos"
        left, room = self._left, self.n_ctx - len(self.tokens)
        if len(kept) >= min(left, room):
            kept, self.finish = kept[: min(left, room)], "length" if left <= room else "context"
        return kept


class LaneText:
    """The text of a lane as it grows: whole characters only, and nothing behind a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._ready = ""

    def feed(self, tokens: Sequence[int]) -> int | None:
        """Add tokens up to the one that completes a stop string: how many these are; None when there is none."""
        if not self._matcher.stops:
            self._ready += self._decoder.feed(tokens)
            return None
        for n, token in enumerate(tokens, 1):
            text, stopped = self._matcher.feed(self._decoder.feed((token,)))
            self._ready += text
            if stopped:
                return n
        return None

    def take(self) -> str:
        """The text that became certain since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self, stopped: bool) -> str:
        """The rest, when the lane ends: nothing behind a stop string, else what was held back."""
        if not stopped:
            tail, hit = self._matcher.feed(self._decoder.flush())
            self._ready += tail if hit else tail + self._matcher.flush()
        return self.take()


def check_tokens(tokens: object, n_vocab: int, n_ctx: int) -> list[int]:
    """The prompt as a list of ids; RequestError when it is none, empty, too long or names no token."""
    if not is_sequence(tokens):
        raise RequestError("prompt", type(tokens).__name__, "text, or a sequence of token ids")
    try:
        n = len(tokens)
    except OverflowError:  # a range can be longer than any memory
        n = sys.maxsize
    if n == 0:
        raise RequestError("prompt", "no tokens", "at least one token")
    if n >= n_ctx:
        raise RequestError("prompt", f"{n} tokens", f"at most {n_ctx - 1}, one less than the context")
    for position, token in enumerate(tokens):
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or not 0 <= token < n_vocab:
            raise RequestError(f"prompt[{position}]", token, f"0..{n_vocab - 1}")
    return [int(token) for token in tokens]


def is_sequence(tokens: object) -> TypeGuard[Sequence[Any]]:
    """Whether it has items, which may be token ids; bytes are text that nobody has decoded."""
    if isinstance(tokens, np.ndarray):
        return tokens.ndim > 0
    return isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray, memoryview))
