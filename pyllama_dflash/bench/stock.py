"""Stock llama.cpp's server over HTTP: waves of streamed completions, greedy, without its prompt cache."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import DeviceError, RequestError
from .extras import package
from .waves import Prompts, Stream, Wave

ONE_ROUND_S = 0.0005  # the tokens of one round are sent as single events, one right behind the other
CONNECT_S, READ_S = 10.0, 3600.0

Event = tuple[float, dict[str, Any]]
"""Seconds since the start, and what the server sent."""


class Client:
    """A server that answers at `url`. DeviceError, one line, when it does not or breaks off."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._requests = package("requests", "a stock server")
        self._props = self._get("/props")

    def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = self._requests.get(self.url + path, timeout=CONNECT_S)
            found = reply.json()
        except (self._requests.RequestException, ValueError) as error:
            raise DeviceError(f"no llama-server answers at {self.url}{path}: {error}") from None
        if reply.status_code != 200 or not isinstance(found, dict):
            raise DeviceError(f"no llama-server answers at {self.url}{path}: status {reply.status_code}")
        return found

    @property
    def model(self) -> str:
        """Name of its model file."""
        return str(self._props.get("model_path", "")).rpartition("/")[2]

    def check(self, lanes: int) -> None:
        """RequestError when it has fewer slots than `lanes`."""
        slots = int(self._props.get("total_slots", 1))
        if slots < lanes:
            raise RequestError("--lanes", lanes, f"at most {slots}, the slots of {self.url}")

    def wave(self, prompts: Prompts, n: int) -> Wave:
        """All prompts at once, each by `n` forced tokens."""
        start = time.perf_counter()
        running = [_Completion(self._requests, self.url, prompt, n, start) for prompt in prompts]
        ended = [completion.events() for completion in running]
        timings = [events[-1][1]["timings"] for events in ended]
        return Wave(
            streams=[_arrivals(events) for events in ended],
            tokens=[[int(token) for _, event in events for token in event.get("tokens", ())] for events in ended],
            prompt_tokens=[int(t["prompt_n"]) for t in timings],
            rounds=[int(t["predicted_n"]) - 1 - int(t.get("draft_n_accepted", 0)) for t in timings],
            decoded=[int(t["predicted_n"]) - 1 for t in timings],
            prefill_s=[float(t["prompt_ms"]) / 1e3 for t in timings],
            decode_s=[float(t["predicted_ms"]) / 1e3 for t in timings],
            proposed=sum(int(t.get("draft_n", 0)) for t in timings),
        )


class _Completion:
    """One streamed completion. Bytes are only stored as they come: reading them must not cost the server time."""

    def __init__(self, requests: Any, url: str, prompt: Sequence[int], n: int, start: float) -> None:
        self._requests, self._url, self._start = requests, url, start
        self._body = greedy(prompt, n)
        self._received: list[tuple[float, bytes]] = []
        self._error = "no answer"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._requests.post(
                f"{self._url}/completion", json=self._body, stream=True, timeout=(CONNECT_S, READ_S)
            ) as reply:
                for data in reply.iter_content(chunk_size=None):
                    self._received.append((time.perf_counter() - self._start, data))
                self._error = "" if reply.status_code == 200 else f"status {reply.status_code}"
        except (self._requests.RequestException, OSError) as error:
            self._error = f"{type(error).__name__}: {error}"

    def events(self) -> list[Event]:
        """Wait for the end."""
        self._thread.join()
        try:
            events = list(_events(self._received))
        except ValueError as error:
            events, self._error = [], f"not JSON: {error}"
        if self._error or not events or "timings" not in events[-1][1]:
            last = b"".join(data for _, data in self._received)[-300:].decode(errors="replace")
            raise DeviceError(f"the stock server's stream broke off ({self._error or 'no timings'}): {last}")
        return events


def greedy(prompt: Sequence[int], n: int) -> dict[str, Any]:
    """The body of a request for `n` tokens of the likeliest continuation, end tokens ignored."""
    return {
        "prompt": list(prompt),
        "n_predict": n,
        "temperature": 0,
        "samplers": ["temperature"],  # temperature 0 is argmax: the others would only cost time
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }


def _events(received: list[tuple[float, bytes]]) -> Iterator[Event]:
    rest = b""
    for at, data in received:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at, json.loads(line.removeprefix(b"data: "))


def _arrivals(events: list[Event]) -> Stream:
    """(seconds, tokens) of each round. Tokens that end inside a character are not sent: they count at the end."""
    arrivals: Stream = []
    for at, event in events:
        count = len(event.get("tokens", ()))
        if count and arrivals and at - arrivals[-1][0] < ONE_ROUND_S:
            arrivals[-1] = (arrivals[-1][0], arrivals[-1][1] + count)
        elif count:
            arrivals.append((at, count))
    missing = int(events[-1][1]["timings"]["predicted_n"]) - sum(count for _, count in arrivals)
    return [*arrivals, (events[-1][0], missing)] if missing > 0 else arrivals
