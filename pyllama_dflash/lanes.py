"""One request: what it has, what its next rows are, and what the target's answer to them means. Host decisions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .errors import RequestError
from .result import FinishReason
from .round import Floats, Lattice
from .sampling import SamplingParams, draft_scores, draw
from .stops import StopMatcher
from .tokenizer import StreamDecoder, Tokenizer


@dataclass
class Lane:
    """A request in a slot.

    `tokens` are the prompt and everything emitted; the first `base` of them are in the cache. While decoding,
    tokens[base] is the anchor: emitted (or the prompt's last) and not yet computed.
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    n_ctx: int
    text: LaneText
    base: int = 0
    prompt_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def anchor(self) -> int:
        """The token whose row comes next."""
        return self.tokens[self.base]

    @property
    def emitted(self) -> Sequence[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    def pieces(self, piece: int) -> list[Sequence[int]]:
        """The prompt but for its last token, cut at multiples of `piece`: cuts depend on the request alone."""
        last = self.prompt_tokens - 1
        return [self.tokens[start : min(start + piece, last)] for start in range(0, last, piece)]

    def rows(self, block: int) -> int:
        """Rows of the next round: a whole block where it fits and is wanted, else one."""
        return block if self.params.speculate and self.base + block <= self.n_ctx else 1

    def walk(self, lattice: Lattice) -> list[int]:
        """Proposals from the draft's lattice: left to right, each the best candidate behind the one before.

        With a temperature the scores carry the noise that the target's draw at that position will carry, so that both
        tend to the same token (design: noise keyed by seed, position and token).
        """
        proposals: list[int] = []
        scores, best = lattice.first, 0
        for t, ids in enumerate(lattice.ids):
            if t > 0:
                scores = lattice.edges[t - 1, best]
            best = int(np.argmax(draft_scores(scores, ids, self.params, self.base + t + 1)))
            proposals.append(int(ids[best]))
        return proposals

    def judge(self, logits: Floats, proposals: Sequence[int], tokenizer: Tokenizer) -> int:
        """Take the target's answer [T, V] to [anchor, *proposals]; emits 1..T tokens. Returns the rows that are final.

        Row t's draw is emitted; the walk goes on while it equals proposal t, whose row then is valid.
        """
        self.rounds += 1
        self.proposed += len(proposals)
        self.accepted.extend([0] * (len(proposals) - len(self.accepted)))
        for t, row in enumerate(logits):
            token = draw(row, self.params, self.base + t + 1)
            self._emit(token, tokenizer)
            matched = t < len(proposals) and proposals[t] == token
            if matched:
                self.accepted[t] += 1
            if self.finish is not None or not matched:
                break
        self.base += t + 1
        return t + 1

    def _emit(self, token: int, tokenizer: Tokenizer) -> None:
        if not self.params.ignore_eos and tokenizer.is_eog(token):
            self.finish = "eos"
            return
        self.tokens.append(token)
        if self.text.feed(token):
            self.finish = "stop"
        elif len(self.emitted) >= self.params.max_tokens:
            self.finish = "length"
        elif len(self.tokens) >= self.n_ctx:
            self.finish = "context"


class LaneText:
    """The text of a lane as it grows: whole characters only, and nothing behind a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._ready = ""

    def feed(self, token: int) -> bool:
        """Add a token. True when a stop string is complete."""
        text, stopped = self._matcher.feed(self._decoder.feed(token))
        self._ready += text
        return stopped

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


def check_tokens(tokens: Sequence[int], n_vocab: int, n_ctx: int) -> list[int]:
    """The prompt as a list of ids; RequestError when it is empty, too long or names no token."""
    ids = [int(t) for t in tokens]
    if not ids:
        raise RequestError("prompt", "no tokens", "at least one token")
    if len(ids) >= n_ctx:
        raise RequestError("prompt", f"{len(ids)} tokens", f"at most {n_ctx - 1}, one less than the context")
    for position, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            raise RequestError(f"prompt[{position}]", token, f"0..{n_vocab - 1}")
    return ids
