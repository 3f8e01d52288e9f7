"""Many lanes: who is let in and when, who waits how long, and that nothing of it is seen in a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver
from engine_model import BLOCK, PAIRS, Limits, Oracle, Request, chunks_of

from pyllama_dflash import Engine, RequestError, SamplingParams, engine, worker

FREE = SamplingParams(max_tokens=24, ignore_eos=True)
Make = Callable[..., Driver]


@pytest.fixture(scope="module", params=sorted(PAIRS))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def files(name, tmp_path_factory):
    return PAIRS[name].write(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def oracle(files) -> Iterator[Oracle]:
    made = Oracle(files[0], longest=64)
    yield made
    made.close()


@pytest.fixture
def make(files, oracle) -> Iterator[Make]:
    drivers: list[Driver] = []

    def driver(*limits: Any, **options: Any) -> Driver:
        drivers.append(Driver(files, Limits(*limits), oracle, **options))
        return drivers[-1]

    yield driver
    for one in drivers:
        one.close()


def tokens(n: int, start: int = 3) -> tuple[int, ...]:
    return tuple((start + 7 * i) % 280 for i in range(n))


def submit(driver: Driver, lengths: Sequence[int], **fields: Any) -> None:
    for i, n in enumerate(lengths):
        assert driver.submit(Request(tokens(n, i), FREE.replaced(**fields)))


# -- coming and going ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 8])
def test_as_many_lanes_as_there_can_be(files, width):
    """A prompt of one token needs no prefill, so lanes come to decode together as fast as they are submitted."""
    prompts = [[3 + 4 * i] for i in range(engine.MAX_LANES + 8)]
    params = FREE.replaced(max_tokens=10)
    with Engine.load(files[0], device="cpu", n_ctx=32, threads=1) as alone:
        expected = [alone.generate(prompt, params).tokens for prompt in prompts]
    with Engine.load(*files, lanes=engine.MAX_LANES, device="cpu", n_ctx=32, threads=1) as many:
        found = many.generate(prompts, params, width=width)
        assert [result.tokens for result in found] == expected
        assert max(key.lanes for key in many._round.shapes.keys) > 8


def test_requests_are_let_in_in_order_as_slots_come_free(make):
    driver = make(2, 300)
    submit(driver, [4, 5, 6, 7, 8], width=1)
    driver.step()
    scheduler = driver.watch.scheduler
    assert [lane.prompt_tokens for lane in scheduler.running] == [4, 5]
    assert [lane.prompt_tokens for lane in scheduler.waiting] == [6, 7, 8]
    driver.cancel(driver.entries[3])
    while len(scheduler.waiting) > 1:
        driver.step()
    assert driver.watch.admitted == [driver.entries[i].handle for i in (0, 1, 2)]
    driver.drain()
    assert driver.watch.admitted == [driver.entries[i].handle for i in (0, 1, 2, 4)]
    driver.check()


def test_the_first_in_the_queue_waits_for_pages_and_nobody_overtakes_it(make):
    driver = make(3, 300, 320)  # 20 pages: 13 for the first, 14 for the second, 2 for the third
    submit(driver, [170, 180, 8], max_tokens=16)
    driver.step(2)
    assert [lane.prompt_tokens for lane in driver.watch.scheduler.running] == [170]
    assert [lane.prompt_tokens for lane in driver.watch.scheduler.waiting] == [180, 8]
    driver.drain()
    driver.check()


def test_lanes_that_need_each_others_pages_all_finish(make):
    driver = make(4, 300, 16 * 12)  # each grows from 2 pages to 7, and there are 12
    submit(driver, [20, 20, 20, 20], max_tokens=64)
    driver.step(6)
    assert len(driver.watch.scheduler.running) > 1
    driver.drain()
    driver.check()


def test_eight_lanes_shrink_to_one_and_grow_again(make):
    driver = make(8, 300)
    submit(driver, [9], max_tokens=64, width=2)
    for _ in range(2):
        submit(driver, [1, 2, 3, 4, 5, 6, 7], max_tokens=8)
        driver.step()
        assert len(driver.watch.scheduler.running) == 8
        while len(driver.watch.scheduler.running) > 1:
            driver.step()
    assert [lane.prompt_tokens for lane in driver.watch.scheduler.running] == [9]
    driver.drain()
    driver.check()


def test_a_decoding_lane_waits_for_one_prefill_piece_at_most(make):
    driver = make(4, 1500)
    submit(driver, [3, 5], max_tokens=32, width=1)
    driver.step(2)
    submit(driver, [1400, 900], max_tokens=4)  # 6 and 4 pieces
    driver.drain()
    assert driver.watch.calls["advance"] == 2 + 6 + 4
    assert driver.watch.longest_wait == 1
    driver.check()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "n", "params", "message"),
    [
        ((2, 64), 64, {}, "prompt: 64 tokens given; expected at most 63, one less than the context"),
        ((2, 64), 0, {}, "prompt: no tokens given; expected at least one token"),
        (
            (2, 256, 64), 20, {"max_tokens": 40},
            "prompt and max_tokens: 5 pages of 16 for prompt, max_tokens and a block given; expected at most 4, the "
            "whole pool",
        ),
        (
            (1, 64), 3, {"logit_bias": {288: 1.0}},
            "logit_bias: 288 given; expected token ids below 288, the size of the vocabulary",
        ),
    ],
    ids=["context", "empty", "pool", "bias"],
)  # fmt: skip
def test_what_could_never_run_is_refused_at_once(make, limits, n, params, message):
    driver = make(*limits)
    with pytest.raises(RequestError) as caught:
        driver.engine.submit(list(tokens(n)), FREE, **params)
    assert str(caught.value) == message
    submit(driver, [5], max_tokens=4)
    driver.drain()
    driver.check()


def test_the_queue_is_not_endless(make, monkeypatch):
    monkeypatch.setattr(worker, "MAX_WAITING", 3)
    driver = make(1, 64)
    submit(driver, [3, 3], max_tokens=2)
    driver.step()
    submit(driver, [3, 3], max_tokens=2)
    with pytest.raises(RequestError) as caught:
        driver.engine.submit([3])
    assert str(caught.value) == "waiting requests: 4 given; expected at most 3"
    driver.drain()
    driver.check()


# -- blocks, the context's end, the ring ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 256, 257, 258])
def test_prompts_around_a_block_and_a_piece(make, n):
    driver = make(2, 300)
    submit(driver, [n, n], width=BLOCK)
    driver.drain()
    driver.check()


@pytest.mark.parametrize("left", range(1, BLOCK + 3))
def test_the_context_ends_at_each_place_of_a_block(make, left):
    driver = make(2, 64)
    submit(driver, [64 - left, 5], max_tokens=1000 if left < 3 else 40, width=BLOCK)
    driver.drain()
    assert driver.entries[0].handle.result(0).finish_reason == "context"
    assert len(driver.entries[0].handle.result(0).tokens) == left
    driver.check()


def test_end_tokens_at_each_place_of_a_block(name, files, oracle, monkeypatch):
    """The end comes behind a given number of tokens, whatever they are."""
    request = Request(tokens(9), FREE.replaced(max_tokens=64, ignore_eos=False, width=BLOCK))
    places = set()
    with Engine.load(*files, device="cpu", threads=1, n_ctx=128) as pair:
        for n in range(40):
            calls = iter(range(100))
            monkeypatch.setattr(pair.tokenizer, "is_eog", lambda _, n=n, calls=calls: next(calls) == n)
            chunks, error = chunks_of(pair.submit(request.prompt, request.params))
            assert error is None and chunks[-1].finish_reason == "eos"
            assert sum((chunk.tokens for chunk in chunks), ()) == oracle.tokens(request)[:n]
            places.add(len(chunks[-1].tokens))
            assert pair._cache.pool.free == pair._cache.pool.pages
    assert places >= set(range(BLOCK if name == "often" else 1))


def test_the_ring_wraps_and_the_draft_does_not_notice(make, monkeypatch):
    """Beside one whose ring holds the whole context: the same bursts, and the same keys and values in the window."""
    seen = []
    for piece in (256, 1000):
        monkeypatch.setattr(engine, "PIECE", piece)  # what the cache makes room for; prompts are cut as ever
        driver = make(2, 900, kv_type="f32")
        submit(driver, [300, 40], max_tokens=800, width=BLOCK)
        driver.step()
        running, ring = driver.watch.scheduler.running, driver.engine._cache.ring
        while min(lane.base for lane in running) < 400:
            driver.step()
        assert len(running) == 2
        rows = [ring.rows(lane.slot, lane.base - 64, 64) for lane in running]
        planes = [tensor.get().reshape(-1, 32)[rows] for side in (ring.k, ring.v) for tensor in side.values()]
        bursts = [[chunk.tokens for chunk in entry.handle._chunks] for entry in driver.entries]
        seen.append((16 * (ring.n_pages - 1) // 2, bursts, planes))
    (positions, bursts, kept), (all_positions, others, expected) = seen
    assert positions < 400 < all_positions
    assert bursts == others
    assert all(np.array_equal(a, b) for a, b in zip(kept, expected, strict=True))
