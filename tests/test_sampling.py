"""Sampling parameters: what is taken, what is refused and how, and that equal ones are one key."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from any_params import VALID, junk
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_dflash.errors import RequestError
from pyllama_dflash.sampling import MAX_BIASES, LogitBias, SamplingParams, column


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-7),
        ("temperature", 2e6),
        ("temperature", 10**400),
        ("temperature", "0.8"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 40.0),
        ("top_k", True),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_p", None),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", float("-inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", None),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 1.5),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("stop", (b"a",)),
        ("stop", ("\ud800",)),
        ("stop", 3),
        ("stop", None),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.1),
        ("repetition_penalty", 1e-50),  # 0 in F32
        ("repetition_penalty", 9.9e-7),
        ("repetition_penalty", 1000001),
        ("repetition_penalty", 10**400),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", True),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", 10000.1),
        ("presence_penalty", -10000.1),
        ("presence_penalty", float("-inf")),
        ("presence_penalty", float("nan")),
        ("presence_penalty", None),
        ("logit_bias", None),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", "1"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1.0: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: False}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: 1.1e9}),
        ("logit_bias", {1: -1.1e9}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {1: -(10**400)}),
        ("width", 0),
        ("width", 17),
        ("width", 1.0),
        ("width", True),
        ("width", "8"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.name == name
    shown = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    assert caught.value.value is shown or caught.value.value == shown
    assert caught.value.limit
    assert str(caught.value).startswith(f"{name}: ")


def test_a_bias_is_refused_by_the_entry_that_is_wrong() -> None:
    limit = r"expected token ids in 0\.\.2147483647, each with -inf or a number in -1e\+09\.\.1e\+09$"
    for token, bias, shown in ((7, math.nan, r"\{7: nan\}"), (-3, 2.0, r"\{-3: 2\.0\}")):
        with pytest.raises(RequestError, match=rf"^logit_bias: {shown} given; {limit}"):
            SamplingParams(logit_bias={5: 1.0, token: bias})
    most = dict.fromkeys(range(MAX_BIASES), 0.5)
    assert SamplingParams(logit_bias=most).logit_bias == most
    with pytest.raises(RequestError, match=r"^logit_bias: 1025 entries given; expected at most 1024$"):
        SamplingParams(logit_bias={**most, MAX_BIASES: 0.5})


def test_speculation_is_switched_off_by_the_width() -> None:
    with pytest.raises(RequestError, match=r"^speculate: False given; expected one of temperature, .*, width$"):
        SamplingParams().replaced(speculate=False)
    assert [SamplingParams(width=w).width for w in (None, 1, np.int8(16))] == [None, 1, 16]


def test_parameters_at_their_limits_are_taken_and_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=1, min_p=0, seed=2**64 - 1, max_tokens=2**31 - 1,
        stop=["a", "é"], ignore_eos=np.bool_(True), width=np.uint8(16),
        repetition_penalty=np.float16(1.5), presence_penalty=np.int16(-10000),
        logit_bias={np.int32(2**31 - 1): np.float32(-2), 0: 1e9, np.uint8(3): -math.inf},
    )  # fmt: skip
    assert params.stop == ("a", "é") and type(params.top_k) is int and type(params.top_p) is float
    assert params.ignore_eos is True and not params.greedy and hash(params) == hash(dataclasses.replace(params))
    assert type(params.repetition_penalty) is type(params.presence_penalty) is float and type(params.width) is int
    assert list(params.logit_bias.items()) == [(0, 1e9), (3, -math.inf), (2**31 - 1, -2.0)]
    assert all(type(token) is int and type(bias) is float for token, bias in params.logit_bias.items())
    for end in (1e-6, 1e6):
        assert SamplingParams(repetition_penalty=end).repetition_penalty == end
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams().greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_a_bias_is_a_mapping_that_cannot_change() -> None:
    given_bias = {9: 1.0, 2: -math.inf}
    params = SamplingParams(logit_bias=given_bias)
    given_bias[4] = 3.0
    bias = params.logit_bias
    assert isinstance(bias, LogitBias) and bias == {2: -math.inf, 9: 1.0} and 4 not in bias
    assert bias[9] == 1.0 and bias.get(1) is None and len(bias) == 2 and repr(bias) == "{2: -inf, 9: 1.0}"
    with pytest.raises(TypeError):
        bias[4] = 3.0  # type: ignore[index]


def test_equal_parameters_have_equal_bits() -> None:
    """-0.0 == 0.0, so both must be one column and one slot's words."""
    zeros = SamplingParams(temperature=-0.0, top_p=-0.0, min_p=-0.0, presence_penalty=-0.0, logit_bias={1: -0.0})
    assert zeros == SamplingParams(top_p=0.0, logit_bias={1: 0.0})
    numbers = (zeros.temperature, zeros.top_p, zeros.min_p, zeros.presence_penalty, zeros.logit_bias[1])
    assert [math.copysign(1, x) for x in numbers] == [1.0] * 5


