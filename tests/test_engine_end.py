"""How an engine ends while requests live: closed, left behind, forked, with its device or with its interpreter."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from engine_driver import until
from engine_model import PAIRS

from pyllama_dflash import DeviceError, DeviceLost, Engine, EngineClosed, SamplingParams
from pyllama_dflash._native import lib
from pyllama_dflash.ggml import devices, graph, tensors

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


# -- forked ------------------------------------------------------------------------------------------------------------

FORKED = """
    import os, sys
    from pyllama_dflash import Engine, EngineClosed
    files, options = {files!r}, dict(device="cpu", threads=1, n_ctx=2000, lanes=2)
    short = dict(max_tokens=24, ignore_eos=True)

    def hears(what, call):
        try:
            call()
        except EngineClosed as error:
            print(what, error, flush=True)

    engine = Engine.load(*files, **options)
    {before}
    child = os.fork()
    if child == 0:
        for handle in handles:
            hears("result:", handle.result)
            hears("chunks:", lambda: list(handle))
        hears("submit:", lambda: engine.submit([5]))
        hears("prepare:", engine.prepare)
        engine.close()
        with Engine.load(*files, **options) as own:
            print("child", own.generate([5], **short).tokens, flush=True)
        sys.exit(7)  # with all that an interpreter does at its end
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for handle in handles:
        handle.cancel()
    print("parent", engine.generate([5], **short).tokens)
"""
LIVE = """handles = [engine.submit([5], max_tokens=1900, width=1, ignore_eos=True) for _ in range(4)]
    next(iter(handles[0]))"""


@pytest.mark.parametrize("before", ["handles = []", LIVE], ids=["idle", "live"])
def test_a_forked_process_has_no_engine_and_may_load_its_own(engine, files, before):
    code = FORKED.format(files=[str(file) for file in files], before=before)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    reason = "the engine stayed in the process that this one was forked from"
    tokens = engine.generate([5], PARAMS).tokens
    handles = [f"{what}: {reason}" for _ in range(4) for what in ("result", "chunks")] if before == LIVE else []
    child = [*handles, f"submit: {reason}", f"prepare: {reason}", f"child {tokens}"]
    assert done.stdout.splitlines() == [*child, "status 7", f"parent {tokens}"]


# -- a device that fails -----------------------------------------------------------------------------------------------


class Answering:
    """`lib`, whose next computation answers with a status; the calls from then on are noted."""

    def __init__(self, status: int) -> None:
        self._status: int | None = status
        self.calls: list[str] | None = None

    def __getattr__(self, name: str) -> Any:
        if self.calls is not None:
            self.calls.append(name)
        if name != "ggml_backend_graph_compute" or self._status is None:
            return getattr(lib, name)
        status, self._status, self.calls = self._status, None, []
        return lambda *_: status


@contextlib.contextmanager
def answering(status: int) -> Iterator[Answering]:
    """Everything that uses a device goes through it."""
    through = Answering(status)
    with contextlib.ExitStack() as stack:
        for module in (devices, graph, tensors):
            stack.enter_context(mock.patch.object(module, "lib", through))
        yield through


def test_a_lost_device_is_not_used_again(engine, files):
    tokens = engine.generate([5], PARAMS).tokens
    handles = [engine.submit([5], LONG) for _ in range(4)]
    next(iter(handles[0]))
    with answering(lib.GGML_STATUS_FAILED) as through:
        errors = set()
        for handle in handles:
            with pytest.raises(DeviceLost, match=r"^CPU: compute failed \(-1\)") as caught:
                handle.result(20)
            errors.add(caught.value)
        assert len(errors) == 1
        with pytest.raises(EngineClosed, match=r"^the engine is closed: CPU: compute failed \(-1\)"):
            engine.submit([5])
        engine.close()
        assert not {name for name in through.calls if name.startswith("ggml_backend") or "free" in name}
    with Engine.load(*files, device="cpu", threads=1, n_ctx=2000) as other:
        assert other.generate([5], PARAMS).tokens == tokens


def test_a_computation_that_gets_no_memory_ends_its_own_requests(engine):
    tokens = engine.generate([5], PARAMS).tokens
    running = [engine.submit([5], LONG) for _ in range(2)]
    for handle in running:
        next(iter(handle))
    waiting = engine.submit([5], PARAMS)
    with answering(lib.GGML_STATUS_ALLOC_FAILED):
        for handle in running:
            with pytest.raises(DeviceError, match=r"^CPU: compute failed \(-2\)") as caught:
                handle.result(20)
            assert type(caught.value) is DeviceError
    assert waiting.result(20).tokens == tokens == engine.generate([5], PARAMS).tokens
