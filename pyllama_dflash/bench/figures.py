"""Numbers of many waves: medians, quantiles, and brackets whose gain counts only above twice their drift."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from .waves import Step, Wave, digest, rates

Halves = dict[str, list[Wave]]
"""Waves of a side by half: a1 and a2 of the side that brackets, b of one inside."""


def of_wave(wave: Wave) -> dict[str, Any]:
    """One wave as the record keeps it."""
    return {
        **rates(wave.streams),
        "tokens": sum(map(len, wave.tokens)),
        "tokens_a_round": _ratio(sum(wave.decoded), sum(wave.rounds)),
        "round_p50_ms": _p50_round(wave),
        "hits": wave.hits,
        "builds": wave.builds,
        "digests": [digest(tokens) for tokens in wave.tokens],
    }


def of_side(waves: Sequence[Wave]) -> dict[str, Any]:
    """All waves of a side together."""
    lanes = len(waves[0].streams)
    each = [rates(wave.streams) for wave in waves]
    accepted = zip_longest(*(wave.accepted for wave in waves), fillvalue=0)
    out: dict[str, Any] = {name: _median(found[name] for found in each) for name in each[0]}
    out |= {
        "tokens": sum(len(tokens) for wave in waves for tokens in wave.tokens),
        "rounds_of_requests": sum(sum(wave.rounds) for wave in waves),
        "tokens_a_round": _ratio(sum(sum(wave.decoded) for wave in waves), sum(sum(wave.rounds) for wave in waves)),
        "proposed": sum(wave.proposed for wave in waves),
        "accepted_per_position": [sum(position) for position in accepted],
        "prompt_tok_s": _median(
            _ratio(n, s) for wave in waves for n, s in zip(wave.prompt_tokens, wave.prefill_s, strict=True)
        ),
        "round_p50_ms": _median(_p50_round(wave) for wave in waves),
        "hits": sum(wave.hits for wave in waves),
        "builds": sum(wave.builds for wave in waves),
    }
    steps = [step for wave in waves for step in wave.steps]
    if steps:
        phases = _phases(steps, lanes)
        out |= {"phases": phases, "rows": _common_rows(steps, lanes), "round_p50_ms": phases["round"]["p50_ms"]}
    return out


def _phases(steps: Sequence[Step], lanes: int) -> dict[str, Any]:
    """Milliseconds: `round` of all lanes, end to end, where nothing lay between two of them; its `device` and `host`
    parts; `rounds_by_rows`; `piece` of prefill, with its rows a second."""
    rounds = _full(steps, lanes)
    pieces = [step for step in steps if step.kind == "piece"]
    out: dict[str, Any] = {
        "round": _quantiles(step.wall_s for step in rounds),
        "device": _quantiles(step.device_s for step in rounds),
        "host": _quantiles(step.wall_s - step.device_s for step in rounds if step.wall_s is not None),
        "piece": _quantiles(step.device_s for step in pieces),
        "piece_tok_s": _ratio(sum(step.rows for step in pieces), sum(step.device_s for step in pieces)),
    }
    by_rows = {rows: [step for step in rounds if step.rows == rows] for rows in sorted({step.rows for step in rounds})}
    out["rounds_by_rows"] = {str(rows): _quantiles(step.wall_s for step in found) for rows, found in by_rows.items()}
    return out


def _full(steps: Iterable[Step], lanes: int) -> list[Step]:
    """Rounds in which all lanes decoded, directly behind another round."""
    return [step for step in steps if step.kind == "round" and step.lanes == lanes and step.wall_s is not None]


def _common_rows(steps: Sequence[Step], lanes: int) -> int | None:
    """Rows that most of these rounds had."""
    counts = Counter(step.rows for step in _full(steps, lanes))
    return counts.most_common(1)[0][0] if counts else None


def _p50_round(wave: Wave) -> float | None:
    """Milliseconds: of ours the median round of all lanes; of a server, which tells sums only, the mean of the request
    that took longest a round."""
    if wave.steps:
        return _median(step.wall_s and step.wall_s * 1e3 for step in _full(wave.steps, len(wave.streams)))
    means = [s / rounds * 1e3 for s, rounds in zip(wave.decode_s, wave.rounds, strict=True) if rounds > 0]
    return max(means, default=None)


def _quantiles(seconds: Iterable[float | None]) -> dict[str, Any]:
    values = [s * 1e3 for s in seconds if s is not None]
    if not values:
        return {"count": 0, "p50_ms": None, "p95_ms": None}
    p50, p95 = np.percentile(values, [50, 95])
    return {"count": len(values), "p50_ms": float(p50), "p95_ms": float(p95)}


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


# -- brackets ----------------------------------------------------------------------------------------------------------


SAME_TOKENS = 0.1
"""Rounds are compared where they bring as many tokens, within this part of them."""


def bracket(a: Halves, b: Sequence[Wave]) -> dict[str, Any]:
    """Ours against what ran between its halves, by goodput and, where rounds bring as many tokens, by the round."""
    ours, other = (of_side(waves)["tokens_a_round"] for waves in (a["a1"] + a["a2"], b))
    alike = bool(ours and other) and abs(ours / other - 1) <= SAME_TOKENS
    return {
        "goodput": _compared(a, b, "goodput", larger=True),
        "round": _compared(a, b, "round_p50_ms", larger=False) if alike else None,
    }


def _compared(a: Halves, b: Sequence[Wave], name: str, *, larger: bool) -> dict[str, Any] | None:
    """`ratio`: how much better ours is (above 1), by medians over waves; `drift`: how far ours' halves are apart,
    relative to their mean; `verdict`: the gain or loss counts only above twice the drift."""
    first, second, other = ([of_wave(wave)[name] for wave in waves] for waves in (a["a1"], a["a2"], b))
    medians = [_median(values) for values in (first, second, other)]
    if any(not value for value in medians):
        return None
    one, two, theirs = (float(value) for value in medians if value)
    ours = (one + two) / 2
    ratio = ours / theirs if larger else theirs / ours
    drift = _apart(one, two)
    counts = abs(ratio - 1) > 2 * drift
    verdict = "within twice the drift" if not counts else "better" if ratio > 1 else "worse"
    return {"ours": ours, "other": theirs, "ratio": ratio, "drift": drift, "verdict": verdict}


def drift(a: Halves) -> dict[str, float | None]:
    """How far the halves' medians are apart, relative to their mean."""
    found = {}
    for what, name in (("goodput", "goodput"), ("round", "round_p50_ms")):
        one, two = (_median(of_wave(wave)[name] for wave in a[half]) for half in ("a1", "a2"))
        found[what] = _apart(one, two) if one and two else None
    return found


def _apart(one: float, two: float) -> float:
    return abs(one - two) / ((one + two) / 2)


# -- texts -------------------------------------------------------------------------------------------------------------


def equal_texts(a: Sequence[Wave], b: Sequence[Wave]) -> dict[str, Any]:
    """How many token lists are the same, of how many, and the earliest index at which one is not."""
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x.tokens, y.tokens, strict=True)]
    apart = [at for left, right in pairs if (at := _first_difference(left, right)) is not None]
    return {"equal": len(pairs) - len(apart), "of": len(pairs), "first_difference": min(apart, default=None)}


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
