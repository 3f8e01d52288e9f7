"""The rows that one lane has in one run."""

from __future__ import annotations

from dataclasses import dataclass

from .sampling import SamplingParams

GREEDY = SamplingParams()


@dataclass(frozen=True)
class LaneRows:
    """`rows` rows of `slot`, at positions base, base + 1, ...; `params` say how the lane draws what comes behind them.

    A padded lane has slot -1 and no rows.
    """

    slot: int
    base: int
    rows: int
    params: SamplingParams = GREEDY
