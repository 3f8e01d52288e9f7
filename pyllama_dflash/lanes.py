"""One request: what it has, what its next rows are, and when it ends. Host decisions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .batch import LaneRows
from .errors import DeviceError, RequestError
from .result import FinishReason
from .sampling import SamplingParams
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

    @property
    def anchored(self) -> LaneRows:
        """The anchor's row, behind which a draft proposes."""
        return LaneRows(self.slot, self.base, [self.anchor], self.params)

    def block(self, proposals: Sequence[int]) -> LaneRows:
        """The rows of a round: anchor and proposals."""
        return LaneRows(self.slot, self.base, [self.anchor, *proposals], self.params)

    def take(self, final: Sequence[int], proposals: Sequence[int], tokenizer: Tokenizer) -> None:
        """Emit a round's final tokens up to the request's end. DeviceError if there is none.

        final[t] is the target's token behind row t of [anchor, *proposals]. When the request ends inside the block the
        rows behind its end are final in the cache too, which nobody sees: the slot starts anew with its next request.
        """
        if not final:
            raise DeviceError(f"logits at position {self.base + 1} are not finite")
        self.rounds += 1
        self.proposed += len(proposals)
        self.accepted.extend([0] * (len(proposals) - len(self.accepted)))
        for t, token in enumerate(final):
            self._emit(token, tokenizer)
            if t < len(proposals) and proposals[t] == token:
                self.accepted[t] += 1
            if self.finish is not None:
                break
        self.base += len(final)

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
