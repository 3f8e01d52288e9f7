"""Waves of our engine, in this process. What the bench sees of an engine's inside is here and in traffic.py."""

from __future__ import annotations

import threading
import time
from itertools import zip_longest

from ..engine import Engine
from ..lanes import Lane
from ..sampling import SamplingParams
from ..worker import Step as WorkerStep
from .waves import Prompts, Step, Stream, Wave

LAST_STEP_S = 60.0


class _Watch:
    """Hears of each step in the worker's thread: when which lane's tokens came."""

    def __init__(self, requests: int) -> None:
        self.streams: dict[Lane, Stream] = {}
        self.steps: list[Step] = []
        self.ended = threading.Event()
        self.start = time.perf_counter()
        self._missing = requests
        self._last_round: float | None = None

    def __call__(self, step: WorkerStep) -> None:
        before = self._last_round if step.kind == "round" else None
        wall = None if before is None else step.ended - before
        self.steps.append(Step(step.kind, len(step.lanes), step.rows, step.device_s, wall))
        self._last_round = step.ended if step.kind == "round" else None
        for lane in step.lanes:
            stream = self.streams.setdefault(lane, [])
            new = len(lane.tokens) - lane.prompt_tokens - sum(count for _, count in stream)
            if new:
                stream.append((step.ended - self.start, new))
            self._missing -= lane.finish is not None
        if self._missing == 0:
            self.ended.set()


def wave(engine: Engine, width: int | None, prompts: Prompts, n: int) -> Wave:
    """All prompts at once, with at most `width` rows a round (None: chosen by the engine)."""
    params = SamplingParams(max_tokens=n, ignore_eos=True, width=width)
    worker, counters = engine._worker, engine.counters
    hits, builds = counters.hits, counters.builds
    watch = _Watch(len(prompts))
    worker.observer = watch
    try:
        handles = [engine.submit(prompt, params) for prompt in prompts]
        results = [handle.result() for handle in handles]
        watch.ended.wait(LAST_STEP_S)  # the worker tells of the last round behind its result
    finally:
        worker.observer = None
    accepted = zip_longest(*(result.accepted_per_position for result in results), fillvalue=0)
    return Wave(
        streams=_by_prompt(watch.streams, prompts),
        tokens=[list(result.tokens) for result in results],
        prompt_tokens=[result.prompt_tokens for result in results],
        rounds=[result.rounds for result in results],
        decoded=[len(result.tokens) for result in results],
        prefill_s=[result.timings.prefill_s for result in results],
        decode_s=[result.timings.decode_s for result in results],
        accepted=tuple(map(sum, accepted)),
        proposed=sum(result.proposed for result in results),
        steps=tuple(watch.steps),
        hits=counters.hits - hits,
        builds=counters.builds - builds,
    )


def _by_prompt(streams: dict[Lane, Stream], prompts: Prompts) -> list[Stream]:
    """The streams in the order of the prompts; equal prompts have equal texts, so either stream may be either's."""
    left = dict(streams)
    found = []
    for prompt in prompts:
        lane = next(lane for lane in left if lane.tokens[: lane.prompt_tokens] == list(prompt))
        found.append(left.pop(lane))
    return found
