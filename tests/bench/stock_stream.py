"""Many requests at once to the stock server, and when their tokens came."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from stock_server import StockServer, greedy

ONE_ROUND_S = 0.0005  # the tokens of one round are sent as single events, one right behind the other


class Stream:
    """One streamed completion. Bytes are only stored as they come: reading them must not cost the server time."""

    def __init__(self, server: StockServer, prompt: Sequence[int], n: int, start: float) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)
        self._body = json.dumps(greedy(prompt, n) | {"stream": True})
        self._start = start
        self._received: list[tuple[float, bytes]] = []
        self._error = "no answer"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._connection.request("POST", "/completion", self._body, {"Content-Type": "application/json"})
            reply = self._connection.getresponse()
            while data := reply.read1(1 << 16):
                self._received.append((time.perf_counter() - self._start, data))
            self._error = "" if reply.status == 200 else f"status {reply.status}"
        except (OSError, http.client.HTTPException) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Wait for the end: (seconds since the start, event). RuntimeError when the server failed."""
        self._thread.join()
        events = list(_events(self._received))
        if self._error or not events or "timings" not in events[-1][1]:
            last = b"".join(data for _, data in self._received)[-300:].decode(errors="replace")
            said = " ".join(last.split())
            raise RuntimeError(f"the stock server's stream broke off ({self._error or 'no timings'}): {said}")
        return events


def _events(received: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    rest = b""
    for at, data in received:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at, json.loads(line.removeprefix(b"data: "))


def wave(server: StockServer, prompts: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """All prompts at once, each by `n` tokens, greedy.

    `streams`: of each request the pairs (seconds since the start, tokens that came); `rounds` and `decoded`: target
    calls behind the prompt, and the tokens they gave: all but the first, which comes with the prompt's last row.
    """
    start = time.perf_counter()
    running = [Stream(server, prompt, n, start) for prompt in prompts]
    out: dict[str, Any] = {"streams": [], "tokens": [], "rounds": [], "decoded": []}
    for stream in running:
        events = stream.events()
        timings = events[-1][1]["timings"]
        out["tokens"].append([token for _, event in events for token in event["tokens"]])
        out["streams"].append(_arrivals(events))
        out["decoded"].append(timings["predicted_n"] - 1)
        out["rounds"].append(timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0))
    return out


def _arrivals(events: list[tuple[float, dict[str, Any]]]) -> list[tuple[float, int]]:
    """(seconds, tokens) of each round. Tokens that end inside a character are not sent: they count at the end."""
    arrivals: list[tuple[float, int]] = []
    for at, event in events:
        count = len(event["tokens"])
        if count and arrivals and at - arrivals[-1][0] < ONE_ROUND_S:
            arrivals[-1] = (arrivals[-1][0], arrivals[-1][1] + count)
        elif count:
            arrivals.append((at, count))
    missing = events[-1][1]["timings"]["predicted_n"] - sum(count for _, count in arrivals)
    return [*arrivals, (events[-1][0], missing)] if missing else arrivals
