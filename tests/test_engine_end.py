"""How an engine ends: closed, left behind, or with its interpreter, while requests live."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
from engine_driver import until
from engine_model import PAIRS

from pyllama_dflash import Engine, EngineClosed, SamplingParams

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = PARAMS.replaced(max_tokens=1900, width=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return PAIRS["often"].write(tmp_path_factory.mktemp("ends"))


@pytest.fixture
def engine(files):
    with Engine.load(*files, device="cpu", threads=1, n_ctx=2000, lanes=2) as made:
        yield made


def test_close_fails_what_lives(engine):
    handles = [engine.submit([5 + i], LONG) for i in range(4)]  # two run, two wait
    next(iter(handles[0]))
    engine.close()
    engine.close()
    for handle in handles:
        assert handle.done
        with pytest.raises(EngineClosed) as caught:
            handle.result(0)
        assert str(caught.value) == "the engine is closed"
        handle.cancel()
    for call in (engine.submit, engine.generate, engine.stream):
        with pytest.raises(EngineClosed, match=r"^the engine is closed$"):
            call([5])
    assert engine.closed


def test_close_from_many_threads_at_once(engine):
    engine.submit([5], LONG)
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_an_engine_left_behind_is_closed(files):
    engine = Engine.load(*files, device="cpu", threads=1, n_ctx=64)
    assert engine.generate([5], PARAMS).finish_reason == "length"
    worker, gone = engine._worker, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None and worker.closed
    worker._thread.join(20)
    assert not worker._thread.is_alive()


def test_a_handle_keeps_its_engine(files):
    handle = Engine.load(*files, device="cpu", threads=1, n_ctx=2000).submit([5], LONG, max_tokens=200)
    gc.collect()
    assert handle.result(60).finish_reason == "length"
    worker = handle.engine._worker
    del handle
    gc.collect()
    until(lambda: worker.closed and not worker._thread.is_alive())


def test_requests_of_an_engine_left_behind_run_to_their_end(files):
    """The last one to go is the worker's thread, which then closes the engine."""
    engine = Engine.load(*files, device="cpu", threads=1, n_ctx=2000)
    worker, gone = engine._worker, weakref.ref(engine)
    for _ in range(2):
        engine.submit([5], LONG, max_tokens=100)
    del engine
    until(lambda: gone() is None and not worker._thread.is_alive())
    assert worker.closed and worker._released.is_set() and worker.work.rounds == 200


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise SystemExit(3)", "del engine", "del handles, engine"])
def test_interpreter_exit_with_live_lanes(files, end):
    code = f"""
        import sys
        from pyllama_dflash import Engine
        engine = Engine.load({str(files[0])!r}, {str(files[1])!r}, device="cpu", threads=1, n_ctx=2000, lanes=2)
        handles = [engine.submit([5], max_tokens=1900, width=1, ignore_eos=True) for _ in range(4)]
        next(iter(handles[0]))
        print("live", flush=True)
        {end}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3 if "3" in end else 0, "live\n", "")
