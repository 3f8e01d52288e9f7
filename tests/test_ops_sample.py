"""GGML_OP_DFLASH sample gives the tokens of draws.draw(), for all parameters; -1 where there is none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from op_harness import OpRun
from reference.sample import NO_TOKEN, sample

from pyllama_dflash.draws import noise
from pyllama_dflash.sampling import SamplingParams, column

Params = Sequence[SamplingParams]


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def run_op(
    logits: np.ndarray, base: np.ndarray, n_rows: np.ndarray, params: Params | np.ndarray, n_threads: int = 2
) -> np.ndarray:
    """Arguments and result of reference.sample.sample; params may be the words themselves [L, 8]."""
    words = params if isinstance(params, np.ndarray) else np.stack([column(p) for p in params])
    with OpRun(n_threads) as run:
        node = run.op("sample", *(run.source(array) for array in (logits, base, n_rows, words)))
        run.compute(node)
        return run.read(node).reshape(logits.shape[:2])


def check(logits: np.ndarray, base: np.ndarray, params: Params, n_threads: int = 2) -> None:
    n_rows = np.full(len(logits), logits.shape[1], np.int32)
    got, want = run_op(logits, base, n_rows, params, n_threads), sample(logits, base, n_rows, params)
    wrong = [(params[lane], int(t), int(got[lane, t]), int(want[lane, t])) for lane, t in np.argwhere(got != want)]
    assert not wrong


def random_params(rng: np.random.Generator, vocabulary: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-6, 0.1, 0.6, 0.7, 1.0, 1.3, 5.0, 1e6]),
        top_k=int(rng.choice([0, 0, 1, 2, 20, 40, max(vocabulary - 1, 0), vocabulary, vocabulary + 1, 2**31 - 1])),
        top_p=rng.choice([1.0, 1.0, 0.0, 5e-324, 0.1, 0.5, 0.8, 0.95, 0.999, 1 - 2.0**-53, rng.random()]),
        min_p=rng.choice([0.0, 0.0, 5e-324, 1e-9, 0.05, 0.5, 1.0, rng.random()]),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
    )


def random_rows(rng: np.random.Generator, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    rows = (rng.standard_normal(shape) * rng.choice([0.01, 1.0, 4.0, 30.0])).astype(np.float32)
    if kind == 1:  # ties, both zeros
        rows = np.round(rows)
    elif kind == 2:  # forbidden tokens
        rows[rng.random(shape) < 0.5] = -np.inf
    elif kind == 3:  # far apart, and distances that F32 cannot tell apart
        rows = rows * np.float32(10.0) ** rng.integers(-12, 30, shape).astype(np.float32)
    return rows.astype(np.float32)


@pytest.mark.parametrize(("vocabulary", "rounds"), [(1, 8), (2, 12), (33, 40), (1000, 24), (4099, 12)])
def test_tokens_are_those_of_draw(vocabulary: int, rounds: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for i in range(rounds):
        lanes, rows = (16, 3) if vocabulary < 1000 else (8, 2)
        base = ints(rng.choice([0, 1, 1000, 2**31 - 1], lanes))
        params = [random_params(rng, vocabulary) for _ in range(lanes)]
        check(random_rows(rng, i % 4, (lanes, rows, vocabulary)), base, params, 1 + i % 3)


def test_a_full_vocabulary() -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((6, 1, 248_320)) * 4).astype(np.float32)
    greedy = SamplingParams()
    warm = SamplingParams(temperature=1.0, seed=3)
    others = [dataclasses.replace(warm, **options) for options in ({"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.02})]
    everything = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, seed=9)
    check(logits, ints(range(6)), [greedy, warm, *others, everything])


def test_distances_that_are_equal_though_the_logits_are_not() -> None:
    """Top-p orders tokens by their rounded distance from the largest: of equal ones the lower id is taken first."""
    row = np.array([1e-9, 2e-9, 3.0], np.float32)
    params = [SamplingParams(temperature=1e6, top_p=0.94, seed=seed) for seed in range(64)]
    logits, base, n_rows = np.tile(row, (64, 1, 1)), np.zeros(64, np.int32), np.ones(64, np.int32)
    assert set(run_op(logits, base, n_rows, params).ravel().tolist()) == {0, 2}
    check(logits, base, params)


@pytest.mark.parametrize("top_k", range(7))
def test_top_k_of_equal_tokens(top_k: int) -> None:
    params = [SamplingParams(temperature=1.0, top_k=top_k, seed=seed) for seed in range(64)]
    logits = np.full((64, 1, 5), -2.5, np.float32)
    drawn = set(run_op(logits, np.zeros(64, np.int32), np.ones(64, np.int32), params).ravel().tolist())
    assert drawn == set(range(min(top_k or 5, 5)))


@pytest.mark.parametrize(("more", "tokens"), [(0.0, {0}), (2.0**-34, {0, 1}), (-(2.0**-34), {0})])
def test_half_a_unit_of_weight_more_takes_another_token(more: float, tokens: set[int]) -> None:
    """Two equal tokens weigh 2^32 each."""
    params = [SamplingParams(temperature=1.0, top_p=0.5 + more, seed=seed) for seed in range(64)]
    logits = np.zeros((64, 1, 2), np.float32)
    assert set(run_op(logits, np.zeros(64, np.int32), np.ones(64, np.int32), params).ravel().tolist()) == tokens
    check(logits, np.zeros(64, np.int32), params)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_numbers_anywhere_in_a_row(bad: float, temperature: float) -> None:
    logits = np.random.default_rng(3).standard_normal((64, 16, 1024), dtype=np.float32)
    np.einsum("iji->ij", logits.reshape(1024, 1, 1024))[:] = bad  # token i of row i
    params = [SamplingParams(temperature=temperature)] * 64
    base = np.zeros(64, np.int32)
    check(logits, base, params)
    got = run_op(logits, base, np.full(64, 16, np.int32), params)
    assert (got == NO_TOKEN).all() == (bad > 0 or math.isnan(bad))
    nothing = np.full((1, 2, 50), -np.inf, np.float32)
    assert run_op(nothing, base[:1], ints([2]), params[:1]).tolist() == [[NO_TOKEN] * 2]


def test_rows_and_lanes_without_work() -> None:
    base = ints([5, 5, 5, 5, 5, -1, -(2**31), 2**31 - 1])
    n_rows = ints([0, 1, 3, -1, 4, 3, 3, 3])
    logits = np.random.default_rng(8).standard_normal((8, 3, 70), dtype=np.float32)
    for temperature in (0.0, 0.9):
        params = [SamplingParams(temperature=temperature, seed=i) for i in range(8)]
        got = run_op(logits, base, n_rows, params)
        np.testing.assert_array_equal(got, sample(logits, base, n_rows, params))
        assert ((got == NO_TOKEN).sum(1) == [3, 2, 0, 3, 3, 3, 3, 0]).all()


def test_the_largest_noise_there_is() -> None:
    """At seed 845719 and position 1 the hash of token 2246 is 0: it wins from as far below as a token can."""
    params = SamplingParams(temperature=1.0, seed=845719)
    lifted, rival = 2246, 100
    most, other = noise(845719, 1, np.array([lifted, rival]))
    assert most > 22.87
    for more, winner in ((1e-3, lifted), (-1e-3, rival)):
        row = np.full(4099, -1000, np.float32)
        row[[rival, lifted]] = 0, other - most + np.float32(more)
        assert run_op(row[None, None], ints([0]), ints([1]), [params]).tolist() == [[winner]]
        check(row[None, None], ints([0]), [params])


def test_zeros_of_both_signs_are_equal() -> None:
    row = np.full(4099, -1, np.float32)
    row[[1030, 2100, 4098]] = [-0.0, 0.0, 0.0]
    assert run_op(row[None, None], ints([0]), ints([1]), [SamplingParams()]).tolist() == [[1030]]


def test_rows_alone() -> None:
    rng = np.random.default_rng(13)
    logits = (rng.standard_normal((4, 5, 1000)) * 3).astype(np.float32)
    params = [random_params(rng, 1000).replaced(temperature=1.0) for _ in range(4)]
    base = ints([0, 7, 100, 9])
    together = run_op(logits, base, np.full(4, 5, np.int32), params)
    for lane in range(4):
        for t in range(5):
            alone = run_op(logits[lane : lane + 1, t : t + 1], base[lane : lane + 1] + t, ints([1]), [params[lane]])
            assert alone[0, 0] == together[lane, t]


def test_words_that_switch_off() -> None:
    """What SamplingParams cannot say but a column can: negative, NaN and absurd values switch off, or mean greedy."""

    def words(temperature: float, top_k: int, top_p: float, log_min_p: float) -> np.ndarray:
        made = column(SamplingParams(temperature=1.0, seed=6)).copy()
        made[[2, 6]] = np.array([temperature, log_min_p], np.float32).view(np.int32)
        made[3], made[4:6] = top_k, np.array([top_p]).view(np.int32)
        return made

    nan, inf = math.nan, math.inf
    rows = [(1.0, -5, 1.0, nan), (1.0, 0, nan, -inf), (1.0, 0, 7.0, -inf), (1.0, 0, inf, -inf)]  # nothing is left out
    rows += [(-2.0, 3, 0.5, -1.0), (nan, 3, 0.5, -1.0), (-0.0, 3, 0.5, -1.0), (-inf, 3, 0.5, -1.0)]  # greedy
    rows += [(1.0, 0, -3.0, -inf), (1.0, 0, -inf, -inf), (1.0, 0, 1.0, 2.0), (1.0, 0, 1.0, inf)]  # the best alone
    logits = np.random.default_rng(2).standard_normal((1, 16, 300), dtype=np.float32).repeat(len(rows), 0)
    n_rows = np.full(len(rows), 16, np.int32)
    got = run_op(logits, np.zeros(len(rows), np.int32), n_rows, np.stack([words(*row) for row in rows]))
    want = sample(logits[:1], ints([0]), ints([16]), [SamplingParams(temperature=1.0, seed=6)])[0]
    best = logits[0].argmax(1)
    assert (got[:4] == want).all() and (got[4:] == best).all() and (want != best).any()


@pytest.mark.parametrize("change", [{"seed": 1}, {"temperature": 1.01}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}])
def test_the_comparison_can_fail(change: dict[str, float]) -> None:
    """A reference with one parameter off is told apart, and so is one at the next position."""
    logits = np.random.default_rng(4).standard_normal((64, 16, 50), dtype=np.float32)
    base, n_rows = np.zeros(64, np.int32), np.full(64, 16, np.int32)
    params = [SamplingParams(temperature=1.0)] * 64
    got = run_op(logits, base, n_rows, params)
    assert (got != sample(logits, base, n_rows, [dataclasses.replace(params[0], **change)] * 64)).any()
    assert (got != sample(logits, base + 1, n_rows, params)).any()
