"""GGML_OP_DFLASH accept against reference/accept.py: exhaustively for short blocks, and lanes of every kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from op_harness import OpRun, Refused
from reference import accept

from pyllama_dflash._native import ffi

LANES = 64


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def run_op(
    tokens: np.ndarray, proposals: np.ndarray, n_rows: np.ndarray, slots: np.ndarray, n_pending: np.ndarray,
    anchors: np.ndarray, n_threads: int = 2,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Arguments and results of reference.accept.accept."""
    lanes, rows = tokens.shape
    with OpRun(n_threads) as run:
        sources = [run.source(array) for array in (tokens, n_rows, slots, n_pending, anchors)]
        node = run.op("accept", *sources, run.source(proposals) if rows > 1 else ffi.NULL)
        run.compute(node)
        return run.read(node).reshape(lanes, rows + 1), run.read(sources[3]), run.read(sources[4])


def check(*case: np.ndarray) -> None:
    want = accept.accept(*case)
    for n_threads in (1, 3):
        for got, expected in zip(run_op(*case, n_threads=n_threads), want, strict=True):
            np.testing.assert_array_equal(got, expected)


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
        memory = np.full(LANES, 77, np.int32), np.full(LANES, 88, np.int32)
        check(part[:, :rows], part[:, rows : 2 * rows - 1], part[:, -1], slots, *memory)


def test_lanes_without_work_change_nothing() -> None:
    slots = ints([1, -1, 3, 1, 2**31 - 1, -(2**31), 0, 2])  # padded, N, twice, far out
    n_rows = ints([2, 2, 2, 2, 2, 2, 3, -1])
    tokens = np.tile(ints([4, 5]), (8, 1))
    result, n_pending, anchors = run_op(tokens, tokens[:, :1], n_rows, slots, ints([9, 9, 9]), ints([6, 6, 6]))
    np.testing.assert_array_equal(result, [[2, 4, 5], *[[0, -1, -1]] * 7])
    np.testing.assert_array_equal(n_pending, [9, 2, 9])
    np.testing.assert_array_equal(anchors, [6, 5, 6])


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("n_slots", [1, 5, 80])
def test_random_blocks(rows: int, n_slots: int) -> None:
    rng = np.random.default_rng(rows * n_slots)
    for lanes in (1, 2, 7, LANES):
        tokens = ints(rng.integers(-1, 4, (lanes, rows)))
        agrees = rng.random((lanes, rows - 1)) < 0.8
        proposals = ints(np.where(agrees, tokens[:, :-1], -1))
        slots, n_rows = ints(rng.integers(-1, n_slots + 1, lanes)), ints(rng.integers(-1, rows + 2, lanes))
        check(tokens, proposals, n_rows, slots, np.full(n_slots, 77, np.int32), np.full(n_slots, 88, np.int32))


def test_lanes_alone() -> None:
    rng = np.random.default_rng(1)
    tokens = ints(rng.integers(0, 2, (9, 4)))
    proposals, slots = ints(rng.integers(0, 2, (9, 3))), ints(rng.permutation(9))
    memory = np.zeros(9, np.int32), np.zeros(9, np.int32)
    together = run_op(tokens, proposals, np.full(9, 4, np.int32), slots, *memory)[0]
    for i in range(9):
        lane = slice(i, i + 1)
        alone = run_op(tokens[lane], proposals[lane], ints([4]), slots[lane], *memory)[0]
        np.testing.assert_array_equal(alone[0], together[i])


def test_proposals_belong_to_blocks_of_two_rows_and_more() -> None:
    reason = r"^accept: proposals must be there for blocks of 2 rows and more, and only then$"
    for rows in (1, 2):
        with OpRun() as run:
            sources = [run.source(ints(np.zeros(shape))) for shape in ((3, rows), (3,), (3,), (2,), (2,))]
            wrong = run.source(ints(np.zeros((3, 1)))) if rows == 1 else ffi.NULL
            with pytest.raises(Refused, match=reason):
                run.op("accept", *sources, wrong)


def test_the_comparison_can_fail() -> None:
    case = (ints([[4, 5, 6]]), ints([[4, 5]]), ints([3]), ints([0]), ints([0]), ints([0]))
    other = (case[0], ints([[4, 7]]), *case[2:])
    assert run_op(*case)[0].tolist() != accept.accept(*other)[0].tolist()
