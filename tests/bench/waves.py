"""Rates of a wave: requests that start together, measured while all of them run.

N(t), the tokens that had come by t seconds after the start, is interpolated within each request's rounds, so that it
does not matter where in a round t lies.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

Streams = Sequence[Sequence[tuple[float, int]]]
"""Of each request the pairs (seconds since the start, tokens that came)."""


def rates(streams: Streams) -> dict[str, float | None]:
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


def _came(streams: Streams, at: float) -> float:
    total = 0.0
    for stream in streams:
        times, counts = zip((0.0, 0), *stream, strict=True)
        total += float(np.interp(at, times, np.cumsum(counts)))
    return total


def ours(answer: dict[str, Any]) -> dict[str, Any]:
    """A wave of our engine (worker.py) in numbers: its rates, and while all requests decoded the milliseconds of a
    round, those of them that were the host's, and the host's share."""
    decoded = sum(len(tokens) for tokens in answer["tokens"])
    out = rates(answer["streams"]) | {"tokens_a_round": decoded / sum(answer["rounds"]), "builds": answer["builds"]}
    if answer["work"]:
        rounds, host, device = (answer["work"][name] for name in ("rounds", "host_s", "device_s"))
        out |= {"round_ms": (host + device) / rounds * 1e3, "host_ms": host / rounds * 1e3}
        out |= {"host_share": host / (host + device)}
    return out


def stock(answer: dict[str, Any]) -> dict[str, Any]:
    """A wave of the stock server (stock_stream.py) in numbers."""
    return rates(answer["streams"]) | {"tokens_a_round": sum(answer["decoded"]) / max(1, sum(answer["rounds"]))}
