"""Random schedules: requests come, are cancelled and fail side by side, and each gives what it gives alone.

`python tests/test_schedules.py --schedules 10000` runs as many; pytest runs some 1200, always the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver
from engine_model import PAIRS, Limits, Oracle, Request
from faults import PLACES, Fault, Faults
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from refusing import refused

from pyllama_dflash import Engine, SamplingParams

SCHEDULES = 1000
N_CTX = 300
LIMITS = (Limits(4, N_CTX), Limits(8, N_CTX), Limits(3, N_CTX, 420), Limits(8, N_CTX, 80))
LENGTHS = (1, 1, 2, 3, 5, 6, 8, 8, 9, 15, 16, 17, 24, 31, 33, 60, 100, 256, 257, 258, 270, 290, 298, 299, 300)
WAYS = (
    SamplingParams(),
    SamplingParams(),
    SamplingParams(),
    SamplingParams(temperature=0.4, seed=11),
    SamplingParams(temperature=0.9, top_k=6, top_p=0.95, seed=5),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.3, seed=3, logit_bias={83: 2.5, 71: -1e4, 68: 0.5}),
)
STOPS = ((), (), (), ("ict",), ("quic", "he"), ("tt", "ee", "hh"))


def prompt(length: int, variant: int) -> tuple[int, ...]:
    """A prompt of any tokens of the vocabulary."""
    return tuple(np.random.default_rng([length, variant]).integers(0, 285, length).tolist())


def _request(length: int, variant: int, way: SamplingParams, tokens: int, **fields: Any) -> Request:
    if N_CTX - 32 <= length < N_CTX:
        tokens *= 100  # the context ends first
    return Request(prompt(length, variant), way.replaced(max_tokens=tokens, **fields))


requests = st.builds(
    _request,
    st.sampled_from(LENGTHS),
    st.integers(0, 1),
    st.sampled_from(WAYS),
    st.sampled_from((1, 2, 8, 9, 16, 24, 32)),
    width=st.sampled_from((None, 1, 2, 3, 4, 8, 8, 16)),
    stop=st.sampled_from(STOPS),
    ignore_eos=st.sampled_from((True, True, False)),
)
faults = st.builds(Fault, st.sampled_from(sorted(PLACES)), st.integers(0, 6), st.integers(1, 3), st.booleans())
actions = {
    "submit": (30, requests),
    "step": (24, st.integers(1, 6)),
    "cancel": (8, st.integers(0, 30)),
    "fault": (8, faults),
    "reopen": (1, st.none()),
}
"""Of each action how often it comes, and its argument."""


@st.composite
def _action(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from([name for name, (often, _) in actions.items() for _ in range(often)]))
    return name, draw(actions[name][1])


schedules = st.lists(_action(), min_size=8, max_size=32)


class Bench:
    """The pairs, their oracles and the engines that schedules run on; what ran is counted."""

    def __init__(self, folder: Path) -> None:
        self.files = {name: pair.write(folder, name) for name, pair in PAIRS.items()}
        self.oracles = {name: Oracle(files[0]) for name, files in self.files.items()}
        self.drivers: dict[tuple[str, Limits, bool], Driver] = {}
        self.counted: Counter[str] = Counter()

    def run(self, name: str, limits: Limits, schedule: list[tuple[str, Any]], threaded: bool) -> None:
        """A schedule on an engine that others used before; on one of its own when the one before failed."""
        key = name, limits, threaded
        driver = self.drivers.pop(key, None)
        if driver is None:
            driver = Driver(self.files[name], limits, self.oracles[name], threaded=threaded)
        before = driver.steps
        try:
            with Faults() as injected:
                for action, value in schedule:
                    self.counted[action] += 1
                    _act(driver, injected, action, value)
                injected.disarm()
                driver.drain()
            assert driver.check() >= set(injected.raised), "an error that nobody heard of"
            self.counted["errors"] += len(injected.raised)
        except BaseException:
            with contextlib.suppress(BaseException):
                driver.close()
            raise
        self.drivers[key] = driver
        self.counted["steps taken"] += driver.steps - before
        self.counted["schedules"] += 1

    @property
    def engines(self) -> list[Engine]:
        """Those in use."""
        return [driver.engine for driver in self.drivers.values()]

    def forget(self) -> None:
        """Close the engines that schedules ran on."""
        while self.drivers:
            self.drivers.popitem()[1].close()

    def close(self) -> None:
        """Close all engines."""
        self.forget()
        for oracle in self.oracles.values():
            oracle.close()


def _act(driver: Driver, injected: Faults, action: str, value: Any) -> None:
    if action == "submit":
        driver.submit(value)
    elif action == "step":
        driver.step(value)
    elif action == "cancel" and driver.entries:
        driver.cancel(driver.entries[value % len(driver.entries)])
    elif action == "fault":
        injected.arm(value)
    elif action == "reopen":
        driver.close()
        driver.open(driver.limits)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("schedules"))
    yield made
    made.close()
    print(dict(made.counted))


def _settings(examples: int, **more: Any) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=checks, **more)


@_settings(SCHEDULES, derandomize=True, phases=(Phase.generate,))
@given(st.sampled_from(sorted(PAIRS)), st.sampled_from(LIMITS), schedules)
def test_every_request_gives_what_it_gives_alone(bench, name, limits, schedule):
    bench.run(name, limits, schedule, threaded=False)


@_settings(SCHEDULES // 8, derandomize=True, phases=(Phase.generate,))
@given(st.sampled_from(sorted(PAIRS)), st.sampled_from(LIMITS), schedules)
def test_the_thread_changes_nothing(bench, name, limits, schedule):
    bench.run(name, limits, schedule, threaded=True)


@pytest.mark.parametrize("names", [("place",), ("select", "sample"), ("accept",)], ids="+".join)
def test_the_host_does_what_the_device_does_not(bench, names):
    @_settings(SCHEDULES // 24, derandomize=True, phases=(Phase.generate,))
    @given(st.sampled_from(sorted(PAIRS)), st.sampled_from(LIMITS), schedules)
    def run(name, limits, schedule):
        bench.run(name, limits, schedule, threaded=False)

    bench.forget()
    with refused(*names):
        run()
        paths = {(op, path) for engine in bench.engines for op in names for path in engine.paths.get(op, ())}
        assert {op for op, _ in paths} == set(names) and not any(path == "kernel" for _, path in paths)
    bench.forget()


def main() -> None:
    """Run as many schedules as asked for, one in eight with the thread, and say how many ran."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, start, numbers = Bench(Path(folder)), time.perf_counter(), itertools.count(1)

        @seed(options.seed)
        @_settings(options.schedules)
        @given(st.sampled_from(sorted(PAIRS)), st.sampled_from(LIMITS), schedules, st.integers(0, 7))
        def run(name: str, limits: Limits, schedule: list[tuple[str, Any]], eighth: int) -> None:
            made.run(name, limits, schedule, threaded=eighth == 0)
            if next(numbers) % 500 == 0:
                print(f"{time.perf_counter() - start:.0f} s: {dict(made.counted)}", flush=True)

        run()
        print(f"{time.perf_counter() - start:.0f} s: {dict(made.counted)}")
        made.close()


if __name__ == "__main__":
    main()
