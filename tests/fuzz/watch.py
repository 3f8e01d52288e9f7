"""Watches a worker: ends it in time, and says what it died of, hung at or grew by, with what reproduces it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SILENCE = 60.0
"""Seconds without a new case that count as a hang; a case takes about a millisecond, one that generates a hundred."""
GROWTH = 64 << 20
"""Resident bytes that a worker may gain from its first report to its last."""


def watch(
    seed: int, first: int, count: int | None, seconds: float | None, *, silence: float = SILENCE, growth: int = GROWTH,
    command: Sequence[str] = (sys.executable, "-m", "fuzz"),
) -> str:  # fmt: skip
    """Run cases until `count` or `seconds` are over. What was found, or "". Reports go to stdout."""
    arguments = [*command, "--worker", "--seed", str(seed), "--first", str(first)]
    arguments += ["--cases", str(count)] if count is not None else ["--seconds", "0"]
    # One malloc arena, so that growth is growth and not another thread's pool.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "PYTHONFAULTHANDLER": "1"}
    tests = Path(__file__).resolve().parent.parent
    print(f"seed {seed} from case {first}", flush=True)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=tests, env=environment) as worker:
        try:
            return _Watch(worker, f"seed {seed} case", silence, growth).run(seconds)
        finally:
            worker.kill()


class _Watch:
    def __init__(self, worker: subprocess.Popen[bytes], what: str, silence: float, growth: int) -> None:
        assert worker.stdout is not None
        self._worker, self._pipe = worker, worker.stdout.fileno()
        self._what, self._silence, self._growth = what, silence, growth
        self._case = "none yet"
        self._first: dict[str, Any] = {}
        self._rest = b""

    def run(self, seconds: float | None) -> str:
        """Read what the worker says until it ends, falls silent or the time is over."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            if not select.select([self._pipe], [], [], self._silence)[0]:
                return f"hang: nothing for {self._silence:g} s in {self._what} {self._case}"
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                code = self._worker.wait()
                return f"crash: worker ended with {code} in {self._what} {self._case}" if code else ""
            if finding := self._take(chunk):
                return finding
            if end is not None and time.monotonic() > end and self._first:
                return ""

    def _take(self, chunk: bytes) -> str:
        """Whole lines of `chunk`: numbers of cases, and reports."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                report = json.loads(line)
                self._first = self._first or report
                print(line.decode(), flush=True)
                grown = report["bytes"] - self._first["bytes"]
                if grown > self._growth:
                    return f"growth: {grown} bytes in {report['done']} cases up to {self._what} {self._case}"
            else:
                self._case = line.decode()
        return ""
