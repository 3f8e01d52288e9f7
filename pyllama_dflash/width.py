"""How many rows a round has: chosen from what was accepted lately and from what rounds of each width cost.

A round of w rows emits E(w) = 1 + a + ... + a^(w-1) tokens of a lane whose proposals are accepted with probability a
each, and takes cost(w) times as long as a plain step of all its lanes. A lane wishes for the w with the largest
E(w) / cost(w); w = 1, a plain step, has 1 / 1. A round has one number of rows for all, so it takes the w with the
largest sum of E(min(w, wish)) over its lanes, divided by cost(w): in sum it is never expected to be slower than plain
steps. The choice changes the time, never the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_MEMORY = 0.9
_PRIOR_ACCEPTED, _PRIOR_TRIED = 3.0, 4.0
_FIRST_PATIENCE, _LAST_PATIENCE = 4, 128
_WARM_UP = 2
_KEPT_TIMES = 9


def widths_of(block: int) -> tuple[int, ...]:
    """The widths to choose from: 1, 2, 4, ... below the draft's block, and the block."""
    return (*(w for w in (1, 2, 4, 8) if w < block), block)


class Costs:
    """Seconds of rounds by (lanes, rows): the median of the last few, without a shape's first runs."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._runs: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], float] = {}

    def note(self, lanes: int, rows: int, seconds: float) -> None:
        """A round took so long."""
        key = lanes, rows
        self._runs[key] = self._runs.get(key, 0) + 1
        if self._runs[key] > _WARM_UP:
            times = self._times.setdefault(key, deque(maxlen=_KEPT_TIMES))
            times.append(seconds)
            self._known[key] = median(times)

    def of(self, lanes: int, widths: Sequence[int]) -> dict[int, float]:
        """Cost of a round of each width (rising, from 1) relative to a plain step of as many lanes.

        Of lanes of which a width was never measured, what the nearest number of them says that both were measured of;
        where there is none, what the next narrower width costs, so that it is tried.
        """
        costs, cost = {}, 1.0
        for width in widths:
            both = [n for n, rows in self._known if rows == width and (n, 1) in self._known]
            if both:
                near = min(both, key=lambda n: (abs(n - lanes), n))
                cost = max(1.0, self._known[near, width] / self._known[near, 1])
            costs[width] = cost
        return costs


class Acceptance:
    """How one lane's proposals fare: the share of those tried that were accepted, older rounds counting less."""

    def __init__(self) -> None:
        self._accepted, self._tried = _PRIOR_ACCEPTED, _PRIOR_TRIED
        self._plain = 0
        self._patience = _FIRST_PATIENCE

    @property
    def rate(self) -> float:
        """The probability that a proposal is accepted when those before it were."""
        return self._accepted / self._tried

    def note(self, rows: int, final: int) -> None:
        """A round of `rows` rows gave `final` tokens."""
        if rows == 1:
            self._plain += 1
            return
        accepted, tried = final - 1, min(final, rows - 1)
        self._accepted = _MEMORY * self._accepted + accepted
        self._tried = _MEMORY * self._tried + tried
        patience = self._patience // 2 if accepted else 2 * self._patience
        self._patience = min(max(patience, _FIRST_PATIENCE), _LAST_PATIENCE)
        self._plain = 0

    @property
    def due(self) -> bool:
        """Whether after so many plain steps it is time to see if acceptance has recovered."""
        return self._plain >= self._patience

    def expected(self, width: int) -> float:
        """E(w), the tokens of a round of `width` rows."""
        rate = self.rate
        return float(width) if rate == 1.0 else (1 - rate**width) / (1 - rate)

    def wish(self, costs: Mapping[int, float]) -> int:
        """The best of the widths that `costs` has."""
        return max(costs, key=lambda width: self.expected(width) / costs[width])


def common_width(wishes: Sequence[tuple[Acceptance, int]], least: int, costs: Mapping[int, float]) -> int:
    """The rows of a round whose lanes wish for so many each, `least` or more: a width of `costs` (rising)."""
    widths = [width for width in costs if width >= least] or [max(costs)]
    return max(widths, key=lambda w: sum(lane.expected(min(w, wish)) for lane, wish in wishes) / costs[w])
