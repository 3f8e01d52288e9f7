"""Who runs next: admission, pages, prefill pieces and rounds. Host decisions only.

Requests wait in order. One is admitted when a slot and pages for its prompt and one block are free; pages for later
blocks are taken round by round. A lane is given pages only if, behind that, all admitted lanes can still finish one
after the other with what is free (the banker's rule), so lanes may wait for pages but never for each other, and none
is ever thrown out. Between two rounds of a decoding lane at most one prefill piece runs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from .cache import LaneCache
from .errors import RequestError
from .lane_rows import LaneRows
from .lanes import Lane
from .pages import finishes, pages_for
from .width import Costs, widths_of

PIECE = 256
"""Prompts are computed in pieces cut at multiples of this many positions."""

MAX_WAITING = 1 << 16
"""Requests that may wait for a lane."""


class Scheduler:
    """The lanes of one engine: `waiting` ones in order of arrival, `running` ones in order of admission."""

    def __init__(self, cache: LaneCache, block: int) -> None:
        self.waiting: deque[Lane] = deque()
        self.running: list[Lane] = []
        self.costs = Costs()
        self._cache = cache
        self._block = block
        self._widths = widths_of(block)
        self._slots = list(range(cache.slots))

    # -- coming and going --------------------------------------------------------------------------------------

    def check(self, lane: Lane) -> None:
        """RequestError for a lane that could never finish."""
        pages, limit = self._need(lane), self._cache.pool.pages
        if pages > limit:
            wanted = f"{pages} pages of 16 for prompt, max_tokens and a block"
            raise RequestError("prompt and max_tokens", wanted, f"at most {limit}, the whole pool")

    def submit(self, lane: Lane) -> None:
        """Queue a checked lane."""
        self.waiting.append(lane)

    def next_admitted(self) -> Lane | None:
        """The next waiting lane, now with a slot and pages; None when nobody waits or there is no room."""
        if not self.waiting or not self._slots:
            return None
        lane = self.waiting[0]
        lane.slot = self._slots[0]
        if not self._may_hold(lane, self._positions(lane, self._block)):
            return None
        self.waiting.popleft()
        heapq.heappop(self._slots)
        self.running.append(lane)
        self._cache.open(lane.slot, lane.tokens, lane.params)
        self._cache.grow(lane.slot, self._positions(lane, self._block))
        return lane

    def retire(self, lane: Lane) -> None:
        """Forget a lane, wherever it is; its slot and pages are free."""
        if lane in self.running:
            self.running.remove(lane)
            self._cache.release(lane.slot)
            heapq.heappush(self._slots, lane.slot)
        elif lane in self.waiting:
            self.waiting.remove(lane)

    @property
    def lanes(self) -> list[Lane]:
        """All of them."""
        return [*self.running, *self.waiting]

    # -- what runs ---------------------------------------------------------------------------------------------

    def next_piece(self) -> tuple[Lane, LaneRows] | None:
        """The next prefill piece: of the lane admitted first that is not done."""
        for lane in self.running:
            rows = lane.piece(PIECE)
            if rows:
                return lane, LaneRows(lane.slot, lane.base, rows, lane.params)
        return None

    def next_round(self) -> list[tuple[Lane, LaneRows]]:
        """The rows of all decoding lanes that have pages for them."""
        decoding = [lane for lane in self.running if not lane.piece(PIECE)]
        costs = self.costs.of(len(decoding), self._widths)
        work = []
        for lane in decoding:
            for rows in (self._wish(lane, costs), 1):
                if self._may_hold(lane, lane.base + rows):
                    self._cache.grow(lane.slot, lane.base + rows)
                    work.append((lane, LaneRows(lane.slot, lane.base, rows, lane.params)))
                    break
        return work

    def _wish(self, lane: Lane, costs: Mapping[int, float]) -> int:
        """Rows that the lane would like to have in a round."""
        if lane.params.width is not None:
            return max(1, min(lane.params.width, self._block, lane.room))
        return lane.acceptance.choose({w: cost for w, cost in costs.items() if w <= lane.room or w == 1})

    # -- pages -------------------------------------------------------------------------------------------------

    def _positions(self, lane: Lane, more: int) -> int:
        return min(self._cache.n_ctx, lane.prompt_tokens + more)

    def _need(self, lane: Lane) -> int:
        """Pages the lane can come to hold."""
        return pages_for(self._positions(lane, lane.params.max_tokens + self._block))

    def _may_hold(self, lane: Lane, positions: int) -> bool:
        """Whether the lane can have pages for so many positions and everybody can still finish."""
        more = pages_for(positions) - self._cache.held(lane.slot)
        if more <= 0:
            return True
        others = [(self._cache.held(x.slot), self._need(x)) for x in self.running if x is not lane]
        grown = (self._cache.held(lane.slot) + more, self._need(lane))
        return finishes(self._cache.pool.free - more, [grown, *others])
