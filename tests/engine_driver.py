"""Drives an engine through a schedule, step by step or with its thread, and keeps watch on what it does meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from engine_model import BLOCK, Limits, Oracle, Request, check_request

from pyllama_dflash import DflashError, Engine, EngineClosed, RequestError
from pyllama_dflash.handle import Handle
from pyllama_dflash.lane_rows import LaneRows
from pyllama_dflash.lanes import Lane
from pyllama_dflash.round import KEPT


@dataclass
class Entry:
    """A submitted request and what must become of it: 'ended', 'cancelled' or an error."""

    request: Request
    handle: Handle
    fate: str | Exception = "ended"


class Watch:
    """Stands around the calls that the worker makes: who runs, who fails, who is let in, who waits how long."""

    def __init__(self, engine: Engine, patient: bool) -> None:
        self.worker, self.scheduler, self.round = engine._worker, engine._scheduler, engine._round
        self.failed: dict[Handle, DflashError] = {}
        self.admitted: list[Handle] = []
        self.calls: Counter[str] = Counter()
        self.longest_wait = 0
        self.ran: set[Lane] = set()
        self._patient, self._in_piece = patient, False
        self._pieces_since: Counter[Lane] = Counter()
        self._advance, self._run, self._next = self.round.advance, self.round.run, self.scheduler.next_admitted
        replaced: Any = self.round
        replaced.advance, replaced.run = self.advance, self.run
        replaced = self.scheduler
        replaced.next_admitted = self.next_admitted

    def next_admitted(self) -> Lane | None:
        """See Scheduler."""
        lane = self._next()
        if lane is not None:
            self.admitted.append(self.worker._handles[lane])
        return lane

    def advance(self, item: LaneRows, rows: int, *, feeds: bool = True) -> None:
        """See Round. A piece that is computed in parts is one call of the worker's."""
        if self._in_piece:
            return self._advance(item, rows, feeds=feeds)
        lanes = self._lanes([item])
        for lane in self._decoding():
            self._pieces_since[lane] += 1
            self.longest_wait = max(self.longest_wait, self._pieces_since[lane])
        self._in_piece = True
        try:
            self._noting(lanes, lambda: self._advance(item, rows, feeds=feeds))
        finally:
            self._in_piece = False
        self.calls["advance"] += 1

    def run(self, work: Sequence[LaneRows]) -> list[list[int]]:
        """See Round."""
        lanes = self._lanes(work)
        if not self._patient:
            assert set(lanes) == set(self._decoding()), "there are pages for all, and somebody was left out"
        for lane in lanes:
            self._pieces_since[lane] = 0
        final: list[list[int]] = self._noting(lanes, lambda: self._run(work))
        self.calls["run"] += 1
        return final

    def _noting(self, lanes: list[Lane], call: Any) -> Any:
        handles = [self.worker._handles[lane] for lane in lanes]
        try:
            result = call()
        except DflashError as error:
            self.failed.update(dict.fromkeys(handles, error))
            raise
        self.ran.update(lanes)
        return result

    def _lanes(self, work: Sequence[LaneRows]) -> list[Lane]:
        by_slot = {lane.slot: lane for lane in self.scheduler.running}
        return [by_slot[item.slot] for item in work]

    def _decoding(self) -> list[Lane]:
        return [lane for lane in self.scheduler.running if lane.base >= lane.prompt_tokens - 1]


