"""Draws: the noise recipe bit for bit, greedy and bad rows, the filters and the draw against a slow reference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.draws import GOLDEN, M64, mix, r, slow_draw, slow_kept, slow_log, slow_noise

from pyllama_dflash.draws import _gumbel, _token_bits, draft_scores, draw, kept_tokens, noise
from pyllama_dflash.errors import DeviceError
from pyllama_dflash.sampling import SamplingParams


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
    expected = {  # computed once, by the slow reference
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
