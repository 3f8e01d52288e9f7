"""What requests leave behind: nothing. Memory over many of them, over failures, and over the rounds of one."""

from __future__ import annotations

import gc
import time
import tracemalloc

import pytest
from engine_driver import Driver
from engine_model import BLOCK, PAIRS, Limits, Oracle, Request
from faults import Fault, Faults
from resident import resident

from pyllama_dflash import DeviceError, Engine, SamplingParams
from pyllama_dflash.lane_rows import LaneRows
from pyllama_dflash.round import KEPT

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return PAIRS["often"].write(tmp_path_factory.mktemp("memory"))


def traced() -> int:
    """Bytes that Python objects hold."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def requests(first: int, n: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of many shapes."""
    widths = (None, 1, 2, 3, 5, 8)
    return [
        ([1 + i % 200] * (1 + i % 70), PARAMS.replaced(width=widths[i % 6], seed=i, temperature=0.5 * (i % 2)))
        for i in range(first, first + n)
    ]


def test_memory_is_flat_over_500_requests(files):
    with Engine.load(*files, device="cpu", threads=1, n_ctx=256, lanes=4) as engine:

        def serve(first: int, n: int) -> None:
            prompts, params = zip(*requests(first, n), strict=True)
            assert {result.finish_reason for result in engine.generate(prompts, params)} == {"length"}

        tracemalloc.start()
        try:
            for first in range(0, 300, 50):  # until as many graphs are kept as ever
                serve(first, 50)
            before, pages = traced(), resident()
            for first in range(300, 800, 50):
                serve(first, 50)
            grown, more = traced() - before, resident() - pages
        finally:
            tracemalloc.stop()
        print(f"after 500 requests: {grown} bytes of objects, {more} resident")
        assert len(engine._round.shapes.keys) == KEPT
        assert grown < 64 << 10  # 130 bytes a request
        assert more < 4 << 20


def test_graphs_that_cannot_be_built_leave_nothing(files):
    with Engine.load(*files, device="cpu", threads=1, n_ctx=256) as engine, Faults() as faults:

        def fail(n: int) -> None:
            for _ in range(n):
                faults.arm(Fault("build", late=True))
                with pytest.raises(DeviceError, match=r"^injected: build failed"):
                    engine.generate([5] * 20, PARAMS)
                faults.raised.clear()  # an error keeps the frames it went through, and so the graph

        fail(50)
        before = resident()
        fail(200)
        more = resident() - before
        print(f"after 200 failures: {more} resident")
        assert not engine._round.shapes.keys
        assert more < 1 << 20  # 5 KiB each; one that stays open holds 160
        assert engine.generate([5] * 20, PARAMS).finish_reason == "length"


def test_a_round_that_reuses_its_shape_leaves_nothing(files):
    """The device's part: lanes in fixed slots, 200 rounds. Printed: what a round costs."""
    oracle = Oracle(files[0])
    driver = Driver(files, Limits(4, 2048), oracle)
    try:
        for i in range(4):
            driver.submit(Request((5 + i,), PARAMS.replaced(max_tokens=1900, width=BLOCK)))
        driver.step(20)
        round_, cache = driver.engine._round, driver.engine._cache
        slots = [lane.slot for lane in driver.watch.scheduler.running]
        for slot in slots:
            cache.grow(slot, 2048)

        def rounds(n: int) -> None:
            for _ in range(n):
                round_.run([LaneRows(slot, int(cache.history.bases[slot]), BLOCK, PARAMS) for slot in slots])

        rounds(5)
        builds, start = driver.engine.counters.builds, time.perf_counter()
        rounds(10)
        seconds = time.perf_counter() - start
        tracemalloc.start()
        try:
            rounds(5)
            before = traced()
            rounds(200)
            grown = traced() - before
        finally:
            tracemalloc.stop()
        assert driver.engine.counters.builds == builds
        print(f"a round of 4 lanes of {BLOCK} rows: {seconds * 1e5:.0f} us; {grown} bytes more after 200")
        assert grown < 1024
    finally:
        driver.close()
        oracle.close()


def test_a_decoding_request_keeps_its_tokens_and_little_else(files):
    """The whole of a step, host and device: what stays is the chunks. Printed: bytes a token, time a step."""
    oracle = Oracle(files[0])
    driver = Driver(files, Limits(4, 2000), oracle)
    worker = driver.engine._worker
    try:
        for i in range(4):
            driver.submit(Request((5 + i,), PARAMS.replaced(max_tokens=1900, width=4)))
        driver.step(20)
        start, host = time.perf_counter(), worker.work.host_s
        for _ in range(100):
            worker.step()
        seconds, host = time.perf_counter() - start, worker.work.host_s - host
        tracemalloc.start()
        try:
            before, n = traced(), _emitted(driver)
            for _ in range(200):
                worker.step()
            grown, n = traced() - before, _emitted(driver) - n
        finally:
            tracemalloc.stop()
        print(f"a step of 4 lanes: {seconds * 1e4:.0f} us, of them {host * 1e4:.0f} us for choosing and handing out")
        print(f"200 steps, {n} tokens: {grown / n:.0f} bytes a token stay")
        assert n >= 800 and grown / n < 400
    finally:
        driver.close()
        oracle.close()


def _emitted(driver: Driver) -> int:
    return sum(len(lane.emitted) for lane in driver.watch.scheduler.running)
