"""Our engine in a process of its own: one JSON line on stdin per wave of requests, one on stdout per answer.

The first line out tells the times of import and load, so this file imports nothing heavy before it measures.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyllama_dflash import Engine
    from pyllama_dflash.handle import Handle


class Watch:
    """What the engine had done when all requests of a wave had begun to come, and when the first of them ended."""

    def __init__(self, engine: Engine, requests: int) -> None:
        self._engine = engine
        self._missing = requests
        self._lock = threading.Lock()
        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def begins(self) -> None:
        """A request has its first tokens."""
        with self._lock:
            self._missing -= 1
            if self._missing == 0:
                self.begun = self._engine.stats()["work"]

    def ends(self) -> None:
        """A request has ended."""
        with self._lock:
            self.ended = self.ended or self._engine.stats()["work"]

    def work(self) -> dict[str, float]:
        """What lies between the two; nothing when the first one ended before the last one began."""
        work = {name: self.ended[name] - self.begun[name] for name in self.ended}
        return work if work["rounds"] > 0 else {}


def wave(engine: Engine, prompts: list[list[int]], n: int, width: int | None) -> dict[str, Any]:
    """All prompts at once, each by `n` tokens, greedy. `streams`: of each request the pairs (seconds since the start,
    tokens that came)."""
    from pyllama_dflash import SamplingParams

    params = SamplingParams(max_tokens=n, ignore_eos=True, width=width)
    streams: list[list[tuple[float, int]]] = [[] for _ in prompts]
    watch = Watch(engine, len(prompts))
    builds = engine.counters.builds
    start = time.perf_counter()

    def follow(handle: Handle, stream: list[tuple[float, int]]) -> None:
        for chunk in handle:
            stream.append((time.perf_counter() - start, len(chunk.tokens)))
            if len(stream) == 1:
                watch.begins()
        watch.ends()

    handles = [engine.submit(prompt, params) for prompt in prompts]
    threads = [threading.Thread(target=follow, args=pair, daemon=True) for pair in zip(handles, streams, strict=True)]
    for thread in threads:
        thread.start()
    results = [handle.result() for handle in handles]
    wall_s = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return {
        "streams": streams,
        "tokens": [list(r.tokens) for r in results],
        "texts": [r.text for r in results],
        "rounds": [r.rounds for r in results],
        "timings": [dataclasses.asdict(r.timings) for r in results],
        "wall_s": wall_s,
        "builds": engine.counters.builds - builds,
        "work": watch.work(),
    }


def main() -> None:
    """`argv[1]` is a JSON object with target, draft (or null), threads, n_ctx, lanes."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever is printed by accident cannot break the protocol
    begin = time.perf_counter()
    from pyllama_dflash import DflashError, Engine

    imported = time.perf_counter()
    try:
        with Engine.load(options.pop("target"), options.pop("draft"), device="cpu", **options) as engine:
            loaded = time.perf_counter()
            _say(out, {"import_s": imported - begin, "load_s": loaded - imported})
            for line in sys.stdin:
                _say(out, wave(engine, **json.loads(line)))
    except DflashError as error:
        _say(out, {"error": str(error)})


def _say(out: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
