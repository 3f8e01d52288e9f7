"""A wave: requests that start together, measured while all of them run; what comes behind is run but not counted.

N(t), the tokens that had come by t seconds after the start, is interpolated within each request's rounds, so that it
does not matter where in a round t lies.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Stream = list[tuple[float, int]]
"""Of a request the pairs (seconds since the start, tokens that came)."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Step:
    """A prefill piece or a round of ours. `wall_s`: since the round before ended, None where another thing lay between;
    `device_s`: of its device call. The difference is the host's."""

    kind: Literal["piece", "round"]
    lanes: int
    rows: int
    device_s: float
    wall_s: float | None


@dataclass(frozen=True)
class Wave:
    """What one wave gave; lists are by request, in the order of the prompts.

    `rounds`: target calls that decoded, `decoded`: tokens they gave (stock's first token comes with its prompt).
    `accepted`: how often a proposal was accepted, by its position in the block (ours only). `prefill_s`: of the prompt,
    `decode_s`: from there to the end. `steps`: ours only. `hits`, `builds`: retained graphs that were found or built.
    """

    streams: list[Stream]
    tokens: list[list[int]]
    prompt_tokens: list[int]
    rounds: list[int]
    decoded: list[int]
    prefill_s: list[float]
    decode_s: list[float]
    accepted: tuple[int, ...] = ()
    proposed: int = 0
    steps: tuple[Step, ...] = ()
    hits: int = 0
    builds: int = 0


Side = Callable[[Prompts, int], Wave]
"""Runs prompts at once, each by so many forced tokens, greedy."""


def rates(streams: Sequence[Stream]) -> dict[str, float | None]:
    """What a wave reached.

    goodput: N(end) / end, tokens a second with the prompts' time in it; `end` is when the first request ended.
    decode: (N(end) - N(begin)) / (end - begin); `begin` is when the last request had its first token. None when the
    first one had ended by then. `tail_s`: what came behind `end`, with fewer requests running; it counts in neither.
    """
    begin = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    return {
        "goodput": _came(streams, end) / end,
        "decode": (_came(streams, end) - _came(streams, begin)) / (end - begin) if begin < end else None,
        "first_ms": statistics.median(stream[0][0] for stream in streams) * 1e3,
        "window_s": end,
        "tail_s": max(stream[-1][0] for stream in streams) - end,
    }


def _came(streams: Sequence[Stream], at: float) -> float:
    total = 0.0
    for stream in streams:
        times, counts = zip((0.0, 0), *stream, strict=True)
        total += float(np.interp(at, times, np.cumsum(counts)))
    return total


def digest(tokens: Sequence[int]) -> str:
    """SHA-256 of the ids as little-endian I32."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def digest_of_all(digests: Sequence[str]) -> str:
    """SHA-256 of the texts of digests one behind the other."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()
