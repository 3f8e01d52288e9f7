"""Bias and penalties on a row of logits: by hand, against a slow reference, and as the words of a slot."""

from __future__ import annotations

import math

import numpy as np
import pytest
from any_params import VALID
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.draws import r

from pyllama_dflash.draws import draw
from pyllama_dflash.errors import RequestError
from pyllama_dflash.penalties import adjusted, bias_of, check_bias, neutral, penalties_of
from pyllama_dflash.sampling import SamplingParams

ROW = np.array([2.0, -1.0, 0.5, 0.0, 3.0, -2.0], np.float32)
SEEN = [5, 0, 4, 0, 0, 3]


@pytest.mark.parametrize(
    ("options", "seen", "expected"),
    [
        ({"presence_penalty": 0.25}, SEEN, [1.75, -1.0, 0.5, -0.25, 2.75, -2.25]),  # once each, however often seen
        ({"presence_penalty": -1.0}, [1], [2.0, 0.0, 0.5, 0.0, 3.0, -2.0]),
        ({"repetition_penalty": 2.0}, SEEN, [1.0, -1.0, 0.5, 0.0, 1.5, -4.0]),  # above 0 halved, below 0 doubled
        ({"repetition_penalty": 0.5}, [0, 1], [4.0, -0.5, 0.5, 0.0, 3.0, -2.0]),
        # First the quotient, then the difference: 2 / 2 - 0.25, not (2 - 0.25) / 2.
        ({"repetition_penalty": 2.0, "presence_penalty": 0.25}, [0], [0.75, -1.0, 0.5, 0.0, 3.0, -2.0]),
        ({"logit_bias": {1: 4.0, 4: -math.inf}}, SEEN, [2.0, 3.0, 0.5, 0.0, -math.inf, -2.0]),
        # First the bias: token 4 is 3 - 4 = -1 when its sign decides, so -1 * 2 - 0.25; token 2 has a bias and is not
        # seen; token 3 stays forbidden.
        (
            {"repetition_penalty": 2.0, "presence_penalty": 0.25, "logit_bias": {4: -4.0, 2: 1.0, 3: -math.inf}},
            SEEN,
            [0.75, -1.0, 1.5, -math.inf, -2.25, -4.25],
        ),
        # Ids that the row does not have.
        ({"presence_penalty": 1.0, "logit_bias": {6: 9.0, 1: 1.0}}, [-2, 6, 2**31 - 1, 5], [2, 0, 0.5, 0, 3, -3]),
        ({"repetition_penalty": 2.0, "logit_bias": {0: 1.0}}, [], [3.0, -1.0, 0.5, 0.0, 3.0, -2.0]),
    ],
    ids=str,
)
def test_adjusted_by_hand(options: dict, seen: list[int], expected: list[float]) -> None:
    before = ROW.copy()
    for tokens in (seen, np.array(seen, np.int32), np.array(seen[::-1], np.int64)):
        got = adjusted(ROW, SamplingParams(**options), tokens)
        assert got.dtype == np.float32 and got.tolist() == expected
    assert np.array_equal(ROW, before)


def test_every_step_is_rounded() -> None:
    # 2^24 + 1 lies between two F32 numbers and becomes 2^24, so behind a penalty of 1 one is missing.
    row = np.array([2.0**24, 1.0], np.float32)
    params = SamplingParams(presence_penalty=1.0, logit_bias={0: 1.0})
    assert adjusted(row, params, [0]).tolist() == [2.0**24 - 1, 1.0]
    # The quotient has one rounding: 1 / 1.1 is 0x3F68BA2E and 3 / 1.1 is 0x402E8BA3, where 3 * (1 / 1.1) is 0x402E8BA2.
    got = adjusted(np.array([3.0, 1.0], np.float32), SamplingParams(repetition_penalty=1.1), [0, 1])
    assert got.view(np.uint32).tolist() == [0x402E8BA3, 0x3F68BA2E]


def test_penalties_change_what_is_drawn() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.75)
    assert draw(ROW, params, 9) == 4  # the row as it is given
    assert draw(adjusted(ROW, params, [4]), params, 9) == 0  # 3 / 2 - 0.75 < 2
    assert draw(adjusted(ROW, params, [4, 0]), params, 9) == 4  # 0.75 against 2 / 2 - 0.75 and an unseen 0.5
    assert draw(adjusted(ROW, params.replaced(logit_bias={4: -math.inf}), []), params, 9) == 0


def test_neutral_parameters_leave_the_row_itself() -> None:
    # 1 + 1e-9 is 1 and 1e-46 is 0 in F32.
    for options in ({}, {"temperature": 0.7, "top_k": 3}, {"repetition_penalty": 1 + 1e-9, "presence_penalty": 1e-46}):
        params = SamplingParams(**options)
        assert neutral(params) and adjusted(ROW, params, SEEN) is ROW
    for options in ({"repetition_penalty": 1.001}, {"presence_penalty": -0.001}, {"logit_bias": {0: 0.0}}):
        params = SamplingParams(**options)
        assert not neutral(params) and adjusted(ROW, params, SEEN) is not ROW


