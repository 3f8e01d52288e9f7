"""GGML_OP_DFLASH accept against reference/accept.py: exhaustively for short blocks, and lanes of every kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from op_harness import OpRun, Refused
from reference import accept

LANES = 64


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def run_op(
    tokens: np.ndarray, block: np.ndarray, n_rows: np.ndarray, slots: np.ndarray, n_pending: np.ndarray,
    base: np.ndarray, history: np.ndarray, n_threads: int = 2,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Arguments and results of reference.accept.accept."""
    lanes, rows = tokens.shape
    with OpRun(n_threads) as run:
        sources = [run.source(array) for array in (tokens, block, n_rows, slots, n_pending, base, history)]
        node = run.op("accept", *sources)
        run.compute(node)
        result, after = run.read(node).reshape(lanes, rows + 1), [run.read(source) for source in sources[4:]]
        return result, after[0], after[1], after[2].reshape(history.shape)


def check(*case: np.ndarray) -> None:
    want = accept.accept(*case)
    for n_threads in (1, 2, 3):
        for got, expected in zip(run_op(*case, n_threads=n_threads), want, strict=True):
            np.testing.assert_array_equal(got, expected)


def memory(n_slots: int, positions: int = 40, base: int = 11) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n_pending, base and history of slots, with numbers that no op writes."""
    return ints([77] * n_slots), ints([base] * n_slots), ints(np.full((n_slots, positions), 88))


def all_blocks(rows: int, values: tuple[int, ...]) -> np.ndarray:
    """Every (tokens, proposals, n_rows) over few values, [n, 2 rows]."""
    width = 2 * rows - 1
    return ints([(*v, n) for v in itertools.product(values, repeat=width) for n in range(rows + 1)])


@pytest.mark.parametrize(("rows", "values"), [(1, (-1, 0, 7)), (2, (-1, 0, 7)), (3, (-1, 5))])
def test_every_short_block(rows: int, values: tuple[int, ...]) -> None:
    blocks = all_blocks(rows, values)
    for start in range(0, len(blocks), LANES):
        part = blocks[start : start + LANES]
        slots = np.random.default_rng(start).permutation(LANES)[: len(part)].astype(np.int32)
        block = part[:, rows - 1 : 2 * rows - 1].copy()
        block[:, 0] = -(2**31)  # the anchor is not looked at
        check(part[:, :rows], block, part[:, -1], slots, *memory(LANES))


def test_lanes_without_work_change_nothing() -> None:
    # the first works; then: padded, N, its slot again, far out twice, rows above T, rows below 0, base below 0
    slots = ints([1, -1, 4, 1, 2**31 - 1, -(2**31), 0, 2, 3])
    n_rows = ints([2, 2, 2, 2, 2, 2, 3, -1, 2])
    tokens = np.tile(ints([4, 5]), (9, 1))
    n_pending, base, history = memory(4)
    base[3] = -1
    result, *after = run_op(tokens, np.tile(ints([9, 4]), (9, 1)), n_rows, slots, n_pending, base, history)
    np.testing.assert_array_equal(result, [[2, 4, 5], *[[0, -1, -1]] * 8])
    n_pending[1], base[1], history[1, 12:14] = 2, 13, [4, 5]
    for got, want in zip(after, (n_pending, base, history), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_lane_without_final_rows_counts_none() -> None:
    """n_pending is set; the anchor stays."""
    n_pending, base, history = memory(2)
    for tokens, n_rows in (([-1, 5], 2), ([4, 5], 0)):
        result, *after = run_op(ints([tokens]), ints([[9, 4]]), ints([n_rows]), ints([1]), n_pending, base, history)
        assert result.tolist() == [[0, -1, -1]] and after[0].tolist() == [77, 0] and after[1].tolist() == [11, 11]
        np.testing.assert_array_equal(after[2], history)


@pytest.mark.parametrize("base", [0, 6, 7, 8, 9, 10, 1000])
def test_tokens_behind_the_history_are_not_kept(base: int) -> None:
    """The slot behind keeps its tokens; the base moves on all the same."""
    case = (ints([[1, 2, 3]]), ints([[9, 1, 2]]), ints([3]), ints([0]), *memory(2, 10, base))
    check(*case)
    _, _, after, history = run_op(*case)
    kept = min(3, max(0, 9 - base))
    assert history[0, base + 1 : base + 1 + kept].tolist() == [1, 2, 3][:kept] and (history != 88).sum() == kept
    assert after.tolist() == [base + 3, base]


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("n_slots", [1, 5, 80])
def test_random_blocks(rows: int, n_slots: int) -> None:
    rng = np.random.default_rng(rows * n_slots)
    for lanes in (1, 2, 7, LANES):
        for positions in (1, 20, 300):
            tokens = ints(rng.integers(-1, 4, (lanes, rows)))
            block = ints(np.where(rng.random((lanes, rows)) < 0.8, np.roll(tokens, 1, 1), -1))
            slots, n_rows = ints(rng.integers(-1, n_slots + 1, lanes)), ints(rng.integers(-1, rows + 2, lanes))
            n_pending, base, history = memory(n_slots, positions)
            base[:] = rng.integers(-1, positions + 2, n_slots)
            check(tokens, block, n_rows, slots, n_pending, base, history)


def test_lanes_alone() -> None:
    rng = np.random.default_rng(1)
    tokens = ints(rng.integers(0, 2, (9, 4)))
    block, slots = ints(rng.integers(0, 2, (9, 4))), ints(rng.permutation(9))
    together = run_op(tokens, block, np.full(9, 4, np.int32), slots, *memory(9))
    for i in range(9):
        lane, slot = slice(i, i + 1), slots[i]
        alone = run_op(tokens[lane], block[lane], ints([4]), slots[lane], *memory(9))
        np.testing.assert_array_equal(alone[0][0], together[0][i])
        for mine, all_of_them in zip(alone[1:], together[1:], strict=True):
            np.testing.assert_array_equal(mine[slot], all_of_them[slot])


REFUSED = [
    (0, (3, 17), "number of rows is 17, must be 1..16"),
    (0, (65, 2), "number of lanes is 65, must be 1..64"),
    (1, (3, 1), "block has shape [1,3,1,1], must be [2,3,1,1]"),
    (2, (2,), "n_rows has shape [2,1,1,1], must be [3,1,1,1]"),
    (3, (2,), "slots has shape [2,1,1,1], must be [3,1,1,1]"),
    (5, (5,), "base has shape [5,1,1,1], must be [4,1,1,1]"),
    (6, (5, 20), "history has shape [20,5,1,1], must be [20,4,1,1]"),
]


@pytest.mark.parametrize(("i", "shape", "reason"), REFUSED)
def test_what_is_refused(i: int, shape: tuple[int, ...], reason: str) -> None:
    arrays = [ints(np.zeros(s)) for s in ((3, 2), (3, 2), (3,), (3,), (4,), (4,), (4, 20))]
    check(*arrays)
    arrays[i] = ints(np.zeros(shape))
    with pytest.raises(Refused) as refused:
        run_op(*arrays)
    assert str(refused.value) == f"accept: {reason}"


def test_the_comparison_can_fail() -> None:
    case = (ints([[4, 5, 6]]), ints([[1, 4, 5]]), ints([3]), ints([0]), *memory(1))
    got = run_op(*case)
    other = accept.accept(case[0], ints([[1, 4, 7]]), *case[2:])
    assert not any(np.array_equal(a, b) for a, b in zip(got, other, strict=True))
