"""What a request gives back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a text ended: end token, stop string, max_tokens, no position left, or somebody cancelled the request."""


@dataclass(frozen=True)
class Chunk:
    """One step of a stream: the text that became certain and the tokens that came; they need not match each other.

    Text can lag behind tokens: a character that is not complete and a possible stop string are held back.
    `finish_reason` is set on the last chunk only.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds. `queued_s`: waiting for a lane; `prefill_s`: from there until the prompt is computed; `decode_s`:
    everything after that, of which `host_s` was not the device's. `first_token_s`: from the call to the first token."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """A finished text.

    `tokens` are the generated ones, without the end token.  `accepted_per_position[i]`: in how many rounds the block's
    proposal i was accepted; `proposed` counts all proposals.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    rounds: int
    proposed: int
    accepted_per_position: tuple[int, ...]
    timings: Timings

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding; 0 when nothing was decoded."""
        seconds = self.timings.decode_s
        return len(self.tokens) / seconds if seconds > 0 else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Generated tokens per round; 0 when there was no round."""
        return len(self.tokens) / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as types that JSON knows, the properties included."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "accepted_per_position": list(self.accepted_per_position),
            "mean_accepted_length": self.mean_accepted_length,
            "tokens_per_second": self.tokens_per_second,
            "timings": dataclasses.asdict(self.timings),
        }
