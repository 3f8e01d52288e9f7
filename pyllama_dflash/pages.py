"""Pages of a paged cache, counted. Host only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .errors import RequestError
from .ggml.dflash_ops import PAGE


def pages_for(positions: int) -> int:
    """Pages that hold `positions` positions."""
    return -(-positions // PAGE)


def ring_pages(window: int, n_ctx: int, longest: int) -> int:
    """Pages of a slot's ring: what a draft's window (0: none) sees of `n_ctx` positions, and a run of `longest`."""
    kept = min(window, n_ctx) if window else n_ctx
    return min(pages_for(kept + longest) + 1, pages_for(n_ctx))


class PagePool:
    """Free pages of a paged cache, lowest first."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` pages, or RequestError with nothing taken."""
        if n > len(self._free):
            raise RequestError("cache pages", n, f"{len(self._free)} free of {self.pages}")
        return [heapq.heappop(self._free) for _ in range(n)]

    def give(self, pages: Sequence[int]) -> None:
        """Return pages."""
        for page in pages:
            heapq.heappush(self._free, page)


def finishes(free: int, lanes: Sequence[tuple[int, int]]) -> bool:
    """Whether lanes, each (pages held, pages needed in all), can all finish one after the other with `free` pages."""
    for held, need in sorted(lanes, key=lambda lane: lane[1] - lane[0]):
        if need - held > free:
            return False
        free += held
    return free >= 0
