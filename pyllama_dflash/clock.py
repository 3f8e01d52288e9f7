"""Seconds of one request by what it was waiting for."""

from __future__ import annotations

import time

from .result import Timings


class Clock:
    """Marks of a request's life; each phase is what lies between two of them."""

    def __init__(self) -> None:
        self.submitted()
        self.host_s = 0.0

    def submitted(self) -> None:
        """It is in the queue."""
        self._submitted = self._admitted = self._prefilled = self._first = self._last = time.perf_counter()

    def admitted(self) -> None:
        """It has a slot."""
        self._admitted = self._prefilled = self._first = self._last = time.perf_counter()

    def prefilled(self) -> None:
        """Its prompt is computed but for the last token."""
        self._prefilled = self._first = self._last = time.perf_counter()

    def round(self, host_s: float) -> None:
        """It had a round, of whose time `host_s` seconds were not the device's."""
        self._last = time.perf_counter()
        if self._first == self._prefilled:
            self._first = self._last
        self.host_s += host_s

    def timings(self) -> Timings:
        """As the result shows it."""
        return Timings(
            queued_s=self._admitted - self._submitted,
            prefill_s=self._prefilled - self._admitted,
            first_token_s=self._first - self._submitted,
            decode_s=self._last - self._prefilled,
            host_s=self.host_s,
        )
