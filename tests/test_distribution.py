"""Draws follow the target's own softmax: total variation distance of many draws of one row from what they should be.

The bound. Of n independent draws from p over k tokens let q be the shares and TV = sum |q - p| / 2. Then

    E[TV] <= sum sqrt(p (1 - p) / n) / 2 <= sqrt((k - 1) / n) / 2          (Jensen, then Cauchy-Schwarz)
    P(TV > E[TV] + s) <= exp(-2 n s^2)                                     (McDiarmid: one draw moves TV by 1/n at most)

so a sampler of exactly p stays below sqrt((k - 1) / n) / 2 + sqrt(log(1 / DELTA) / (2 n)) but for one in 1 / DELTA sets
of draws. The draws are a function of seed and position, so a test that passed once passes always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from reference.draws import slow_kept

from pyllama_dflash.draws import draw
from pyllama_dflash.penalties import adjusted
from pyllama_dflash.sampling import SamplingParams

DRAWS = 20_000
DELTA = 1e-6
TEMPERATURES = [0.5, 1.0, 1.5]
ROW = (np.random.default_rng(4).standard_normal(16) * 2).astype(np.float32)
LIKELY = np.argsort(-ROW).tolist()
SEEN = [LIKELY[0], LIKELY[3], LIKELY[0], LIKELY[9]]
FILTERS = {"top_k": 12, "top_p": 0.95, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.7, "logit_bias": {LIKELY[1]: -math.inf, LIKELY[4]: 1.5}}


def bound(k: int, n: int) -> float:
    """What TV of n draws from a distribution over k tokens exceeds with a chance of less than DELTA."""
    return math.sqrt((k - 1) / n) / 2 + math.sqrt(math.log(1 / DELTA) / (2 * n))


def variation(drawn: np.ndarray, p: np.ndarray) -> float:
    """TV between the shares of the tokens in `drawn` and p."""
    return float(np.abs(np.bincount(drawn, minlength=p.size) / drawn.size - p).sum() / 2)


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return p / p.sum()


def wanted(params: SamplingParams) -> np.ndarray:
    """The distribution that `params` ask for behind SEEN: written out in F64, without the code under test."""
    x = ROW.astype(np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(SEEN):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.presence_penalty
    kept = slow_kept(x.astype(np.float32).tolist(), params)
    p = np.zeros(x.size)
    p[kept] = softmax(x[kept], params.temperature)
    return p


def draws(params: SamplingParams) -> np.ndarray:
    """DRAWS tokens: half of them at successive positions, half by successive seeds at one position."""

    def tokens() -> Iterator[int]:
        row = adjusted(ROW, params, SEEN)
        for i in range(DRAWS // 2):
            yield draw(row, params, i)
            yield draw(row, params.replaced(seed=i), DRAWS)

    return np.fromiter(tokens(), np.int64, DRAWS)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "options", [{}, FILTERS, PENALTIES, FILTERS | PENALTIES], ids=["plain", "filters", "penalties", "both"]
)
def test_draws_follow_the_softmax(options: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=77_000, **options)
    p, drawn = wanted(params), draws(params)
    assert not (p[drawn] == 0).any()
    assert variation(drawn, p) < bound(np.count_nonzero(p), DRAWS)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_bound_tells_temperatures_apart(temperature: float) -> None:
    """Plain softmax sampling by NumPy: the right temperature is within the bound, a quarter more or less is not."""
    rng = np.random.default_rng(8)
    p, limit = wanted(SamplingParams(temperature=temperature)), bound(ROW.size, DRAWS)
    for factor, passes in ((1.0, True), (0.75, False), (1.25, False)):
        drawn = rng.choice(ROW.size, DRAWS, p=softmax(ROW, temperature * factor))
        assert (variation(drawn, p) < limit) is passes, factor


@pytest.mark.parametrize(("name", "value"), [*PENALTIES.items(), ("top_k", 3), ("top_p", 0.7), ("min_p", 0.2)], ids=str)
def test_the_bound_tells_a_forgotten_parameter(name: str, value: Any) -> None:
    """Sampling by NumPy as if the parameter were not there is outside the bound."""
    drawn = np.random.default_rng(9).choice(ROW.size, DRAWS, p=wanted(SamplingParams(temperature=1.0)))
    p = wanted(SamplingParams(temperature=1.0, **{name: value}))
    assert variation(drawn, p) > bound(ROW.size, DRAWS)


def test_successive_positions_are_independent() -> None:
    """Pairs of tokens at positions 2i and 2i + 1 follow the product of two softmaxes."""
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=3)
    drawn = np.array([draw(row, params, position) for position in range(2 * DRAWS)]).reshape(DRAWS, 2)
    p = softmax(row, 1.0)
    assert variation(drawn @ np.array([4, 1]), np.outer(p, p).reshape(-1)) < bound(16, DRAWS)
