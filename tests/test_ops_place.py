"""GGML_OP_DFLASH place against reference/place.py: lanes and rows of every kind, with and without a ring."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
import pytest
from op_harness import OpRun, Refused
from reference.place import PAGE, place

from pyllama_dflash._native import ffi

NONE = -1


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Case:
    """The arguments of reference.place.place, in its order."""

    slots: np.ndarray
    n_rows: np.ndarray
    base: np.ndarray
    history: np.ndarray
    table: np.ndarray
    ring: np.ndarray | None
    rows: int
    fill: int = NONE
    spare: int = 0
    ring_spare: int = 0

    def planes(self, result: np.ndarray) -> list[np.ndarray]:
        """The planes [L, T] of a result, and the base [L]."""
        lanes, n = len(self.slots), 3 if self.ring is None else 4
        assert result.shape == (lanes * (n * self.rows + 1),)
        return [*result[:-lanes].reshape(n, lanes, self.rows), result[-lanes:]]


def run_op(case: Case, n_threads: int = 2) -> np.ndarray:
    arrays = (case.slots, case.n_rows, case.base, case.history, case.table, case.ring)
    with OpRun(n_threads) as run:
        sources = [ffi.NULL if array is None else run.source(array) for array in arrays]
        node = run.op("place", *sources, case.rows, case.fill, case.spare, case.ring_spare)
        run.compute(node)
        for source, array in zip(sources[:5], arrays[:5], strict=True):  # nothing is written
            np.testing.assert_array_equal(run.read(source).reshape(array.shape), array)
        return run.read(node)


def check(case: Case) -> np.ndarray:
    want = place(*astuple(case))
    for n_threads in (1, 2, 3):
        np.testing.assert_array_equal(run_op(case, n_threads), want)
    return want


def random_case(seed: int, lanes: int, rows: int, n_slots: int, positions: int, ring: bool) -> Case:
    """Everything may be wrong: a slot or a number of rows out of range, a slot twice, a base before or behind the end,
    a token below 0."""
    rng = np.random.default_rng(seed)
    n_pages = int(rng.integers(1, positions // PAGE + 3))
    return Case(
        ints(rng.integers(-1, n_slots + 1, lanes)), ints(rng.integers(-1, rows + 2, lanes)),
        ints(rng.integers(-2, positions + 3, n_slots)), ints(rng.integers(-2, 1000, (n_slots, positions))),
        ints(rng.permutation(n_slots * n_pages).reshape(n_slots, n_pages)),
        ints(rng.integers(0, 50, (n_slots, n_pages + int(rng.integers(0, 2))))) if ring else None,
        rows, int(rng.choice([NONE, 0, 7, 2**20 - 1])), 16 * n_slots * n_pages, 16 * 50 if ring else 0,
    )  # fmt: skip


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("lanes", "rows", "n_slots"), [(1, 1, 1), (2, 8, 3), (7, 5, 7), (64, 16, 64), (64, 3, 4096)])
def test_random_lanes(lanes: int, rows: int, n_slots: int, ring: bool) -> None:
    for seed in range(8):
        check(random_case(seed, lanes, rows, n_slots, [1, 15, 16, 17, 40, 100][seed % 6], ring))


@pytest.mark.parametrize("ring", [False, True])
def test_a_long_piece_of_a_prompt(ring: bool) -> None:
    history = ints(np.random.default_rng(1).integers(0, 1000, (2, 4000)))
    table = ints(np.arange(500)).reshape(2, 250)
    case = Case(ints([1, 0]), ints([3000, 4096]), ints([0, 777]), history, table, table if ring else None, 4096)
    tokens, positions, rows, *_ = case.planes(check(case))
    np.testing.assert_array_equal(tokens[0, :3000], history[1, 777:3777])
    np.testing.assert_array_equal(positions[0, :3000], np.arange(777, 3777))
    np.testing.assert_array_equal(rows[0, :3000], 4000 + np.arange(777, 3777))
    assert not tokens[1, 4000:].any(), "positions behind the history"


def test_most_rows_there_may_be() -> None:
    case = Case(ints([0]), ints([20]), ints([0]), ints([range(1, 31)]), ints([[3, 1]]), ints([[0, 1]]), 2**20)
    tokens = case.planes(check(case))[0]
    assert tokens[0, :20].tolist() == list(range(1, 21)) and not tokens[0, 20:].any()


def test_a_block_behind_its_anchor() -> None:
    case = Case(ints([2]), ints([4]), ints([-1, 0, 15]), ints([[9] * 20] * 3), ints([[0, 1], [2, 3], [4, 7]]),
                ints([[0, 0], [0, 0], [5, 6]]), 5, 77, 128, 256)  # fmt: skip
    tokens, positions, rows, ring_rows, base = case.planes(check(case))
    assert tokens.tolist() == [[9, 77, 77, 77, 0]] and positions.tolist() == [[15, 16, 17, 18, 0]]
    assert rows.tolist() == [[79, 112, 113, 114, 132]] and ring_rows.tolist() == [[95, 96, 97, 98, 260]]
    assert base.tolist() == [15]
    assert case.planes(check(replace(case, fill=NONE)))[0].tolist() == [[9, 9, 9, 9, 0]]


def test_lanes_without_work() -> None:
    # no slot, N, far out, dead for its rows, its slot again, rows below 0, base below 0, no rows
    slots, n_rows = ints([-1, 6, 2**31 - 1, 1, 1, 2, 3, 4]), ints([2, 2, 2, 4, 2, -1, 2, 0])
    base = ints([5, 5, 5, -1, 5, 5])
    case = Case(slots, n_rows, base, ints(np.full((6, 40), 8)), ints(np.zeros((6, 3))), None, 3, NONE, 64)
    tokens, positions, rows, lane_base = case.planes(check(case))
    assert not tokens.any() and not positions.any() and (rows == [64, 65, 66]).all()
    assert lane_base.tolist() == [-1] * 7 + [5]


def test_rows_without_a_place() -> None:
    def live(base: int, positions: int, n_pages: int, ring_pages: int | None = None) -> int:
        ring = None if ring_pages is None else ints(np.zeros((1, ring_pages)))
        table = ints(np.ones((1, n_pages)))
        case = Case(ints([0]), ints([8]), ints([base]), ints(np.full((1, positions), 3)), table, ring, 8)
        tokens, *_, lane_base = case.planes(check(case))
        assert lane_base[0] == base
        return int((tokens == 3).sum())

    assert [live(base, 40, 3) for base in (31, 32, 33, 39, 40, 2**31 - 1)] == [8, 8, 7, 1, 0, 0]
    assert [live(base, 40, 2) for base in (24, 25, 31, 32)] == [8, 7, 1, 0]
    assert [live(30, 40, 3, pages) for pages in (1, 2, 3)] == [0, 2, 8]


def test_tokens_below_zero_become_one_that_can_be_embedded() -> None:
    case = Case(ints([0]), ints([4]), ints([0]), ints([[-1, 4, -(2**31), 2**31 - 1]]), ints([[0]]), None, 4)
    assert case.planes(check(case))[0].tolist() == [[0, 4, 0, 2**31 - 1]]


@pytest.mark.parametrize(("changed", "reason"), [
    ({"rows": 0}, "number of rows is 0, must be 1..1048576"),
    ({"rows": 2**20 + 1}, "number of rows is 1048577, must be 1..1048576"),
    ({"fill": -2}, "fill is -2, must be -1..1048575"),
    ({"fill": 2**20}, "fill is 1048576, must be -1..1048575"),
    ({"spare": -1}, "spare is -1, must be 0..2147483632"),
    ({"spare": 2**31 - 15}, "spare is 2147483633, must be 0..2147483632"),
    ({"ring_spare": 16}, "ring_spare is 16, must be 0..0"),
    ({"base": ints([0, 0, 0])}, "history has shape [20,2,1,1], must be [20,3,1,1]"),
    ({"table": ints([[0, 1]])}, "table has shape [2,1,1,1], must be [2,2,1,1]"),
    ({"ring": ints([[0, 1]])}, "ring has shape [2,1,1,1], must be [2,2,1,1]"),
    ({"n_rows": ints([1, 2])}, "n_rows has shape [2,1,1,1], must be [1,1,1,1]"),
    ({"slots": ints([0] * 65), "n_rows": ints([0] * 65)}, "number of lanes is 65, must be 1..64"),
    ({"history": np.zeros((2, 20), np.float32)}, "history is f32, must be i32"),
])  # fmt: skip
def test_what_is_refused(changed: dict[str, object], reason: str) -> None:
    case = Case(ints([0]), ints([1]), ints([0, 0]), ints(np.zeros((2, 20))), ints([[0, 1], [2, 3]]), None, 2)
    check(case)
    with pytest.raises(Refused) as refused:
        run_op(replace(case, **changed))  # type: ignore[arg-type]
    assert str(refused.value) == f"place: {reason}"


@pytest.mark.parametrize(
    "change", ["base", "history", "table", "ring", "fill", "spare", "ring_spare", "slots", "n_rows"]
)
def test_the_comparison_can_fail(change: str) -> None:
    """A reference that reads one thing wrongly is told apart."""
    case = random_case(3, 7, 5, 7, 100, ring=True)
    case.slots, case.n_rows, case.fill = ints(range(7)), ints([3] * 7), 9
    case.base = ints(range(7))
    got = run_op(case)
    before = getattr(case, change)
    other = before[::-1] if change == "slots" else before + 1
    assert (got != place(*astuple(replace(case, **{change: other})))).any()