def test_replaced_checks_names_and_values() -> None:
    params = SamplingParams(seed=4)
    assert params.replaced(temperature=1) == SamplingParams(seed=4, temperature=1.0)
    with pytest.raises(RequestError, match=r"^temp: 1 given; expected one of temperature, "):
        params.replaced(temp=1)
    with pytest.raises(RequestError, match=r"^top_p: 2 given"):
        params.replaced(top_p=2)


def test_a_column_written_out() -> None:
    params = SamplingParams(temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, seed=2**32 * 7 + 5)
    # 0.5 is 0x3F000000 in F32, 0.75 is 0x3FE80000_00000000 in F64, log(0.25) = -1.3862944 is 0xBFB17218 in F32.
    assert column(params).view(np.uint32).tolist() == [5, 7, 0x3F000000, 40, 0, 0x3FE80000, 0xBFB17218, 0]
    assert column(SamplingParams()).view(np.uint32).tolist() == [0, 0, 0, 0, 0, 0x3FF00000, 0xFF800000, 0]
    with pytest.raises(ValueError, match="read-only"):
        column(params)[0] = 1


# ---------------------------------------------------------------------------------------------------------------------
# Any parameters
# ---------------------------------------------------------------------------------------------------------------------
@given(st.fixed_dictionaries(VALID), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_parameters_come_back_and_are_one_key(options: dict[str, Any], random: Any) -> None:
    params = SamplingParams(**options)
    assert {f.name: getattr(params, f.name) for f in dataclasses.fields(params)} == options
    entries = list(options["logit_bias"].items())
    random.shuffle(entries)
    for twin in (
        SamplingParams(**{**options, "logit_bias": dict(entries)}),
        params.replaced(),
        pickle.loads(pickle.dumps(params)),
    ):
        assert twin == params and hash(twin) == hash(params) and column(twin) is column(params)
        assert list(twin.logit_bias.items()) == sorted(entries)


@given(st.fixed_dictionaries(VALID), st.sampled_from(sorted(VALID)), st.data())
@settings(max_examples=100, deadline=None)
def test_every_parameter_counts_in_equality(options: dict[str, Any], name: str, data: st.DataObject) -> None:
    params = SamplingParams(**options)
    other = data.draw(VALID[name])
    assert (params.replaced(**{name: other}) == params) is (other == options[name])


@given(st.sampled_from(sorted(VALID)), junk)
@settings(max_examples=600, deadline=None)
def test_anything_else_is_a_request_error_of_that_name(name: str, value: Any) -> None:
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert error.name == name and str(error).startswith(f"{name}: ") and str(error).isprintable()
    else:  # taken: then it is in the value's own terms what was given
        kept = getattr(params, name)
        given_value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        assert kept == given_value and hash(params) == hash(params.replaced())
