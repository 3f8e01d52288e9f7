"""Who runs next: admission, pages, prefill pieces and rounds. Host decisions only.

Requests wait in order. One is admitted when a slot and pages for its prompt and one block are free; pages for later
blocks are taken round by round. A lane is given pages only if, behind that, all admitted lanes can still finish one
after the other with what is free (the banker's rule), so lanes may wait for pages but never for each other, and none
is ever thrown out. Between two rounds of a decoding lane at most one prefill piece runs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from .cache import LaneCache
from .errors import RequestError
from .lane_rows import LaneRows
from .lanes import Lane
from .pages import finishes, pages_for
from .width import Costs, common_width, widths_of

PIECE = 256
"""Prompts are computed in pieces cut at multiples of this many positions."""

MAX_WAITING = 1 << 16
"""Requests that may wait for a lane."""


class Scheduler:
    """The lanes of one engine: `waiting` ones in order of arrival, `running` ones in order of admission."""

    def __init__(self, cache: LaneCache, block: int) -> None:
        self.waiting: OrderedDict[Lane, None] = OrderedDict()  # so that one of many can leave without a search
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
        self.waiting[lane] = None

    def next_admitted(self) -> Lane | None:
        """The next waiting lane, now with a slot and pages; None when nobody waits or there is no room."""
        if not self.waiting or not self._slots:
            return None
        lane = next(iter(self.waiting))
        lane.slot = self._slots[0]
        if not self._may_hold(lane, self._positions(lane, self._block)):
            return None
        del self.waiting[lane]
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
        else:
            self.waiting.pop(lane, None)

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
        work = []
        for lane, wish in zip(decoding, self._wishes(decoding), strict=True):
            for rows in (wish, 1):
                if self._may_hold(lane, lane.base + rows):
                    self._cache.grow(lane.slot, lane.base + rows)
                    work.append((lane, LaneRows(lane.slot, lane.base, rows, lane.params)))
                    break
        return work

    def _wishes(self, lanes: list[Lane]) -> list[int]:
        """Rows that each lane would have in a round of all of them. When one is due to try two rows again, all do."""
        costs = self.costs.of(len(lanes), self._widths)
        fixed = [self._fixed(lane) for lane in lanes]
        wishes = [rows or lane.acceptance.wish(costs) for lane, rows in zip(lanes, fixed, strict=True)]
        least = max((rows for rows in fixed if rows), default=1)
        if any(lane.acceptance.due and not rows for lane, rows in zip(lanes, fixed, strict=True)):
            least = max(least, self._widths[min(1, len(self._widths) - 1)])
            wishes = [max(wish, least) if not rows else wish for wish, rows in zip(wishes, fixed, strict=True)]
        most = common_width([(lane.acceptance, wish) for lane, wish in zip(lanes, wishes, strict=True)], least, costs)
        return [max(1, min(wish, most, lane.room)) for lane, wish in zip(lanes, wishes, strict=True)]

    def _fixed(self, lane: Lane) -> int:
        """The rows that a request asked for, 0 where the engine may choose."""
        return 0 if lane.params.width is None else min(lane.params.width, self._block)

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