@given(
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1e-6, 1e6]) | VALID["repetition_penalty"],
        presence_penalty=VALID["presence_penalty"],
        logit_bias=st.dictionaries(st.integers(0, 2), st.sampled_from([-1e9, 1e9]) | st.floats(-1e9, 1e9)),
        temperature=st.sampled_from([0, 1e-6, 1e6]),
    ),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_no_parameters_make_a_row_that_cannot_be_drawn_from(params: SamplingParams, row: list[float]) -> None:
    got = adjusted(np.array(row, np.float32), params, [0, 1, 2])
    assert np.isfinite(got).all()
    if params.temperature:
        assert np.isfinite(got / np.float32(params.temperature)).all()
    assert 0 <= draw(got, params, 3) < 4


values = st.floats(-60, 60, width=32) | st.sampled_from([0.0, -0.0, -math.inf])
ids = st.integers(0, 12)
asked = st.builds(
    SamplingParams,
    repetition_penalty=st.just(1.0) | st.floats(0.1, 10),
    presence_penalty=st.just(0.0) | st.floats(-5, 5),
    logit_bias=st.dictionaries(ids, values | st.floats(-60, 60), max_size=6),
)


def slow_adjusted(row: list[float], params: SamplingParams, seen: list[int]) -> list[float]:
    x = dict(enumerate(row))
    for token in x.keys() & params.logit_bias.keys():
        x[token] = r(x[token] + r(params.logit_bias[token]))
    repetition, presence = r(params.repetition_penalty), r(params.presence_penalty)
    for token in x.keys() & set(seen):
        x[token] = r(x[token] / repetition) if x[token] > 0 else r(x[token] * repetition)
        x[token] = r(x[token] - presence)
    return [x[token] for token in range(len(row))]


@given(st.lists(values, min_size=1, max_size=10), asked, st.lists(ids, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_adjusted_equals_the_slow_reference(row: list[float], params: SamplingParams, seen: list[int], random) -> None:
    logits = np.array(row, np.float32)
    got = adjusted(logits, params, seen)
    assert got.tolist() == slow_adjusted(row, params, seen)
    random.shuffle(seen)
    assert np.array_equal(adjusted(logits, params, seen + seen), got)
    assert np.array_equal(logits, np.array(row, np.float32))


# ---------------------------------------------------------------------------------------------------------------------
# The words of a slot
# ---------------------------------------------------------------------------------------------------------------------
def test_the_words_of_a_slot_by_hand() -> None:
    params = SamplingParams(
        repetition_penalty=1.1, presence_penalty=-0.5, logit_bias={4: -4.0, 2: 1.0, 7: 0.1, 3: -math.inf}
    )
    assert penalties_of(params).view(np.uint32).tolist() == [0x3F8CCCCD, 0xBF000000]
    pairs = [[2, 0x3F800000], [3, 0xFF800000], [4, 0xC0800000], [7, 0x3DCCCCCD]]
    none = [0xFFFFFFFF, 0]  # id -1
    for capacity, ends in ((4, []), (5, [none]), (7, [none] * 3)):
        words = bias_of(params, capacity)
        assert words.dtype == np.int32 and words.view(np.uint32).tolist() == pairs + ends
    with pytest.raises(RequestError, match=r"^logit_bias: 4 entries given; expected at most 3$"):
        bias_of(params, 3)
    assert penalties_of(SamplingParams()).tolist() == [1.0, 0.0] and penalties_of(params).dtype == np.float32
    assert bias_of(SamplingParams(), 2).tolist() == [[-1, 0], [-1, 0]]


@given(st.dictionaries(st.integers(0, 2**31 - 1), values, max_size=20), st.integers(20, 24))
@settings(max_examples=100, deadline=None)
def test_a_slot_says_what_the_parameters_say(bias: dict[int, float], capacity: int) -> None:
    words = bias_of(SamplingParams(logit_bias=bias), capacity)
    n = int(np.argmax(np.append(words[:, 0], -1) < 0))
    assert dict(zip(words[:n, 0].tolist(), words[:n, 1].copy().view(np.float32).tolist(), strict=True)) == bias
    assert (words[n:] == [-1, 0]).all()


def test_biases_that_leave_no_token_are_refused() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(7), -math.inf) | {7: -1e9})
    check_bias(params, 8)
    with pytest.raises(RequestError, match=r"^logit_bias: 7 tokens forbidden given; expected at most 6, all but one$"):
        check_bias(params, 7)


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    params = SamplingParams(logit_bias={5: 1.0, 248_320: 2.0})
    check_bias(params, 248_321)
    check_bias(SamplingParams(), 1)
    for n_vocab in (248_320, 6, 1):
        with pytest.raises(RequestError, match=rf"^logit_bias: 248320 given; expected token ids below {n_vocab}, the"):
            check_bias(params, n_vocab)
