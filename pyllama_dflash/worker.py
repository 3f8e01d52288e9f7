"""The thread that drives the device: it admits, computes one prefill piece and one round, and hands out the tokens."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .errors import DeviceError, DeviceLost, DflashError, EngineClosed, RequestError, no_memory
from .handle import Handle
from .lanes import Lane
from .result import Chunk
from .round import Round
from .scheduler import MAX_WAITING, Scheduler


@dataclass
class Work:
    """What the worker did so far: rounds and prefill pieces, the seconds its device calls took and all other ones."""

    rounds: int = 0
    pieces: int = 0
    device_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """A prefill piece or a round that has ended, at `ended` (time.perf_counter), and its tokens are with the lanes.

    `rows`: of the piece, or of the round's widest lane. Seconds of the device call, and of the host around it.
    """

    kind: Literal["piece", "round"]
    lanes: tuple[Lane, ...]
    rows: int
    device_s: float
    host_s: float
    ended: float


class Worker:
    """One thread, the only one that uses the device once it runs. It starts with the first request.

    `release` frees what the thread used; it is called once, when nothing runs any more.
    """

    def __init__(self, round_: Round, scheduler: Scheduler, release: Callable[[], None]) -> None:
        self.work = Work()
        self.observer: Callable[[Step], None] | None = None
        """Called in the worker's thread behind every piece and round, whose time is the host's."""
        self._round = round_
        self._scheduler = scheduler
        self._release = release
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Lane, Handle]] = deque()
        self._cancelled: deque[Handle] = deque()
        self._handles: dict[Lane, Handle] = {}
        self._handing_out = 0.0
        self._thread: threading.Thread | None = None
        self._reason: Exception | None = None  # why it is closed
        self._released = threading.Event()
        _WORKERS.add(self)

    # -- for callers -------------------------------------------------------------------------------------------

    def submit(self, lane: Lane) -> Handle:
        """Queue a checked lane. RequestError when too many wait, EngineClosed when the engine is closed."""
        handle = Handle(self._cancel)
        with self._changed:
            self.check_open()
            waiting = len(self._arrived) + len(self._scheduler.waiting)
            if waiting >= MAX_WAITING:
                raise RequestError("waiting requests", waiting + 1, f"at most {MAX_WAITING}")
            self._start()
            lane.clock.submitted()
            self._arrived.append((lane, handle))
            self._changed.notify_all()
        return handle

    def idle(self, call: Callable[[], None]) -> None:
        """Run `call`, which uses the device, here and now; only while no request was ever submitted."""
        with self._changed:
            self.check_open()
            if self._thread is not None:
                raise RequestError("prepare", "an engine that has had requests", "a new one")
            call()

    def close(self) -> None:
        """End the thread; live requests fail with EngineClosed. Idempotent; returns when everything is released."""
        with self._changed:
            first, self._reason = self._reason is None, self._reason or EngineClosed("the engine is closed")
            thread = self._thread
            self._changed.notify_all()
        if thread is None and first:
            self._end()
        elif thread is not threading.current_thread():
            self._released.wait()

    @property
    def closed(self) -> bool:
        """Whether no request can come any more."""
        return self._reason is not None

    def check_open(self) -> None:
        """EngineClosed when the engine is closed; says why if nobody asked for that."""
        reason = self._reason
        if reason is None:
            return
        if isinstance(reason, EngineClosed):
            raise EngineClosed(*reason.args)
        raise EngineClosed(f"the engine is closed: {reason}") from reason

    def _cancel(self, handle: Handle) -> None:
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._main, name="pyllama_dflash", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise DeviceError(f"the engine's thread cannot start: {error}") from error
            self._thread = thread

    def _main(self) -> None:
        try:
            while self._wait():
                self.step()
        except BaseException as error:  # whatever it is, somebody waits to hear of it
            with self._changed:
                self._reason = _stopped(error)
        self._end()

    def _wait(self) -> bool:
        """Wait for something to do. False: the engine closes."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._arrived or self._cancelled or self._handles)
            return not self.closed

    def _end(self) -> None:
        """Fail what is left with the reason, and release everything; not on a lost device, where ggml's answer to a
        call that fails is to end the process."""
        assert self._reason is not None
        for handle in self._left():
            handle.fail(self._reason)
        self._handles.clear()
        self._arrived.clear()
        try:
            if not isinstance(self._reason, DeviceLost):
                self._release()
        finally:
            self._released.set()

    def _left(self) -> list[Handle]:
        """Requests that have not ended."""
        return [*self._handles.values(), *(handle for _, handle in self._arrived)]

    def orphan(self) -> None:
        """In a forked process: the thread and the device stayed with the parent, and whoever held a lock is no more.
        What lives fails here; the memory is the parent's."""
        self._changed, self._released = threading.Condition(), threading.Event()
        self._released.set()
        self._reason = self._reason or EngineClosed("the engine stayed in the process that this one was forked from")
        for handle in self._left():
            handle.orphan(self._reason)

    # -- a step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """What callers want, admissions, one prefill piece, one round."""
        self._listen()
        self._admit()
        self._prefill()
        self._decode()

    def _listen(self) -> None:
        with self._changed:
            while self._arrived:
                lane, handle = self._arrived.popleft()
                self._handles[lane] = handle
                self._scheduler.submit(lane)
            cancelled = set(self._cancelled)
            self._cancelled.clear()
        if not cancelled:
            return
        for lane in [lane for lane, handle in self._handles.items() if handle in cancelled]:
            self._finish(lane, lane.cancel())

    def _admit(self) -> None:
        while True:
            try:
                lane = self._scheduler.next_admitted()
            except DflashError as error:
                self._fail([self._scheduler.running[-1]], error)
                continue
            if lane is None:
                return
            lane.clock.admitted()

    def _prefill(self) -> None:
        found = self._scheduler.next_piece()
        if found is None:
            return
        lane, item = found
        start = time.perf_counter()
        try:
            self._round.advance(item, bucket(item.rows), feeds=lane.params.width != 1)
        except (DflashError, MemoryError) as error:
            self._fail([lane], error)
            return
        ended = time.perf_counter()
        lane.base += item.rows
        lane.clock.prefilled()
        self.work.pieces += 1
        self.work.device_s += ended - start
        self._observe(Step("piece", (lane,), item.rows, ended - start, 0.0, ended))

    def _decode(self) -> None:
        start = time.perf_counter()
        chosen = self._scheduler.next_round()
        if not chosen:
            return
        work = [item for _, item in chosen]
        rows = max(item.rows for item in work)
        builds = self._round.shapes.counters.builds
        called = time.perf_counter()
        try:
            final = self._round.run(work)
        except (DflashError, MemoryError) as error:
            self._fail([lane for lane, _ in chosen], error)
            return
        device = time.perf_counter() - called
        if self._round.shapes.counters.builds == builds:
            self._scheduler.costs.note(len(work), rows, device)
        for lane, _ in chosen:
            lane.clock.round(called - start + self._handing_out)
        for (lane, item), tokens in zip(chosen, final, strict=True):
            self._hand_out(lane, item.rows, tokens)
        self._handing_out = time.perf_counter() - called - device
        host = called - start + self._handing_out
        self.work.rounds += 1
        self.work.device_s += device
        self.work.host_s += host
        self._observe(Step("round", tuple(lane for lane, _ in chosen), rows, device, host, time.perf_counter()))

    def _observe(self, step: Step) -> None:
        if self.observer is not None:
            self.observer(step)

    def _hand_out(self, lane: Lane, rows: int, tokens: list[int]) -> None:
        try:
            chunk = lane.take(tokens, rows)
        except (DflashError, MemoryError) as error:
            self._fail([lane], error)
            return
        if lane.finish is None:
            self._handles[lane].put(chunk)
        else:
            self._finish(lane, chunk)

    def _finish(self, lane: Lane, chunk: Chunk) -> None:
        """Hand out the last chunk and the result."""
        result = lane.result()  # should this fail, the handle is still among those that hear of it
        self._forget(lane).put(chunk, result)

    def _fail(self, lanes: list[Lane], error: DflashError | MemoryError) -> None:
        """End these with the error; all that is left, with the engine, when it says that the device is lost."""
        if isinstance(error, DeviceLost):
            raise error
        if isinstance(error, MemoryError):
            error = no_memory(error)
        for lane in lanes:
            self._forget(lane).fail(error)

    def _forget(self, lane: Lane) -> Handle:
        self._scheduler.retire(lane)
        return self._handles.pop(lane)


def _stopped(error: BaseException) -> Exception:
    """What requests are told when `error` has ended the thread."""
    if isinstance(error, DeviceLost):
        return error
    reason = DeviceError(f"the engine stopped: {type(error).__name__}: {error}")
    reason.__cause__ = error
    return reason


def _forked() -> None:
    for worker in list(_WORKERS):
        worker.orphan()


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forked)


def bucket(rows: int) -> int:
    """Rows of the prefill graph for a piece: the next power of two from 8 on, so that few shapes are built."""
    return max(8, 1 << (rows - 1).bit_length())
