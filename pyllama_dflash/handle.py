"""A submitted request as its caller sees it: iterate, await, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any

from .errors import RequestError
from .result import Chunk, Result

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Handle:
    """A request on its way. Iterating (`for`, `async for`) gives its chunks from the first on, as they come; `result()`
    or `await` the whole of it. A request that failed raises its error from each of them.

    Dropping a handle does not end its request: `cancel()` does.
    """

    def __init__(self, cancel: Callable[[Handle], None]) -> None:
        self._cancel = cancel
        self._changed = threading.Condition()
        self._chunks: list[Chunk] = []
        self._result: Result | None = None
        self._error: Exception | None = None
        self._trace: TracebackType | None = None
        self._waiters: list[_Waiter] = []
        self.engine: object = None
        """What must live as long as somebody holds the handle."""

    # -- for the caller ----------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self._result is not None or self._error is not None

    def cancel(self) -> None:
        """End the request within the round that runs: its result is what came so far. Nothing happens after its end."""
        if not self.done:
            self._cancel(self)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. TimeoutError after `timeout` seconds; the request goes on then. RequestError when that is
        no time to wait."""
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout <= threading.TIMEOUT_MAX):
            raise RequestError("timeout", timeout, f"None or seconds up to {threading.TIMEOUT_MAX:g}")
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended after {timeout} s")
        return self._ended()

    def __iter__(self) -> Iterator[Chunk]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self.done or len(self._chunks) > seen)  # type: ignore[misc]
            if len(self._chunks) == seen:
                self._ended()
                return
            yield self._chunks[seen]
            seen += 1

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        seen = 0
        while await self._more(seen):
            yield self._chunks[seen]
            seen += 1
        self._ended()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._finished().__await__()

    async def _finished(self) -> Result:
        seen = 0
        while await self._more(seen):
            seen = len(self._chunks)
        return self._ended()

    async def _more(self, seen: int) -> bool:
        """Wait until there are more than `seen` chunks; False when there will not be."""
        while True:
            with self._changed:
                if len(self._chunks) > seen or self.done:
                    return len(self._chunks) > seen
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future

    def _ended(self) -> Result:
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # or each raise would add the frames of its caller
        assert self._result is not None
        return self._result

    # -- for the worker ----------------------------------------------------------------------------------------

    def put(self, chunk: Chunk, result: Result | None = None) -> None:
        """Another chunk; with the last one comes the result."""
        with self._changed:
            self._chunks.append(chunk)
            self._result = result
            self._wake()

    def fail(self, error: Exception) -> None:
        """The request ends with this error. Nothing happens when it has ended."""
        with self._changed:
            if not self.done:
                self._error, self._trace = error, error.__traceback__
                self._wake()

    def orphan(self, error: Exception) -> None:
        """In a forked process: the worker stayed behind, and whoever held the lock is no more."""
        self._changed = threading.Condition()
        self.fail(error)

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
