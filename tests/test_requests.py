"""Whatever is asked of an engine: an answer, the right one, or a typed error that names what is wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from any_params import VALID, junk
from engine_driver import idle, until
from engine_model import PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from resident import resident

from pyllama_dflash import Engine, RequestError, SamplingParams
from pyllama_dflash.scheduler import MAX_WAITING

N_VOCAB = PAIRS["often"].n_vocab
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
HUGE = 10**5000
"""Python does not write it out."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return PAIRS["often"].write(tmp_path_factory.mktemp("requests"))


@pytest.fixture(scope="module")
def engine(files):
    with Engine.load(*files, device="cpu", threads=1, n_ctx=128, lanes=4) as made:
        yield made


@pytest.fixture(scope="module")
def alone(files):
    """Plain steps without a draft."""
    with Engine.load(files[0], device="cpu", threads=1, n_ctx=128) as made:
        yield made


# -- what is taken -------------------------------------------------------------------------------------------------

any_valid = st.fixed_dictionaries(
    VALID | {
        "max_tokens": st.integers(1, 9) | st.just(2**31 - 1),
        "logit_bias": st.dictionaries(
            st.integers(0, N_VOCAB - 1), st.sampled_from([-np.inf, -1e9, 1e9]) | st.floats(-1e9, 1e9), max_size=8
        ),
    }
)  # fmt: skip
any_prompt = st.lists(st.integers(0, N_VOCAB - 1), min_size=100, max_size=127) | st.text(min_size=1, max_size=30)


@given(any_prompt, any_valid)
@settings(max_examples=150, deadline=None)
def test_any_parameters_give_what_they_give_alone(engine, alone, prompt, options):
    """At the limits of each of them too: no bias, penalty or temperature makes a row that nothing can be drawn from."""
    params = SamplingParams(**options)
    found, expected = engine.generate(prompt, params), alone.generate(prompt, params)
    assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)


def test_stop_strings_of_a_megabyte(engine, alone):
    free = alone.generate([5], PARAMS)
    at = len(free.text) // 2
    begun = free.text[at:] + "x" * 1_000_000  # held back to the end, and then it does not come
    for stops in (["y" * 1_000_000] * 16, [begun], [begun, "z" * 1_000_000]):
        found = engine.generate([5], PARAMS, stop=stops)
        assert (found.text, found.tokens, found.finish_reason) == (free.text, free.tokens, "length")
    assert engine.generate([5], PARAMS, stop=[begun, free.text[at:]]).finish_reason == "stop"


# -- what is refused -----------------------------------------------------------------------------------------------


class Textless:
    """Cannot even be shown."""

    def __str__(self) -> str:
        """No."""
        raise RuntimeError


NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: NoneType given; expected text, or a sequence of token ids"),
        (b"text", "prompt: bytes given; expected text, or a sequence of token ids"),
        (bytearray(b"text"), "prompt: bytearray given; expected text, or a sequence of token ids"),
        (memoryview(b"text"), "prompt: memoryview given; expected text, or a sequence of token ids"),
        ({5: 6}, "prompt: dict given; expected text, or a sequence of token ids"),
        (iter([5]), "prompt: list_iterator given; expected text, or a sequence of token ids"),
        (np.array(5), "prompt: ndarray given; expected text, or a sequence of token ids"),
        (5, "prompt: int given; expected text, or a sequence of token ids"),
        ("", "prompt: no tokens given; expected at least one token"),
        ([], "prompt: no tokens given; expected at least one token"),
        (range(10**30), "prompt: 9223372036854775807 tokens given; expected at most 127, one less than the context"),
        ([5, -1], "prompt[1]: -1 given; expected 0..287"),
        ([5, 288], "prompt[1]: 288 given; expected 0..287"),
        ([HUGE], "prompt[0]: a value of type int that has no text given; expected 0..287"),
        ([True], "prompt[0]: True given; expected 0..287"),
        ([5, 5.0], "prompt[1]: 5.0 given; expected 0..287"),
        ([5, Textless()], "prompt[1]: a value of type Textless that has no text given; expected 0..287"),
        ([5, NESTED], "prompt[1]: a value of type list that has no text given; expected 0..287"),
        (np.array([5.0]), "prompt[0]: 5.0 given; expected 0..287"),
        (np.ones((2, 2), np.int32), "prompt[0]: [1 1] given; expected 0..287"),
        ("a\ud800", "text: U+D800 at 1 given; expected Unicode without surrogates"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_prompts_that_are_none(engine, prompt, message):
    for call in (engine.submit, engine.stream):
        with pytest.raises(RequestError) as caught:
            call(prompt)
        assert str(caught.value) == message


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {}, 0, "greedy", SamplingParams, [SamplingParams()]])
def test_parameters_that_are_none(engine, params):
    with pytest.raises(RequestError, match=r"^params: \w+ given; expected SamplingParams, or None$"):
        engine.submit([5], params)
    with pytest.raises(RequestError, match=r"^params: "):
        engine.generate([[5], [6]], params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", None), ("target", 5), ("target", b"x"), ("draft", 5), ("device", 5), ("device", None),
        ("kv_type", ["f16"]), ("kv_type", None), ("threads", "x"), ("threads", 1.0), ("threads", -1), ("threads", HUGE),
        ("lanes", "2"), ("lanes", HUGE), ("lanes", True), ("n_ctx", 1.5), ("n_ctx", -1), ("n_ctx", HUGE), ("pool", "x"),
        ("pool", -1), ("pool", HUGE),
    ],
    ids=lambda value: str(type(value).__name__) if not isinstance(value, str) else value,
)  # fmt: skip
def test_load_options_that_are_none(files, name, value):
    with pytest.raises(RequestError, match=rf"^{name}: "):
        Engine.load(**{"target": files[0], "device": "cpu", "threads": 1, "lanes": 1, name: value})