class Driver:
    """An engine and all requests made of it. Without `threaded`, nothing happens but in :meth:`step`."""

    def __init__(
        self, pair: tuple[Any, Any], limits: Limits, oracle: Oracle, *, threaded: bool = False, kv_type: str = "f16"
    ) -> None:
        self.pair, self.oracle, self.threaded, self.kv_type = pair, oracle, threaded, kv_type
        self.entries: list[Entry] = []
        self.longest_wait = 0
        self.steps = 0
        self.open(limits)

    def open(self, limits: Limits) -> None:
        """Another engine."""
        self.limits = limits
        self.first = len(self.entries)
        self.engine = Engine.load(
            *self.pair, device="cpu", threads=1, lanes=limits.lanes, n_ctx=limits.n_ctx, pool=limits.pool,
            kv_type=self.kv_type,
        )  # fmt: skip
        self.watch = Watch(self.engine, patient=limits.pool is not None)
        if not self.threaded:
            self.engine._worker._thread = threading.current_thread()

    def submit(self, request: Request) -> Entry | None:
        """Submit, or see it refused as it must be."""
        refusal = self.limits.refusal(request)
        if refusal is not None:
            with pytest.raises(RequestError) as caught:
                self.engine.submit(request.prompt, request.params)
            assert str(caught.value) == refusal
            return None
        entry = Entry(request, self.engine.submit(list(request.prompt), request.params))
        self.entries.append(entry)
        return entry

    def cancel(self, entry: Entry) -> None:
        """Cancel one that may have ended already, or be failing at this moment."""
        before = entry.handle.done
        entry.handle.cancel()
        if not before:
            entry.fate = "cancelled"

    def step(self, times: int = 1) -> None:
        """What the worker's thread would do next; with a thread, a while."""
        if self.threaded:
            time.sleep(0.001 * times)
            return
        worker = self.engine._worker
        for _ in range(times):
            if not (worker._arrived or worker._cancelled or worker._handles):
                return
            before = {lane: (lane.base, len(lane.tokens)) for lane in self.watch.scheduler.running}
            self.watch.ran.clear()
            worker.step()
            self.steps += 1
            for lane in self.watch.scheduler.running:
                assert lane in self.watch.ran or (lane.base, len(lane.tokens)) == before.get(
                    lane, (0, len(lane.tokens))
                )
            check_memory(self.engine)

    def drain(self, limit: int = 2000) -> None:
        """Until nothing is left to do."""
        if self.threaded:
            for entry in self.entries[self.first :]:
                _wait(entry.handle)
            return
        while self.engine._worker._handles or self.engine._worker._arrived:
            self.step()
            limit -= 1
            assert limit, "the engine does not come to an end"

    def close(self) -> None:
        """Close the engine; what lives fails."""
        live = [entry for entry in self.entries[self.first :] if not entry.handle.done]
        self.engine.close()
        if not self.threaded:
            self.engine._worker._main()
        self._settle()
        for entry in live:
            if isinstance(entry.fate, str):
                entry.fate = _closed(entry.handle) or entry.fate
        with pytest.raises(EngineClosed, match=r"^the engine is closed$"):
            self.engine.submit([1])

    def check(self) -> set[Exception]:
        """All ended requests against the oracle; slots and pages are back; bounds were kept. The errors they raise."""
        if not self.engine.closed:
            self._settle()
            check_memory(self.engine)
            assert not self.watch.scheduler.lanes
            assert self.engine._cache.pool.free == self.limits.pages
        for entry in self.entries:
            assert entry.handle.done
            check_request(entry.handle, entry.request, self.limits.n_ctx, self.oracle, entry.fate)
        raised = {entry.fate for entry in self.entries if isinstance(entry.fate, Exception)}
        self.entries.clear()
        self.first = 0
        return raised

    def _settle(self) -> None:
        """What the watch saw decides who failed, and the order of admission is that of arrival."""
        own = self.entries[self.first :]
        for entry in own:
            if entry.handle in self.watch.failed:
                entry.fate = self.watch.failed[entry.handle]
            elif self.threaded and entry.fate == "cancelled" and _finish(entry.handle) != "cancelled":
                entry.fate = "ended"  # it had ended when the worker heard of it
        order = {entry.handle: i for i, entry in enumerate(own)}
        admitted = [order[handle] for handle in self.watch.admitted if handle in order]
        assert admitted == sorted(set(admitted))
        self.watch.admitted.clear()
        if self.limits.pool is None:
            assert self.watch.longest_wait <= 1
        self.longest_wait = max(self.longest_wait, self.watch.longest_wait)


def _wait(handle: Handle) -> None:
    with contextlib.suppress(DflashError):  # which one is checked later
        handle.result(120)


def _finish(handle: Handle) -> str | None:
    try:
        return handle.result(0).finish_reason
    except DflashError:
        return None


def _closed(handle: Handle) -> EngineClosed | None:
    try:
        handle.result(0)
    except EngineClosed as error:
        assert str(error) == "the engine is closed"
        return error
    return None


def check_memory(engine: Engine) -> None:
    """Slots and pages belong to exactly one each, and the device knows of every lane what the host does."""
    cache, scheduler = engine._cache, engine._scheduler
    slots = [lane.slot for lane in scheduler.running]
    assert sorted([*slots, *scheduler._slots]) == list(range(cache.slots))
    assert sorted(cache._held) == sorted(slots)
    pages = [*cache.pool._free, *(page for held in cache._held.values() for page in held)]
    assert sorted(pages) == list(range(cache.pool.pages))
    assert len(engine._round.shapes.keys) <= KEPT
    if not slots:
        return
    table = cache.kv.table.get().reshape(cache.slots, -1)
    base, pending = cache.history.base.get().ravel(), cache.recurrent.pending.get().ravel()
    history = cache.history.history.get().reshape(cache.slots, -1)
    for lane in scheduler.running:
        slot, held = lane.slot, cache._held[lane.slot]
        assert cache.kv.pages[slot, : len(held)].tolist() == held
        computed = -(-lane.base // 16)  # pages of rows to come may not be sent yet
        assert table[slot, :computed].tolist() == held[:computed]
        assert lane.base == base[slot] == cache.history.bases[slot]
        assert pending[slot] == cache.recurrent.pending_rows[slot] <= BLOCK
        assert history[slot, : len(lane.tokens)].tolist() == lane.tokens
        assert np.array_equal(cache.history.tokens[slot, : len(lane.tokens)], lane.tokens)
        assert len(held) * 16 >= lane.base
        assert lane.finish is None and len(lane.tokens) == max(lane.prompt_tokens, lane.base + 1)


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.001)


def idle(engine: Engine) -> bool:
    """Whether all slots and pages are back."""
    pool = engine._cache.pool
    return not engine._scheduler.lanes and pool.free == pool.pages and len(engine._scheduler._slots) == engine.lanes
