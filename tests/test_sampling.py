"""Sampling: the noise recipe bit for bit, the filters against a slow reference, the distribution against softmax."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_dflash.errors import DeviceError, RequestError
from pyllama_dflash.sampling import (
    SamplingParams,
    _gumbel,
    _token_bits,
    draft_scores,
    draw,
    kept_tokens,
    noise,
)

# ---------------------------------------------------------------------------------------------------------------------
# The slow reference: whole numbers and F32 steps one by one, as the module's docstring states them. A Python float op
# followed by rounding to F32 is the F32 op, because 53 bits are more than twice 24 plus two.
# ---------------------------------------------------------------------------------------------------------------------
M64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def r(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def float_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


def bits_float(i: int) -> float:
    return struct.unpack("<f", struct.pack("<i", i))[0]


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & M64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def slow_log(y: float, small: float | None = None) -> float:
    """log(y); with `small`, y is 1 - small."""
    i = float_bits(y)
    k = (i - 0x3F3504F3) >> 23
    f = r(bits_float(i - (k << 23)) - 1.0)
    if small is not None and k == 0:
        f = -small
    s = r(f / r(2.0 + f))
    z = r(s * s)
    p = r(1 / 9)
    for n in (7, 5, 3):
        p = r(r(1 / n) + r(z * p))
    t = r(s + s)
    return r(r(k * r(math.log(2))) + r(t + r(t * r(z * p))))


def slow_noise(seed: int, position: int, token: int) -> float:
    key = mix((mix(seed) + GOLDEN * (position + 1)) & M64)
    fraction = mix((key + GOLDEN * (token + 1)) & M64) >> 32
    v = min(r(r(float(2 * fraction + 1)) * 2.0**-33), 1 - 2.0**-24)
    return -slow_log(-slow_log(r(1.0 - v), small=v))


def slow_weight(d: float) -> int:
    if not d > -23:
        return 0
    n = round(r(d * r(1.4426950408889634)))
    rest = r(r(d - r(n * 0.693359375)) + r(n * r(2.12194440e-4)))
    p = r(1 / 5040)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = r(r(c) + r(rest * p))
    return math.floor(Fraction(p) * Fraction(2) ** (n + 32))


def slow_kept(logits: list[float], params: SamplingParams) -> list[int]:
    best = max(logits)
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        ids.sort(key=lambda i: (-r(logits[i] - best), i))  # rounded: logits that differ may be equally far
        weights = [slow_weight(r(logits[i] - best)) for i in ids]
        need, held = max(1, math.ceil(params.top_p * sum(weights))), 0
        for count, weight in enumerate(weights, 1):
            held += weight
            if held >= need:
                ids = ids[:count]
                break
    if params.min_p > 0:
        ids = [i for i in ids if logits[i] >= r(best + r(math.log(params.min_p)))]
    return sorted(ids)


def slow_draw(logits: list[float], params: SamplingParams, position: int) -> int:
    ids = slow_kept(logits, params)
    value = {i: r(r(logits[i] / r(params.temperature)) + slow_noise(params.seed, position, i)) for i in ids}
    return max(ids, key=lambda i: (value[i], -i))


# ---------------------------------------------------------------------------------------------------------------------
# The noise
# ---------------------------------------------------------------------------------------------------------------------
def test_hash_is_splitmix64() -> None:
    # The first three outputs of SplitMix64 started at 0, as published with the generator.
    outputs = [mix(GOLDEN * n & M64) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    key = outputs[0]  # of seed 0, position 0
    expected = [mix((key + GOLDEN * (t + 1)) & M64) >> 32 for t in range(5)]
    assert _token_bits(0, 0, np.arange(5)).tolist() == expected


def test_noise_bits_are_fixed() -> None:
    """Other implementations of the recipe must give these bits; a change here changes every seeded text."""
    expected = {  # computed once, by the slow reference above
        (0, 0, 0): 0xBD627313,
        (1, 0, 0): 0x3F657B0E,
        (0, 1, 0): 0x3F908A28,
        (0, 0, 1): 0xBE4184F9,
        (2**64 - 1, 2**31, 248319): 0x3F1671A6,
    }
    for (seed, position, token), bits in expected.items():
        assert noise(seed, position, np.array([token])).view(np.uint32).tolist() == [bits]


def test_noise_equals_the_slow_reference_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    for seed in (0, 1, 2**63, 2**64 - 1, *map(int, rng.integers(0, 2**63, 4))):
        position = int(rng.integers(0, 2**40))
        tokens = rng.integers(0, 2**31, 300)
        expected = [slow_noise(seed, position, int(t)) for t in tokens]
        assert noise(seed, position, tokens).tolist() == expected


def test_noise_at_the_ends_of_the_fraction() -> None:
    ends = np.array([0, 1, 2, 2**30, 2**31, 2**32 - 130, 2**32 - 2, 2**32 - 1], np.uint32)
    got = _gumbel(ends)
    for fraction, g in zip(ends.tolist(), got.tolist(), strict=True):
        v = min(r(r(float(2 * fraction + 1)) * 2.0**-33), 1 - 2.0**-24)
        assert 0 < v < 1
        assert g == -slow_log(-slow_log(r(1 - v), small=v))
        assert g == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-5, abs=4e-7)
    assert got[0] == pytest.approx(math.log(2.0**33), rel=1e-6)
    assert got[-1] == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_noise_is_accurate_and_in_range() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint32)
    got = _gumbel(bits).astype(np.float64)
    v = np.minimum((2.0 * bits + 1) * 2.0**-33, 1 - 2.0**-24).astype(np.float32).astype(np.float64)
    expected = -np.log(-np.log1p(-v))
    assert np.abs(got - expected).max() < 2e-6
    assert -2.82 < got.min() and got.max() < 22.88


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_noise_of_a_token_does_not_depend_on_its_neighbours(seed: int, position: int, tokens: list[int]) -> None:
    together = noise(seed, position, np.array(tokens))
    assert together.dtype == np.float32
    for i in {0, len(tokens) // 2, len(tokens) - 1}:
        assert noise(seed, position, np.array([tokens[i]], np.int32))[0] == together[i]


def test_noise_keeps_the_shape_and_survives_chunking() -> None:
    tokens = np.arange(3 * 7001).reshape(3, 7001)
    got = noise(9, 4, tokens)
    assert got.shape == tokens.shape
    assert np.array_equal(got[2], noise(9, 4, tokens[2]))
    assert np.array_equal(noise(9, 4, tokens[:, ::-1]), got[:, ::-1])


def test_neighbouring_keys_are_unrelated() -> None:
    """Correlation of the noise under a step of seed, position or token; 5 standard errors."""
    n = 100_000
    base = noise(5, 5, np.arange(n))
    shifted = {
        "seed": noise(6, 5, np.arange(n)),
        "position": noise(5, 6, np.arange(n)),
        "token": noise(5, 5, np.arange(1, n + 1)),
        "golden": noise((5 + GOLDEN) & M64, 5, np.arange(n)),
    }
    for name, other in shifted.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(n), name


# ---------------------------------------------------------------------------------------------------------------------
# Greedy and bad rows
# ---------------------------------------------------------------------------------------------------------------------
def test_greedy_takes_the_first_of_equals() -> None:
    assert draw(np.array([1, 3, 3, 2], np.float32), SamplingParams(), 0) == 1
    assert draw(np.array([-np.inf, -5, -np.inf, -5], np.float32), SamplingParams(), 0) == 1
    scores = np.array([[0.5, 2.0]], np.float32)
    assert draft_scores(scores, np.array([[3, 9]]), SamplingParams(), 7) is scores


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "row", [[0, np.nan, 1], [np.nan] * 3, [-np.inf] * 3, [0, np.inf, 1], [np.nan, np.inf, 0]], ids=str
)
def test_a_row_that_is_not_finite_is_a_device_error(row: list[float], temperature: float) -> None:
    with pytest.raises(DeviceError, match="logits at position 41 are not finite"):
        draw(np.array(row, np.float32), SamplingParams(temperature=temperature), 41)


def test_equal_values_go_to_the_lower_id() -> None:
    # At T = 1e6 the noise is all that counts, at T = 1e-6 nothing of it: an exact tie of quotient and noise is made by
    # overflow, where both quotients are infinite.
    huge = np.array([1.0, 3e38, 3.1e38], np.float32)
    assert draw(huge, SamplingParams(temperature=1e-6), 0) == 1


def test_forbidden_tokens_are_never_drawn() -> None:
    row = np.full(64, -np.inf, np.float32)
    row[[5, 60]] = 0.0
    for params in (SamplingParams(temperature=1e6), SamplingParams(temperature=1.0, top_k=50, top_p=0.999, min_p=1e-9)):
        drawn = {draw(row, dataclasses.replace(params, seed=s), s) for s in range(200)}
        assert drawn == {5, 60}


# ---------------------------------------------------------------------------------------------------------------------
# Filters, by hand
# ---------------------------------------------------------------------------------------------------------------------
# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16 in another order of ids.
HALVES = np.log(np.array([1 / 16, 1 / 4, 1 / 2, 1 / 16, 1 / 8])).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [2]),
        ({"top_k": 4}, [0, 1, 2, 4]),  # the tie between 0 and 3 goes to 0
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [2]),
        ({"top_p": 0.49}, [2]),
        ({"top_p": 0.51}, [1, 2]),
        ({"top_p": 0.74}, [1, 2]),
        ({"top_p": 0.88}, [0, 1, 2, 4]),
        ({"top_p": 0.95}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.66}, [2]),  # of what top-k left, 2 holds two thirds
        ({"top_k": 2, "top_p": 0.67}, [1, 2]),
        ({"min_p": 0.24}, [1, 2, 4]),
        ({"min_p": 0.26}, [1, 2]),
        ({"min_p": 1.0}, [2]),
        ({"top_k": 2, "min_p": 0.01}, [1, 2]),
    ],
    ids=str,
)
def test_kept_tokens_by_hand(options: dict[str, float], expected: list[int]) -> None:
    params = SamplingParams(temperature=3.0, **options)  # temperature comes after the filters: it changes nothing here
    assert kept_tokens(HALVES, params).tolist() == expected


special = st.sampled_from([0.0, -0.0, 1.0, -1.0, r(1e30), r(-1e30), -math.inf])
rows = st.lists(st.floats(-60, 60, width=32) | special, min_size=1, max_size=24).filter(
    lambda row: max(row) > -math.inf
)
chosen = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-6, 0.1, 0.7, 1.0, 5.0, 1e6]),
    top_k=st.integers(0, 30),
    top_p=st.floats(0, 1) | st.just(1.0),
    min_p=st.floats(0, 1) | st.just(0.0),
    seed=st.integers(0, 2**64 - 1),
)


@given(rows, chosen, st.integers(0, 2**40))
@settings(max_examples=200, deadline=None)
def test_draw_equals_the_slow_reference(row: list[float], params: SamplingParams, position: int) -> None:
    logits = np.array(row, np.float32)
    before = logits.copy()
    kept = kept_tokens(logits, params).tolist()
    assert kept == slow_kept(row, params)
    try:
        expected = slow_draw(row, params, position)
    except OverflowError:  # the quotient is beyond F32: the infinite ones tie, the lowest id wins
        quotient = [i for i in kept if abs(row[i] / r(params.temperature)) > 3.4e38 and row[i] > 0]
        expected = quotient[0] if quotient else None
    got = draw(logits, params, position)
    assert expected is None or got == expected
    assert got in kept and draw(logits, params, position) == got
    assert np.array_equal(logits, before)


def test_a_full_row_equals_the_plain_formula() -> None:
    """248,320 tokens: pruning and chunks change nothing."""
    logits = (np.random.default_rng(3).standard_normal(248_320) * 4).astype(np.float32)
    everything = np.arange(logits.size)
    for position, temperature in enumerate((0.3, 1.0, 2.0, 30.0)):
        params = SamplingParams(temperature=temperature, seed=11)
        values = logits / np.float32(temperature) + noise(11, position, everything)
        assert draw(logits, params, position) == int(np.argmax(values))
    order = np.lexsort((everything, -logits))
    p = np.exp(logits.astype(np.float64) - logits.max())
    cumulative = np.cumsum(p[order]) / p.sum()
    for top_p in (0.2, 0.9, 0.999):
        kept = kept_tokens(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert set(order[: kept.size]) == set(kept)
        assert cumulative[kept.size - 2] < top_p + 2e-6 and cumulative[kept.size - 1] > top_p - 2e-6


# ---------------------------------------------------------------------------------------------------------------------
# The distribution
# ---------------------------------------------------------------------------------------------------------------------
DRAWS = 200_000


def many_draws(logits: np.ndarray, params: SamplingParams, first: int) -> np.ndarray:
    """DRAWS draws at positions first.. in one go; the first 1000 are checked against draw()."""
    ids = kept_tokens(logits, params)
    positions = np.arange(first, first + DRAWS, dtype=np.uint64)

    def mixed(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    golden = np.uint64(GOLDEN)
    keys = mixed(np.uint64(mix(params.seed)) + golden * (positions + np.uint64(1)))
    best = np.full(DRAWS, -np.inf, np.float32)
    winner = np.zeros(DRAWS, np.int64)
    for token in ids.tolist():
        g = _gumbel((mixed(keys + np.uint64(GOLDEN * (token + 1) & M64)) >> np.uint64(32)).astype(np.uint32))
        value = logits[token] / np.float32(params.temperature) + g
        winner[value > best] = token
        best = np.maximum(best, value)
    for i in range(1000):
        assert draw(logits, params, first + i) == winner[i]
    return winner


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"temperature": 1.7},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_softmax(options: dict[str, float]) -> None:
    logits = (np.random.default_rng(4).standard_normal(50) * 2).astype(np.float32)
    params = SamplingParams(seed=77, **options)
    kept = slow_kept(logits.tolist(), params)
    p = np.zeros(50)
    p[kept] = np.exp(logits[kept].astype(np.float64) / params.temperature)
    p /= p.sum()
    got = np.bincount(many_draws(logits, params, 1000), minlength=50) / DRAWS
    # The total variation to expect of so many draws from p itself: half the sum of E|got - p|. Draws repeat, so this
    # bound does not flicker; over other seeds the ratio stays below 1.9.
    expected = np.sqrt(2 * p * (1 - p) / (math.pi * DRAWS)).sum() / 2
    assert expected < 0.006
    assert np.abs(got - p).sum() / 2 < 2 * expected
    assert not got[p == 0].any()


def test_successive_positions_are_independent() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    drawn = many_draws(logits, SamplingParams(temperature=1.0, seed=3), 0)
    pairs = Counter(zip(drawn[:-1].tolist(), drawn[1:].tolist(), strict=True))
    p = np.exp(logits.astype(np.float64))
    distance = sum(abs(pairs[i, j] / (DRAWS - 1) - p[i] * p[j]) for i in range(4) for j in range(4)) / 2
    assert distance < 0.006


def test_draft_scores_share_the_noise() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal(500).astype(np.float32)
    candidates = np.sort(rng.choice(500, 16, replace=False))
    params = SamplingParams(temperature=0.8, seed=5)
    scores = draft_scores(logits[candidates], candidates, params, 12)
    assert scores.dtype == np.float32
    assert np.array_equal(scores, logits[candidates] / np.float32(0.8) + noise(5, 12, candidates))
    # A draft that knew the target's logits would propose exactly the target's draws.
    everything = np.arange(500)
    for position in range(50):
        ideal = int(np.argmax(draft_scores(logits, everything, params, position)))
        assert ideal == draw(logits, params, position)
    table = draft_scores(logits[candidates].reshape(4, 4), candidates.reshape(4, 4), params, 12)
    assert np.array_equal(table.reshape(-1), scores)


def test_draws_repeat_and_react_to_seed_and_position() -> None:
    logits = np.zeros(1000, np.float32)
    base = SamplingParams(temperature=1.0, seed=1)
    first = [draw(logits, base, i) for i in range(50)]
    assert first == [draw(logits, base, i) for i in range(50)]
    assert first != [draw(logits, dataclasses.replace(base, seed=2), i) for i in range(50)]
    assert len(set(first)) > 40


# ---------------------------------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------------------------------
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
        ("speculate", "yes"),
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


def test_parameters_at_their_limits_are_taken_and_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=1, min_p=0, seed=2**64 - 1, max_tokens=2**31 - 1,
        stop=["a", "é"], ignore_eos=np.bool_(True),
    )  # fmt: skip
    assert params.stop == ("a", "é") and type(params.top_k) is int and type(params.top_p) is float
    assert params.ignore_eos is True and not params.greedy and hash(params) == hash(dataclasses.replace(params))
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams().greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_replaced_checks_names_and_values() -> None:
    params = SamplingParams(seed=4)
    assert params.replaced(temperature=1) == SamplingParams(seed=4, temperature=1.0)
    with pytest.raises(RequestError, match=r"^temp: 1 given; expected one of temperature, "):
        params.replaced(temp=1)
    with pytest.raises(RequestError, match=r"^top_p: 2 given"):
        params.replaced(top_p=2)
