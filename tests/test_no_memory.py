"""No memory, wherever it is asked for: a typed error, nothing kept, and the next try is right."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from allocations import Allocations
from engine_driver import idle, until
from engine_model import PAIRS

from pyllama_dflash import DeviceError, Engine, FileError, SamplingParams

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
OPTIONS = {"device": "cpu", "threads": 1, "n_ctx": 256, "lanes": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return PAIRS["often"].write(tmp_path_factory.mktemp("no-memory"))


@pytest.fixture(scope="module")
def expected(files):
    with Engine.load(*files, **OPTIONS) as engine:
        return engine.generate([5] * 20, PARAMS).tokens


def failures(made: Allocations, call: Callable[[], None]) -> int:
    """`call` with its first allocation failing, then its second, ... until it gets all: how many failed."""
    for n in itertools.count():
        made.fail(n)
        call()
        if made.failed is None:
            return n
    raise AssertionError


def test_at_each_allocation_of_load(files, expected):
    with Allocations() as made:

        def load() -> None:
            made.held.clear()
            try:
                with Engine.load(*files, **OPTIONS) as engine:
                    assert made.failed is None, f"{made.failed} failed and nobody heard of it"
            except DeviceError:
                assert made.failed is not None
            except FileError:  # what reads a file does not say what it lacks
                assert made.failed in ("gguf_init_from_buffer", "llama_model_load_from_file")
            else:
                del engine
            gc.collect()
            assert not +made.held, made.failed

        assert failures(made, load) > 20
    with Engine.load(*files, **OPTIONS) as engine:
        assert engine.generate([5] * 20, PARAMS).tokens == expected


def test_at_each_allocation_of_a_request(files, expected):
    """Of the graphs above all, which it shares with another one that runs already."""
    other = SamplingParams(max_tokens=60, ignore_eos=True, width=1)
    with Engine.load(*files, **OPTIONS) as engine:
        alone = engine.generate([9], other).tokens
    failed = set()
    with Allocations() as made:

        def serve() -> None:
            made.held.clear()
            due, made.passing = made.passing, -1
            with Engine.load(*files, **OPTIONS) as engine:
                running = engine.submit([9], other)
                next(iter(running))
                made.passing = due
                asked = engine.submit([5] * 20, PARAMS)
                errors = []
                for handle, tokens in ((asked, expected), (running, alone)):
                    try:
                        assert handle.result(60).tokens == tokens
                    except DeviceError as error:
                        errors.append(error)
                made.passing = -1
                assert (made.failed is not None) == bool(errors), made.failed
                assert len(set(map(id, errors))) <= 1, "those that fail together fail of the same"
                until(lambda engine=engine: idle(engine))
                assert engine.generate([5] * 20, PARAMS).tokens == expected
            failed.add((made.failed, len(errors)))
            del engine, running, asked, handle, errors
            gc.collect()
            assert not +made.held, made.failed

        assert failures(made, serve) > 20
    print(failed)
    assert {n for _, n in failed} == {0, 1, 2}


def test_a_pool_that_the_system_does_not_give(files, expected):
    """Not injected: the address space ends where the pool would begin."""
    code = f"""
        import resource
        from pyllama_dflash import DeviceError, Engine
        files, options = {[str(file) for file in files]!r}, {OPTIONS!r}
        with Engine.load(*files, **options) as engine:
            engine.generate([5], max_tokens=2)
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (16 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for _ in range(3):
            try:
                Engine.load(*files, **{{**options, "kv_type": "f32", "n_ctx": 2048, "lanes": 64}})  # 40 MiB
            except DeviceError as error:
                print(error)
        with Engine.load(*files, **options) as engine:
            print(engine.generate([5] * 20, max_tokens=24, ignore_eos=True).tokens)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # another arena would be address space in reserve
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    *errors, tokens = done.stdout.splitlines()
    assert len(errors) == 3 and all(error.startswith("CPU: no memory for ") for error in errors)
    assert tokens == str(expected)
