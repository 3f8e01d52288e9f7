"""A process with our engine, driven over its pipes (worker.py)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stock_server import peak_rss

WORKER = Path(__file__).with_name("worker.py")


class Ours:
    """An engine with `lanes` lanes; `with` ends it. RuntimeError when it fails."""

    def __init__(
        self, target: Path, draft: Path | None, *, threads: int, n_ctx: int, python: str, lanes: int = 1
    ) -> None:
        options: dict[str, Any] = {"target": str(target), "draft": str(draft) if draft else None}
        options |= {"threads": threads, "n_ctx": n_ctx, "lanes": lanes}
        self.process = subprocess.Popen(
            [python, str(WORKER), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._read()
        self.import_s, self.load_s = float(ready["import_s"]), float(ready["load_s"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"our worker ended with {self.process.wait()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def wave(self, prompts: Sequence[Sequence[int]], n: int, width: int | None) -> dict[str, Any]:
        """Greedy continuations of all prompts at once by `n` tokens each: what worker.py's `wave` returns."""
        assert self.process.stdin is not None
        request = {"prompts": [list(prompt) for prompt in prompts], "n": n, "width": width}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def peak_rss(self) -> int:
        """VmHWM of the worker in bytes."""
        return peak_rss(self.process.pid)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # its loop ends with its input
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