@pytest.mark.parametrize("seconds", ["1", float("nan"), 1e300, HUGE, [1]], ids=lambda value: type(value).__name__)
def test_times_that_are_none(engine, seconds):
    handle = engine.submit([5], PARAMS)
    with pytest.raises(RequestError, match=r"^timeout: .* expected None or seconds up to "):
        handle.result(seconds)
    assert len(handle.result(60).tokens) == 12


@given(st.one_of(junk, st.lists(junk, max_size=3)), st.dictionaries(st.sampled_from(sorted(VALID)), junk, max_size=3))
@settings(max_examples=400, deadline=None)
def test_anything_is_answered_or_refused(engine, prompt, options):
    try:
        handle = engine.submit(prompt, **options)
    except RequestError as error:
        assert str(error).isprintable() and " given; expected " in str(error)
    else:
        handle.cancel()
        handle.result(60)


def test_a_hundred_thousand_bad_requests(engine):
    """Each refused in the caller's thread; nothing is kept of them, and the next good one is answered."""
    nasty = [
        -1, 2**64, HUGE, float("nan"), float("inf"), None, "", b"", [], {}, (), "\ud800", [""], {-1: 1}, {1: "1"}, True,
        {HUGE: 1}, {1: HUGE}, 5j, object(), Textless(), np.array(5), np.nan, range(10**30),
    ]  # fmt: skip
    names, draw, counted, expected = sorted(VALID), random.Random(1), Counter(), engine.generate([5], PARAMS).tokens
    for i in range(100_000):
        if i == 10_000:
            before = resident()
        prompt, options = (draw.choice(nasty), {}) if i % 2 else ([5], {draw.choice(names): draw.choice(nasty)})
        try:
            engine.submit(prompt, **options).cancel()
        except RequestError as error:
            counted[error.name.split("[")[0]] += 1
        else:
            counted["taken"] += 1
    until(lambda: idle(engine) and not engine._worker._arrived, 60)
    print(dict(counted), resident() - before)
    assert counted["taken"] < 20_000 and counted["prompt"] > 40_000 and set(names) <= {*counted}
    assert resident() - before < 4 << 20
    assert engine.generate([5], PARAMS).tokens == expected


# -- how many ------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_at_once_and_a_storm_of_cancels(engine):
    """The queue takes what it is said to take; all but a few leave it at once, and those few are answered right."""
    expected = [engine.generate([5 + i], PARAMS).tokens for i in range(10)]
    blocking = [engine.submit([5], PARAMS, max_tokens=120, width=1) for _ in range(4)]
    held, go = threading.Event(), threading.Event()
    engine._worker.observer = lambda _: (held.set(), go.wait(60))
    assert held.wait(60)
    handles, refused = [], 0
    for i in range(100_000):
        try:
            handles.append(engine.submit([5 + i % 10], PARAMS))
        except RequestError as error:
            assert str(error) == f"waiting requests: {MAX_WAITING + 1} given; expected at most {MAX_WAITING}"
            refused += 1
    assert len(handles) == MAX_WAITING and refused == 100_000 - MAX_WAITING
    kept = [handles[i] for i in range(0, MAX_WAITING, MAX_WAITING // 40)]
    leaving = set(handles) - set(kept)
    leaving = [handle for handle in handles if handle in leaving]
    threads = [threading.Thread(target=_cancel_all, args=(leaving[i::8],)) for i in range(8)]
    engine._worker.observer = None
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert all(handle.result(60).finish_reason in ("cancelled", "length") for handle in leaving)
    print(f"{len(leaving)} requests left in {time.perf_counter() - start:.1f} s")
    for handle in kept:
        assert handle.result(60).tokens == expected[handles.index(handle) % 10]
    assert all(len(handle.result(60).tokens) == 120 for handle in blocking)
    until(lambda: idle(engine))


def _cancel_all(handles):
    for handle in handles:
        handle.cancel()
