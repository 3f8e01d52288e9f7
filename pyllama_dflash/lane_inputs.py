"""Row numbers and masks that the composed ops need of a run, as inputs of their graph.

A lane is live in a memory of slots when its slot exists, no earlier lane has it and its pending count is within the
log; else it is padded. A padded lane is given a slot that no live lane has, and all it writes there is what it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, Make
from .cache import PagedKV, RecurrentState
from .errors import RequestError
from .ggml import Tensor, Type
from .ggml.composed import conv, gdn
from .ggml.composed.attention import Seen
from .ggml.composed.rows import Kept, Shown
from .ggml.dflash_ops import PAGE
from .lane_rows import LaneRows
from .sampling import SamplingParams, column

Ints = NDArray[np.int64]
Work = Sequence[LaneRows]


def sampling(b: Batch) -> Tensor:
    """I32 [8, L]: how each lane draws."""
    last: list[SamplingParams] = []
    columns = np.zeros((b.lanes, 8), np.int32)

    def make(work: Work) -> NDArray[np.int32]:
        nonlocal last, columns
        params = [item.params for item in work]
        if len(last) != len(params) or any(a is not b for a, b in zip(last, params, strict=True)):
            last, columns = params, np.stack([column(p) for p in params])
        return columns

    return b.asked.get("sampling", Type.I32, (8, b.lanes), make)


# -- slots -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owners:
    """Of each lane of a run: whether it is live, its slot (a free one if it is padded), its pending and live rows."""

    live: NDArray[np.bool_]
    slots: Ints
    pending: Ints
    rows: Ints


def owners(work: Work, memory: RecurrentState) -> Owners:
    """Which lanes are live in `memory`; RequestError when a padded lane finds no free slot."""
    pending, n_slots = memory.pending_rows, len(memory.pending_rows)
    named = [item.slot for item in work]
    live = [
        0 <= slot < n_slots and slot not in named[:lane] and 0 <= pending[slot] <= memory.block
        for lane, slot in enumerate(named)
    ]
    taken = {slot for slot, alive in zip(named, live, strict=True) if alive}
    free = [slot for slot in range(n_slots) if slot not in taken]
    if live.count(False) > len(free):
        raise RequestError("padded lanes", live.count(False), f"at most {len(free)}, the slots that no lane has")
    slots = [slot if alive else free.pop() for slot, alive in zip(named, live, strict=True)]
    alive = np.array(live)
    return Owners(
        alive,
        np.array(slots, np.int64),
        np.where(alive, pending[slots], 0).astype(np.int64),
        np.where(alive, [item.rows for item in work], 0).astype(np.int64),
    )


def replay(b: Batch, memory: RecurrentState, width: int, heads: int) -> gdn.Replay:
    """What is pending of states [S, S, Hv, N] with S = `width`, Hv = `heads`."""
    block = memory.block
    neutral = np.zeros((heads, 2 * width + 1), np.float32)
    neutral[:, 0] = 1
    neutral[:, 1 + width :] = -0.0

    def rows(work: Work) -> NDArray[np.int32]:
        t, number = np.arange(block), np.arange(len(work) * block).reshape(len(work), block)
        return np.where(t < owners(work, memory).pending[:, None], number, number.size).astype(np.int32)

    read, write = _row_numbers(b, "slot", (b.lanes,), lambda work: owners(work, memory).slots)
    return gdn.Replay(
        read,
        write,
        b.asked.get("pending_rows", Type.I32, (block * b.lanes,), rows),
        b.asked.get("neutral", Type.F32, (neutral.size,), lambda work: neutral),
    )


def taken(b: Batch, memory: RecurrentState) -> Tensor:
    """I32 [L, T]: l for a live row of lane l, else L."""

    def make(work: Work) -> NDArray[np.int32]:
        lane = np.arange(len(work))
        return np.where(np.arange(b.rows)[:, None] < owners(work, memory).rows, lane, len(work)).astype(np.int32)

    return b.asked.get("taken", Type.I32, (b.lanes, b.rows), make)


def logged(b: Batch, memory: RecurrentState) -> Kept:
    """Where the log rows of a block go."""
    return _kept(b, memory, "log", b.rows, memory.block)


# -- convolution -------------------------------------------------------------------------------------------------------


def window(b: Batch, memory: RecurrentState, taps: int) -> conv.Window:
    """The K - 1 rows in front of each lane's next row, and where they belong."""
    stride, first = taps - 1 + memory.block, np.arange(taps - 1)

    def before(work: Work) -> NDArray[np.int32]:
        own = owners(work, memory)
        return ((own.slots * stride + own.pending)[:, None] + first).astype(np.int32)

    def front(work: Work) -> Ints:
        return owners(work, memory).slots[:, None] * stride + first

    n = (taps - 1) * b.lanes
    return conv.Window(
        b.asked.get("window", Type.I32, (n,), before), b.asked.get("window_front", Type.I64, (n,), front)
    )


def windowed(b: Batch, memory: RecurrentState, taps: int) -> Kept:
    """Where window and rows of a block go."""
    return _kept(b, memory, "window", taps - 1 + b.rows, taps - 1 + memory.block)


