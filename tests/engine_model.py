"""What an engine promises of each request, in plain Python, and the tiny pairs that the promise is tried on.

A request's tokens are those of the same request run alone in plain steps; where they end, and the text, follow from the
request alone. The oracle knows the tokens without any end; the ends are written down here once more.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_pair import TinyPair

from pyllama_dflash import Engine, SamplingParams
from pyllama_dflash.handle import Handle
from pyllama_dflash.result import Chunk
from pyllama_dflash.tokenizer import Tokenizer

PAGE = 16
BLOCK = 8
_SMALL: dict[str, Any] = {
    "n_vocab": 288, "n_embd": 64, "n_ff": 64, "n_layer": 2, "interval": 2, "n_head": 2, "n_head_kv": 1, "head_dim": 32,
    "rope_dims": 16, "n_k_heads": 1, "n_v_heads": 2, "state_size": 32, "draft_layers": 1, "draft_heads": 2,
    "draft_kv_heads": 1, "draft_head_dim": 32, "context": 2048, "window": 64, "top_k": 7, "rigged": True,
}  # fmt: skip
PAIRS = {
    "often": TinyPair(**_SMALL, rig_gain=0.7, eos=ord("c") - ord("!")),
    "rare": TinyPair(**_SMALL, rig_gain=0.05, eos=ord("q") - ord("!")),
}
"""Greedy rounds of a whole block give about 4 tokens, and 1.1, of a text that depends on all of its context. Both end
in a token that comes up."""


@dataclass(frozen=True)
class Request:
    """What is submitted."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Limits:
    """Lanes, positions of a lane and positions of all lanes (None: enough for all)."""

    lanes: int
    n_ctx: int
    pool: int | None = None

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return -(-self.n_ctx // PAGE) * self.lanes if self.pool is None else -(-self.pool // PAGE)

    def refusal(self, request: Request) -> str | None:
        """Why `submit` refuses a request, None if it does not."""
        n = len(request.prompt)
        if n >= self.n_ctx:
            return f"prompt: {n} tokens given; expected at most {self.n_ctx - 1}, one less than the context"
        need = -(-min(self.n_ctx, n + request.params.max_tokens + BLOCK) // PAGE)
        if need > self.pages:
            wanted = f"{need} pages of 16 for prompt, max_tokens and a block"
            return f"prompt and max_tokens: {wanted} given; expected at most {self.pages}, the whole pool"
        return None


@dataclass(frozen=True)
class Outcome:
    """A request's whole continuation."""

    tokens: tuple[int, ...]
    text: str
    finish: str


class Oracle:
    """The target alone, one request at a time, one row a step; asked once for each prompt and way to draw."""

    def __init__(self, target: Path, longest: int = 32) -> None:
        self._engine = Engine.load(target, device="cpu", threads=1, n_ctx=2048)
        self._longest = longest
        self._known: dict[Request, tuple[int, ...]] = {}

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()

    def tokens(self, request: Request) -> tuple[int, ...]:
        """The first tokens of a continuation that nothing ends."""
        free = request.params.replaced(max_tokens=self._longest, stop=(), ignore_eos=True, width=1)
        key = Request(request.prompt, free)
        if key not in self._known:
            self._known[key] = self._engine.generate(list(request.prompt), free).tokens
        return self._known[key]

    def outcome(self, request: Request, n_ctx: int) -> Outcome:
        """What the request must give in an engine of `n_ctx` positions."""
        return ended(request, self.tokens(request), n_ctx, self._engine.tokenizer)

    def text(self, tokens: tuple[int, ...]) -> str:
        """All text of `tokens`, an incomplete character at the end as U+FFFD."""
        return _decoded(self._engine.tokenizer, tokens, final=True)


def ended(request: Request, free: tuple[int, ...], n_ctx: int, tokenizer: Tokenizer) -> Outcome:
    """Cut a continuation where the request ends it."""
    params = request.params
    for n, token in enumerate(free):
        if not params.ignore_eos and tokenizer.is_eog(token):
            return _outcome(tokenizer, free[:n], "eos", params.stop)
        tokens = free[: n + 1]
        if _cut(_decoded(tokenizer, tokens, final=False), params.stop) is not None:
            return _outcome(tokenizer, tokens, "stop", params.stop)
        if len(tokens) == params.max_tokens:
            return _outcome(tokenizer, tokens, "length", params.stop)
        if len(request.prompt) + len(tokens) == n_ctx:
            return _outcome(tokenizer, tokens, "context", params.stop)
    raise AssertionError(f"the oracle's {len(free)} tokens do not reach the end of {request}")


def _outcome(tokenizer: Tokenizer, tokens: tuple[int, ...], finish: str, stop: tuple[str, ...]) -> Outcome:
    text = _decoded(tokenizer, tokens, final=finish != "stop")
    cut = _cut(text, stop)
    return Outcome(tokens, text if cut is None else text[:cut], finish)


def _decoded(tokenizer: Tokenizer, tokens: tuple[int, ...], *, final: bool) -> str:
    raw = b"".join(tokenizer.piece(token) for token in tokens)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final)


def _cut(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the text ends: before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [len(s) for s in stop if text[:end].endswith(s)]
        if complete:
            return end - max(complete)
    return None


# -- what came -----------------------------------------------------------------------------------------------------


def chunks_of(handle: Handle) -> tuple[list[Chunk], Exception | None]:
    """All chunks of a request, and what it raised."""
    chunks: list[Chunk] = []
    try:
        chunks.extend(handle)
    except Exception as error:
        return chunks, error
    return chunks, None


def check_bursts(chunks: list[Chunk], most: int) -> None:
    """Every chunk has 1..most tokens, only the last one none, if it is the end token or somebody cancelled."""
    for i, chunk in enumerate(chunks):
        last = i == len(chunks) - 1
        assert chunk.finish_reason is None or last, chunks
        assert len(chunk.tokens) <= most, chunks
        assert chunk.tokens or chunk.finish_reason in ("eos", "cancelled"), chunks


def check_request(handle: Handle, request: Request, n_ctx: int, oracle: Oracle, fate: str | Exception) -> None:
    """An ended request against the oracle. `fate`: 'ended', 'cancelled' or the very error that it must raise."""
    expected = oracle.outcome(request, n_ctx)
    chunks, error = chunks_of(handle)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    text = "".join(chunk.text for chunk in chunks)
    width = min(request.params.width or BLOCK, BLOCK)
    check_bursts(chunks, width)
    if isinstance(fate, Exception):
        assert error is fate, (error, fate)
        assert tokens == expected.tokens[: len(tokens)] and expected.text.startswith(text), request
        assert all(chunk.finish_reason is None for chunk in chunks)
        return
    assert error is None, error
    result = handle.result(0)
    assert (result.tokens, result.text, result.finish_reason) == (tokens, text, chunks[-1].finish_reason)
    if fate == "cancelled":
        assert result.finish_reason == "cancelled"
        assert tokens == expected.tokens[: len(tokens)] and text == oracle.text(tokens), request
    else:
        assert Outcome(tokens, text, result.finish_reason) == expected, request
        assert result.rounds == len(chunks)
    assert result.prompt_tokens == len(request.prompt)
    assert result.proposed <= result.rounds * (width - 1)
    assert list(result.accepted_per_position) == sorted(result.accepted_per_position, reverse=True)
