"""The engine: the same text with and without the draft, every way to end, errors that leave it usable."""

from __future__ import annotations

import time
from collections.abc import Generator
from unittest import mock

import pytest

from pyllama_dflash import Chunk, Engine, EngineClosed, RequestError, Result, SamplingParams, loader

PROMPTS = [
    [5],
    [5, 17],
    list(range(20, 27)),
    list(range(20, 28)),
    list(range(20, 29)),
    [(7 * i) % 500 for i in range(300)],
]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=512, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(tiny_pair):
    with Engine.load(tiny_pair.target, device="cpu", n_ctx=512, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{len(p)}tokens")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_changes_nothing_but_speed(pair, alone, prompt, temperature):
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=7, ignore_eos=True)
    without = alone.generate(prompt, params)
    assert without.proposed == 0 and len(without.tokens) == 48 and without.finish_reason == "length"
    for width in (8, None, 3, 1):
        with_draft = pair.generate(prompt, params.replaced(width=width))
        assert with_draft.tokens == without.tokens and with_draft.text == without.text
        assert with_draft.finish_reason == "length"
        assert (with_draft.proposed > 0) == (width != 1) or width is None
        assert len(with_draft.accepted_per_position) <= (width or 8) - 1


def test_truncation_filters_keep_the_promise(pair, alone):
    params = SamplingParams(
        max_tokens=40, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=3, ignore_eos=True, width=8
    )
    assert pair.generate(PROMPTS[2], params).tokens == alone.generate(PROMPTS[2], params).tokens


def test_seeds_differ(pair):
    texts = {
        pair.generate(PROMPTS[2], temperature=1.0, seed=s, max_tokens=16, ignore_eos=True).tokens for s in range(4)
    }
    assert len(texts) > 1


def test_context_end_is_reached_in_plain_steps(tiny_pair, alone):
    prompt = list(range(30, 60))
    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=64, threads=1) as engine:
        result = engine.generate(prompt, max_tokens=500, ignore_eos=True, width=8)
    assert result.finish_reason == "context"
    assert len(prompt) + len(result.tokens) == 64
    assert result.tokens == alone.generate(prompt, max_tokens=34, ignore_eos=True).tokens


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 17])
def test_length_is_exact(pair, length):
    result = pair.generate(PROMPTS[3], max_tokens=length, ignore_eos=True, width=8)
    assert len(result.tokens) == length and result.finish_reason == "length"


def test_eog_at_each_place_of_a_block(pair, tiny_pair, monkeypatch):
    free = pair.generate(PROMPTS[4], max_tokens=24, ignore_eos=True, width=8).tokens
    for place in range(1, 17):
        stop_at = free[place]
        if stop_at in free[:place]:
            continue
        monkeypatch.setattr(pair.tokenizer, "is_eog", lambda token, stop_at=stop_at: token == stop_at)
        result = pair.generate(PROMPTS[4], max_tokens=24, width=8)
        assert result.tokens == free[:place] and result.finish_reason == "eos"


