"""A request as its caller sees it: waited for in every way, cancelled at every moment, and failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_driver import idle, until
from engine_model import PAIRS, chunks_of
from faults import Fault, Faults

from pyllama_dflash import DeviceError, Engine, EngineClosed, SamplingParams
from pyllama_dflash.lanes import Lane

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = PARAMS.replaced(max_tokens=1900, width=1)
WAYS = ("result", "iterate", "await", "async for", "stream", "generate")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return PAIRS["often"].write(tmp_path_factory.mktemp("handles"))


@pytest.fixture
def engine(files) -> Iterator[Engine]:
    with Engine.load(*files, device="cpu", threads=1, n_ctx=2000, lanes=2) as made:
        yield made


def wait(engine: Engine, way: str, prompt: list[int], params: SamplingParams):
    """All tokens of a request, got in one of the ways."""
    if way == "generate":
        return engine.generate(prompt, params).tokens
    if way == "stream":
        return sum((chunk.tokens for chunk in engine.stream(prompt, params)), ())
    handle = engine.submit(prompt, params)
    if way == "result":
        return handle.result(60).tokens
    if way == "iterate":
        return sum((chunk.tokens for chunk in handle), ())

    async def awaited():
        if way == "await":
            return (await handle).tokens
        return sum([chunk.tokens async for chunk in handle], ())

    return run(awaited())


def run(awaited):
    """Run a coroutine; one that is never woken is an error."""
    return asyncio.run(asyncio.wait_for(awaited, 60))


# -- waiting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same(engine, way):
    assert wait(engine, way, [5, 6], PARAMS) == engine.submit([5, 6], PARAMS).result().tokens


def test_iterating_begins_with_the_first_chunk_every_time(engine):
    handle = engine.submit([5], PARAMS)
    first, second = iter(handle), iter(handle)
    assert next(first) is next(second)
    once, twice = list(handle), list(handle)
    assert once == twice == [once[0], *first] == [once[0], *second]
    assert sum((chunk.tokens for chunk in once), ()) == handle.result().tokens and handle.done


def test_timeout_leaves_the_request_alone(engine):
    handle = engine.submit([5], LONG)
    with pytest.raises(TimeoutError) as caught:
        handle.result(0.01)
    assert type(caught.value) is TimeoutError and str(caught.value) == "the request has not ended after 0.01 s"
    assert not handle.done
    handle.cancel()
    assert handle.result(20).finish_reason == "cancelled"


def test_many_tasks_wait_at_once(engine):
    prompts = [[1 + i, 2] for i in range(12)]
    alone = [engine.generate(prompt, PARAMS).tokens for prompt in prompts]

    async def chunks(handle):
        return sum([chunk.tokens async for chunk in handle], ())

    async def main():
        handles = [engine.submit(prompt, PARAMS) for prompt in prompts]
        whole = asyncio.gather(*handles)
        same = asyncio.gather(*handles)
        parts = asyncio.gather(*map(chunks, handles))
        return await whole, await same, await parts

    whole, same, parts = run(main())
    assert [result.tokens for result in whole] == parts == alone and whole == same


def test_many_threads_ask_at_once(engine):
    prompts = [[1 + i, 2] for i in range(8)]
    alone = [engine.generate(prompt, PARAMS).tokens for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            got = threads.map(lambda i: wait(engine, WAYS[i % len(WAYS)], prompts[i], PARAMS), range(8))
            assert list(got) == alone
    until(lambda: idle(engine))


def test_a_task_that_gives_up_does_not_end_the_request(engine):
    async def main():
        handle = engine.submit([5], LONG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.02)
        task = asyncio.ensure_future(handle._finished())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not handle.done
        handle.cancel()
        return await handle

    assert run(main()).finish_reason == "cancelled"


def test_a_closed_loop_is_nobodys_problem(engine):
    handle = engine.submit([5], LONG)

    async def look():
        async for _ in handle:
            break
        task = asyncio.ensure_future(handle._finished())
        await asyncio.sleep(0.01)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(look())
    loop.close()
    handle.cancel()
    assert handle.result(20).finish_reason == "cancelled"
    assert engine.generate([5], PARAMS).finish_reason == "length"
    assert not task.done()
    task._log_destroy_pending = False


# -- cancelling ----------------------------------------------------------------------------------------------------


def test_cancel_while_waiting(engine):
    running = [engine.submit([5], LONG) for _ in range(2)]
    waiting = engine.submit([6], LONG)
    until(lambda: running[1]._chunks)
    waiting.cancel()
    result = waiting.result(20)
    assert (result.tokens, result.text, result.finish_reason, result.rounds) == ((), "", "cancelled", 0)
    assert not running[0].done and not running[1].done
    for handle in running:
        handle.cancel()
    until(lambda: idle(engine))


def test_cancel_in_prefill(engine):
    held, go = threading.Event(), threading.Event()
    real = engine._round.advance

    def advance(*args, **options):
        held.set()
        assert go.wait(20)
        real(*args, **options)

    engine._round.advance = advance
    handle = engine.submit([7] * 700, PARAMS)
    assert held.wait(20)
    handle.cancel()
    go.set()
    result = handle.result(20)
    assert (result.tokens, result.finish_reason) == ((), "cancelled")
    assert engine.stats()["work"]["pieces"] == 1
    until(lambda: idle(engine))


def test_cancel_while_decoding_again_and_behind_the_end(engine):
    whole = engine.generate([5], LONG, max_tokens=1000).tokens
    handle = engine.submit([5], LONG)
    next(iter(handle))
    handle.cancel()
    handle.cancel()
    result = handle.result(20)
    assert result.finish_reason == "cancelled" and result.tokens and result.tokens == whole[: len(result.tokens)]
    assert chunks_of(handle)[0][-1].finish_reason == "cancelled"
    handle.cancel()
    assert handle.result() is result and idle(engine)
    ended = engine.submit([5], PARAMS)
    before = ended.result()
    ended.cancel()
    assert ended.result() is before and before.finish_reason == "length"
    assert engine.generate([5], PARAMS).tokens == before.tokens


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_closing_a_stream_frees_the_lane(engine, begun):
    stream = engine.stream([5], LONG)
    if begun:
        next(stream)
        assert not idle(engine)
    stream.close()
    until(lambda: idle(engine))
    assert engine.stats()["work"]["rounds"] < 1900


# -- failing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["build", "compute", "read"])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_comes_out_of_every_way(engine, way, place):
    with Faults() as faults:
        faults.arm(Fault(place, passing=0 if place == "build" else 2))
        with pytest.raises(DeviceError) as caught:
            wait(engine, way, [5] * 20, PARAMS)
    assert caught.value is faults.raised[0] and str(caught.value) == f"injected: {place} failed (1)"
    assert idle(engine)
    assert wait(engine, way, [5] * 20, PARAMS) == engine.generate([5] * 20, PARAMS, width=1).tokens


def test_an_error_is_raised_again_without_growing(engine):
    with Faults() as faults:
        faults.arm(Fault("compute"))
        handle = engine.submit([5], PARAMS)
        lengths = []
        for _ in range(5):
            with pytest.raises(DeviceError) as caught:
                handle.result(20)
            lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


def test_one_that_fails_ends_the_others_of_its_call(engine):
    with Faults() as faults:
        faults.arm(Fault("compute", passing=6))
        with pytest.raises(DeviceError, match=r"^injected: compute failed \(1\)$"):
            engine.generate([[5], [6, 7], [8]], LONG)
    until(lambda: idle(engine))


@pytest.mark.parametrize("kind", [ZeroDivisionError, MemoryError, KeyboardInterrupt, SystemExit])
def test_what_nobody_foresaw_ends_the_engine_and_says_why(engine, files, monkeypatch, kind):
    """Whatever it is: nobody waits for ever, all hear the same, the memory is back and the next engine is right."""
    expected = engine.generate([5], PARAMS).tokens
    handles = [engine.submit([5], LONG) for _ in range(4)]  # two run, two wait
    next(iter(handles[0]))
    cause = kind("a bug")

    def broken(*_):
        raise cause

    monkeypatch.setattr(engine._scheduler, "next_round", broken)
    errors = set()
    for handle in handles:
        with pytest.raises(DeviceError) as caught:
            handle.result(20)
        errors.add(caught.value)
    (error,) = errors
    assert str(error) == f"the engine stopped: {kind.__name__}: a bug" and error.__cause__ is cause
    until(lambda: engine._cache.tensors.closed and not engine._worker._thread.is_alive())
    with pytest.raises(EngineClosed) as closed:
        engine.submit([5])
    assert str(closed.value) == f"the engine is closed: the engine stopped: {kind.__name__}: a bug"
    assert closed.value.__cause__ is error
    engine.close()
    with Engine.load(*files, device="cpu", threads=1, n_ctx=2000) as other:
        assert other.generate([5], PARAMS).tokens == expected


@pytest.mark.parametrize("cancels", [False, True])
def test_a_result_that_cannot_be_made_is_an_error_too(engine, monkeypatch, cancels):
    def broken(_):
        raise MemoryError("a bug")

    handle = engine.submit([5], LONG if cancels else PARAMS.replaced(max_tokens=1900))
    next(iter(handle))
    monkeypatch.setattr(Lane, "result", broken)
    if cancels:
        handle.cancel()
    with pytest.raises(DeviceError, match=r"^the engine stopped: MemoryError: a bug$"):
        handle.result(60)


def test_a_thread_that_cannot_start_is_an_error(engine, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DeviceError, match="can't start new thread"):
            engine.submit([5])
    assert engine.submit([5], PARAMS).result(20).finish_reason == "length"