def last_window(b: Batch, memory: RecurrentState, taps: int) -> Tensor:
    """I32 [(K-1) * L]: the last K - 1 live ones of each lane's K - 1 + T rows."""

    def make(work: Work) -> NDArray[np.int32]:
        start = np.arange(len(work)) * (taps - 1 + b.rows) + owners(work, memory).rows
        return (start[:, None] + np.arange(taps - 1)).astype(np.int32)

    return b.asked.get("last_window", Type.I32, ((taps - 1) * b.lanes,), make)


# -- attention ---------------------------------------------------------------------------------------------------------


def seen(b: Batch, kv: PagedKV, window: int, causal: bool, width: int) -> Seen:
    """What the rows see of `kv`: of each lane as many positions as a block can see, `width` numbers a result row."""
    most = PAGE * kv.pages.shape[1]
    n = min(most, window + b.rows - 1) if window else most
    name = f"{kv.name}.{window}.{causal}"

    def visible(item: LaneRows) -> tuple[Ints, NDArray[np.bool_]]:
        """Physical rows of n positions, and which of them each row sees, [T, n]: nothing if the row is dead or
        one of its pages is missing."""
        live, row = item.rows, item.base + np.arange(b.rows)[:, None]
        end = item.base + live
        position = max(0, min(end, most) - n) + np.arange(n)
        last = row if causal else np.full_like(row, end - 1)
        exists = 0 <= item.slot < len(kv.pages) and item.base >= 0
        sees = (position <= last) & (row < end) & (last < most) & exists
        if window:
            sees &= row - position < window
        page = kv.pages[item.slot if exists else 0, position // PAGE]
        missing = (page < 0) | (page >= kv.n_pages)
        sees &= ~(sees & missing).any(1, keepdims=True)
        return page.astype(np.int64) * PAGE + position % PAGE, sees

    def rows(work: Work) -> NDArray[np.int32]:
        out = np.zeros((len(work), n), np.int32)
        for lane, item in enumerate(work):
            physical, sees = visible(item)
            seen_by_some = sees.any(0)
            if seen_by_some.any():
                out[lane] = np.where(seen_by_some, physical, physical[np.argmax(seen_by_some)])
        return out

    def mask(work: Work) -> NDArray[np.float32]:
        sees = np.stack([visible(item)[1] for item in work])
        return np.where(sees | ~sees.any(-1, keepdims=True), 0, -np.inf).astype(np.float32)

    def shows(work: Work) -> NDArray[np.bool_]:
        return np.stack([visible(item)[1].any(-1) for item in work])

    return Seen(
        b.asked.get(f"{name}.rows", Type.I32, (n * b.lanes,), rows),
        b.asked.get(f"{name}.mask", Type.F32, (n, b.rows, 1, b.lanes), mask),
        _shown(b, name, width, shows),
    )


# -- rows --------------------------------------------------------------------------------------------------------------


def shown(b: Batch, memory: RecurrentState, width: int, *, only_live: bool) -> Shown:
    """The rows of live lanes, all of them or the live ones; `width` numbers a row."""

    def shows(work: Work) -> NDArray[np.bool_]:
        own = owners(work, memory)
        return np.arange(b.rows) < (own.rows if only_live else own.live * b.rows)[:, None]

    return _shown(b, f"live.{only_live}", width, shows)


def _shown(b: Batch, name: str, width: int, shows: Make) -> Shown:
    zeros = np.zeros(width, np.float32)

    def rows(work: Work) -> NDArray[np.int32]:
        number = np.arange(b.lanes * b.rows).reshape(b.lanes, b.rows)
        return np.where(shows(work), number, number.size).astype(np.int32)

    return Shown(
        b.asked.get(f"{name}.shown", Type.I32, (b.lanes * b.rows,), rows),
        b.asked.get(f"zeros.{width}", Type.F32, (width,), lambda work: zeros),
    )


def _kept(b: Batch, memory: RecurrentState, name: str, rows: int, stride: int) -> Kept:
    """The first `rows` of each lane's slot, in a memory of `stride` rows a slot."""

    def numbers(work: Work) -> Ints:
        return owners(work, memory).slots[:, None] * stride + np.arange(rows)

    def chosen(work: Work) -> NDArray[np.int32]:
        number = np.arange(b.lanes * rows).reshape(b.lanes, rows)
        return np.where(owners(work, memory).live[:, None], number, number.size + number).astype(np.int32)

    n = rows * b.lanes
    read, write = _row_numbers(b, name, (n,), numbers)
    return Kept(read, write, b.asked.get(f"{name}.chosen", Type.I32, (n,), chosen))


def _row_numbers(b: Batch, name: str, shape: tuple[int, ...], make: Make) -> tuple[Tensor, Tensor]:
    """The same numbers as ggml's get_rows (I32) and our set_rows (I64) take them."""
    read = b.asked.get(f"{name}.read", Type.I32, shape, lambda work: make(work).astype(np.int32))
    return read, b.asked.get(f"{name}.write", Type.I64, shape, make)