def test_stop_string_cuts_text_and_tokens(pair, alone):
    params = SamplingParams(max_tokens=40, ignore_eos=True, width=8)
    free = alone.generate(PROMPTS[2], params)
    middle = free.text[len(free.text) // 2 :][:3]
    params = params.replaced(stop=(middle,))
    a, b = pair.generate(PROMPTS[2], params), alone.generate(PROMPTS[2], params)
    assert a.finish_reason == b.finish_reason == "stop"
    assert a.text == b.text == free.text[: free.text.index(middle)]
    assert a.tokens == b.tokens and len(a.tokens) < 40


def test_stream_joins_to_the_text(pair):
    params = SamplingParams(max_tokens=40, ignore_eos=True, width=8)
    chunks, result = read(pair.stream(PROMPTS[2], params))
    again = pair.generate(PROMPTS[2], params)
    assert (result.text, result.tokens, result.rounds) == (again.text, again.tokens, again.rounds)
    assert "".join(c.text for c in chunks) == result.text
    assert sum((c.tokens for c in chunks), ()) == result.tokens
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == result.finish_reason == "length"
    assert len(chunks) == result.rounds and all(1 <= len(c.tokens) <= 8 for c in chunks)


def read(stream: Generator[Chunk, None, Result]) -> tuple[list[Chunk], Result]:
    """The chunks of a stream and its value."""
    chunks = []
    while True:
        try:
            chunks.append(next(stream))
        except StopIteration as end:
            return chunks, end.value


def test_closing_a_stream_frees_the_lane(pair):
    free = pair._cache.pool.free
    stream = pair.stream(PROMPTS[2], max_tokens=450, ignore_eos=True)
    next(stream)
    assert pair._cache.pool.free < free
    stream.close()
    assert pair.generate(PROMPTS[2], max_tokens=4, ignore_eos=True).finish_reason == "length"
    assert pair._cache.pool.free == free


def test_a_second_request_waits_for_the_lane(pair):
    params = SamplingParams(max_tokens=24, ignore_eos=True, width=8)
    expected = pair.generate(PROMPTS[4], params)
    first = pair.submit(PROMPTS[2], params, max_tokens=450)
    second = pair.submit(PROMPTS[4], params)
    next(iter(first))
    assert not first.done and not second.done
    first.cancel()
    partial, waited = first.result(), second.result()
    assert partial.finish_reason == "cancelled" and 0 < len(partial.tokens) < 450
    assert partial.tokens == pair.generate(PROMPTS[2], params, max_tokens=len(partial.tokens)).tokens
    assert (waited.tokens, waited.finish_reason) == (expected.tokens, "length")
    assert waited.timings.queued_s >= partial.timings.prefill_s > 0
    assert pair._cache.pool.free == pair._cache.pool.pages


def test_a_request_that_waits_can_be_cancelled(pair):
    first = pair.submit(PROMPTS[2], max_tokens=450, ignore_eos=True)
    second = pair.submit(PROMPTS[4], max_tokens=4)
    second.cancel()
    result = second.result()
    assert (result.finish_reason, result.tokens, result.rounds) == ("cancelled", (), 0)
    assert not first.done
    first.cancel()
    assert first.result().finish_reason == "cancelled"


def test_result_counts(pair):
    start = time.perf_counter()
    result = pair.generate(PROMPTS[2], max_tokens=40, ignore_eos=True, width=8)
    wall = time.perf_counter() - start
    assert result.prompt_tokens == len(PROMPTS[2])
    assert result.rounds >= 5
    assert result.proposed >= sum(result.accepted_per_position)
    assert list(result.accepted_per_position) == sorted(result.accepted_per_position, reverse=True)
    assert len(result.tokens) == result.rounds + sum(result.accepted_per_position)
    t = result.timings
    assert min(t.queued_s, t.prefill_s, t.host_s) > 0 and t.host_s < t.decode_s
    assert t.queued_s + t.prefill_s < t.first_token_s < t.queued_s + t.prefill_s + t.decode_s < wall


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([10**6], "prompt\\[0\\]"), ([-1], "prompt\\[0\\]"), ([1] * 512, "at most 511")],
)
def test_bad_prompts(pair, prompt, message):
    with pytest.raises(RequestError, match=message):
        pair.generate(prompt)
    assert pair.generate([5], max_tokens=1, ignore_eos=True).tokens


@pytest.mark.parametrize(
    "options",
    [
        {"device": "nonesuch"}, {"n_ctx": 1}, {"n_ctx": 10**9}, {"kv_type": "q3"}, {"threads": 0}, {"lanes": 0},
        {"lanes": 65}, {"pool": 15}, {"pool": 10**9},
    ],
)  # fmt: skip
def test_bad_load_options(tiny_pair, options):
    """Said before any weight is touched."""
    with mock.patch.object(loader, "WeightStore", side_effect=AssertionError("weights")):
        with pytest.raises(RequestError, match=next(iter(options))):
            Engine.load(tiny_pair.target, **{"device": "cpu", **options})


def test_no_gpu_is_said_not_replaced(tiny_pair):
    with pytest.raises(RequestError, match="device"):
        Engine.load(tiny_pair.target, device="gpu")


def test_closed_engine(tiny_pair):
    engine = Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=4096, threads=1)
    stream = engine.stream([5, 6], max_tokens=4000, ignore_eos=True)
    next(stream)
    waiting = engine.submit([5])
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(EngineClosed):
        read(stream)
    with pytest.raises(EngineClosed):
        waiting.result()
    with pytest.raises(EngineClosed):
        engine.generate([5])


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_cache_types_keep_the_promise(tiny_pair, kv_type):
    params = SamplingParams(max_tokens=24, ignore_eos=True, width=8)
    tokens = []
    for draft in (None, tiny_pair.draft):
        with Engine.load(tiny_pair.target, draft, device="cpu", n_ctx=128, kv_type=kv_type, threads=1) as engine:
            tokens.append(engine.generate(PROMPTS[4], params).tokens)
    assert tokens[0] == tokens[1]


def test_threads_do_not_change_tokens(tiny_pair, alone):
    params = SamplingParams(max_tokens=24, ignore_eos=True, width=8)
    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=512, threads=2) as engine:
        assert engine.generate(PROMPTS[5], params).tokens == alone.generate(PROMPTS[5], params).tokens


def test_the_gil_is_free_during_compute(pair):
    ticks, handle = 0, pair.submit(PROMPTS[5], max_tokens=60, ignore_eos=True)
    while not handle.done:
        time.sleep(0.0005)
        ticks += 1
    assert len(handle.result().tokens) == 60 and ticks > 10


def test_retained_shapes_are_reused(pair):
    params = SamplingParams(max_tokens=24, ignore_eos=True, width=8)
    pair.generate(PROMPTS[2], params)
    builds, hits = pair.counters.builds, pair.counters.hits
    again = pair.generate(PROMPTS[2], params)
    assert pair.counters.builds == builds
    assert pair.counters.hits == hits + again.rounds + 1, "a graph a round, and one for the prompt"
