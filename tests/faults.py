"""Errors injected around the real code of a run: where a device can fail, it fails on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pyllama_dflash import DeviceError
from pyllama_dflash.answers import Accepted, Logits, Sampled
from pyllama_dflash.ggml import Graph

PLACES: dict[str, list[tuple[type, str]]] = {
    "build": [(Graph, "build")],
    "compute": [(Graph, "run")],
    "read": [(Accepted, "read"), (Sampled, "read"), (Logits, "read")],
}
"""Where it can fail: a graph is built and allocated, computed, its answer read back."""


@dataclass(frozen=True)
class Fault:
    """`times` calls at `place` fail, after `passing` that do not. `late`: the real work is done before it is lost."""

    place: str
    passing: int = 0
    times: int = 1
    late: bool = False


class Faults:
    """Inside `with Faults() as faults:` every call at a place of PLACES fails as the last `arm` for it says.

    `raised` are the errors so far, each another object with another message.
    """

    def __init__(self) -> None:
        self.raised: list[DeviceError] = []
        self._armed: dict[str, Fault] = {}
        self._calls: dict[str, int] = {}
        self._patches: list[Any] = []

    def arm(self, fault: Fault) -> None:
        """Replaces what was armed at its place."""
        self._armed[fault.place], self._calls[fault.place] = fault, 0

    def disarm(self) -> None:
        """Nothing fails from here on."""
        self._armed.clear()

    def __enter__(self) -> Faults:
        for place, owner, name in ((place, *where) for place, wheres in PLACES.items() for where in wheres):
            patch = mock.patch.object(owner, name, self._around(place, getattr(owner, name)))
            patch.start()
            self._patches.append(patch)
        return self

    def __exit__(self, *_: object) -> None:
        while self._patches:
            self._patches.pop().stop()

    def _around(self, place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any) -> Any:
            error = self._due(place)
            if error is None:
                return real(*args)
            if self._armed[place].late:
                real(*args)
            self.raised.append(error)
            raise error

        return call

    def _due(self, place: str) -> DeviceError | None:
        fault = self._armed.get(place)
        if fault is None:
            return None
        n = self._calls[place]
        self._calls[place] += 1
        if fault.passing <= n < fault.passing + fault.times:
            return DeviceError(f"injected: {place} failed ({len(self.raised) + 1})")
        return None
