"""GGML_OP_DFLASH penalise against reference/penalise.py, bit for bit."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
import pytest
from op_harness import OpRun, Refused
from reference.penalise import penalise

INF = np.inf


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(values: object) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def biases(*lists: dict[int, float], size: int = 4) -> np.ndarray:
    """The bias memory [N, size, 2] of a dict per slot; what is behind the end of a list would show."""
    memory = np.full((len(lists), size, 2), 1, np.int32)
    memory[:, :, 1] = floats(1e9).view(np.int32)
    for pairs, given in zip(memory, lists, strict=True):
        for pair, (token, bias) in zip(pairs, given.items(), strict=False):
            pair[:] = token, floats(bias).view(np.int32)
        pairs[len(given) : len(given) + 1, 0] = -1
    return memory


@dataclass
class Case:
    """The arguments of reference.penalise.penalise, in its order."""

    logits: np.ndarray
    block: np.ndarray
    base: np.ndarray
    n_rows: np.ndarray
    slots: np.ndarray
    history: np.ndarray
    penalties: np.ndarray
    bias: np.ndarray


def run_op(case: Case, n_threads: int = 2) -> np.ndarray:
    """The logits afterwards, as their own tensor and as the result show them."""
    with OpRun(n_threads) as run:
        sources = [run.source(array) for array in astuple(case)]
        node = run.op("penalise", *sources)
        run.compute(node)
        for source, array in zip(sources[1:], astuple(case)[1:], strict=True):  # nothing else is written
            np.testing.assert_array_equal(run.read(source).reshape(array.shape), array)
        after = run.read(sources[0]).reshape(case.logits.shape)
        np.testing.assert_array_equal(bits(run.read(node).reshape(case.logits.shape)), bits(after))
        return after


def bits(x: np.ndarray) -> np.ndarray:
    """Bits of F32, one pattern for all NaNs."""
    return np.where(np.isnan(x), floats(np.nan), x).view(np.int32)


def check(case: Case) -> np.ndarray:
    want = penalise(*astuple(case))
    for n_threads in (1, 2, 3):
        np.testing.assert_array_equal(bits(run_op(case, n_threads)), bits(want))
    return want


def one_lane(logits: object, history: object, penalties: tuple[float, float], bias: dict[int, float] | None = None,
             block: object = None) -> Case:  # fmt: skip
    """One lane of slot 0 with the whole history before it. logits [T, V]."""
    rows = floats([logits])
    block = np.full(rows.shape[1], -1) if block is None else block
    return Case(rows, ints([block]), ints([len(ints(history)) - 1]), ints([rows.shape[1]]), ints([0]),
                ints([history]), floats([penalties]), biases(bias or {}))  # fmt: skip


def random_case(seed: int, lanes: int, rows: int, vocabulary: int, n_slots: int, positions: int) -> Case:
    """Any lane may be padded or wrong; few tokens, so that they repeat; some logits are -inf, some slots neutral."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((lanes, rows, vocabulary)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -INF

    def ids(*shape: int) -> np.ndarray:
        return ints(rng.integers(-3, vocabulary + 3, shape) if rng.random() < 0.5 else rng.integers(-1, 5, shape))

    penalties = floats([rng.choice([1, 1, 1.1, 0.7, 3], n_slots), rng.choice([0, 0, 0.3, -1.7], n_slots)]).T
    lists = []
    for _ in range(n_slots):
        tokens = rng.permutation(vocabulary + 2)[: rng.integers(0, 6)].tolist()
        lists.append({token: rng.choice([-INF, 0.1, -3.3, 1e-9, rng.standard_normal()]) for token in tokens})
    return Case(
        logits, ids(lanes, rows), ints(rng.integers(-1, positions + 2, lanes)), ints(rng.integers(-1, rows + 2, lanes)),
        ints(rng.integers(-1, n_slots + 1, lanes)), ids(n_slots, positions), penalties,
        biases(*lists, size=5 if rng.random() < 0.5 else 9),
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 32, 33, 1000, 4099])
@pytest.mark.parametrize(("lanes", "rows", "n_slots"), [(1, 1, 1), (3, 8, 2), (64, 2, 64), (5, 16, 80)])
def test_random_lanes(vocabulary: int, lanes: int, rows: int, n_slots: int) -> None:
    for seed in range(4):
        check(random_case(seed, lanes, rows, vocabulary, n_slots, [1, 7, 100, 1000][seed]))


def test_a_full_vocabulary_and_a_long_history() -> None:
    rng = np.random.default_rng(5)
    vocabulary = 248_320
    logits = (rng.standard_normal((2, 3, vocabulary)) * 4).astype(np.float32)
    history, block = ints(rng.integers(0, vocabulary, (2, 50_000))), ints(rng.integers(0, vocabulary, (2, 3)))
    bias = biases({vocabulary - 1: 3.3, 0: -INF}, {})
    case = Case(logits, block, ints([49_999, 20_000]), ints([3, 2]), ints([1, 0]), history,
                floats([[1.3, 0.1], [0.9, 0]]), bias)  # fmt: skip
    after = check(case)
    assert (after[0] != logits[0]).mean() > 0.1 and (after[1, 2] == logits[1, 2]).all()


def test_the_largest_vocabulary() -> None:
    last = 2**20 - 1
    logits = np.full((1, 1, 2**20), 3, np.float32)
    after = check(Case(logits, ints([[0]]), ints([2]), ints([1]), ints([0]), ints([[last, 2**18, 5]]),
                       floats([[2, 0.25]]), biases({last: 1})))[0, 0]  # fmt: skip
    assert after[[last, 2**18, 5, 4]].tolist() == [1.75, 1.25, 1.25, 3] and (after != 3).sum() == 3


def test_a_token_counts_once() -> None:
    after = check(one_lane([[6, 6, 6, 6]] * 3, [1, 1, 2, 1], (2, 0.5), block=[9, 1, 2]))
    np.testing.assert_array_equal(after[0], [[6, 2.5, 2.5, 6]] * 3)


def test_a_row_sees_the_block_up_to_itself() -> None:
    """The anchor is in the history; entry 0 of the block is not looked at."""
    after = check(one_lane([[6, 6, 6, 6, 6]] * 3, [0], (2, 0), block=[1, 2, 3]))
    np.testing.assert_array_equal(after[0], [[3, 6, 6, 6, 6], [3, 6, 3, 6, 6], [3, 6, 3, 3, 6]])


def test_a_row_sees_the_history_up_to_the_anchor() -> None:
    case = one_lane([[6, 6, 6, 6]], [0, 1, 2], (2, 0))
    for base, seen in ((0, 1), (1, 2), (2, 3), (3, 3), (2**31 - 1, 3)):
        after = check(replace(case, base=ints([base])))
        assert after[0, 0].tolist() == [3] * seen + [6] * (4 - seen)


def test_biases_come_before_penalties() -> None:
    after = check(one_lane([[-1, 4, 4, 4]], [0, 1], (2, 1), {0: 3, 1: -5, 2: 0.5}))
    assert after[0, 0].tolist() == [0, -3, 4.5, 4]  # (-1 + 3) / 2 - 1; (4 - 5) * 2 - 1


def test_every_operation_is_rounded_by_itself() -> None:
    """x * r - p with a fused multiply-add, or x times the reciprocal of r, would give other bits."""
    x = (np.random.default_rng(7).standard_normal(4096) * 3).astype(np.float32)
    r, p = np.float32(1.3), np.float32(0.7)
    after = check(one_lane([x], np.arange(4096), (1.3, 0.7)))[0, 0]
    fused = (x.astype(np.float64) * np.float64(r) - np.float64(p)).astype(np.float32)
    assert (after != fused)[x < 0].any() and (after != x * (np.float32(1) / r) - p)[x > 0].any()


@pytest.mark.parametrize("penalties", [(1, 0), (1, -0.0), (1, 0.5), (2, 0)])
def test_numbers_that_are_not_finite(penalties: tuple[float, float]) -> None:
    rows = [[-INF, INF, np.nan, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1]]
    after = check(one_lane(rows, range(9), penalties, {9: -INF}))[0, 0]
    assert after[0] == -INF and after[9] == -INF and np.isnan(after[2])
    assert check(one_lane(rows, range(9), penalties, {0: INF}))[0, 0, 0] != -INF  # -inf + inf


def test_ids_outside_the_vocabulary() -> None:
    far = [-1, -(2**31), 3, 2**31 - 1, 1]
    after = check(one_lane([[6, 6, 6]] * 5, far, (2, 0), {3: 9, 2**31 - 1: 9, 2: 1}, block=far))
    np.testing.assert_array_equal(after[0], [[6, 3, 7]] * 5)


def test_a_list_of_biases_ends_at_the_first_id_below_zero_or_with_the_memory() -> None:
    case = one_lane([[0] * 6], [5], (1, 0))
    case.bias = biases({0: 1, 1: 2, -7: 5, 2: 3})
    assert check(case)[0, 0].tolist() == [1, 2, 0, 0, 0, 0]
    case.bias = biases({0: 1, 1: 2, 4: 5, 2: 3})
    assert check(case)[0, 0].tolist() == [1, 2, 3, 0, 5, 0]
    case.bias = biases({}, size=1)
    assert not check(case).any()


def test_most_biases_there_may_be() -> None:
    case = one_lane([np.zeros(5000)], [0], (1, 0))
    case.bias = biases({token: token / 7 for token in range(4999, 903, -1)}, size=4096)
    after = check(case)[0, 0]
    np.testing.assert_array_equal(after[904:], floats(np.arange(904, 5000) / 7))
    assert not after[:904].any()


def test_what_does_not_count_is_not_touched() -> None:
    # no slot, N, rows above T, rows below 0, base below 0, no rows, one row, a slot again (it is only read)
    slots, base = ints([-1, 2, 0, 0, 0, 0, 0, 0]), ints([1, 1, 1, 1, -1, 1, 1, 1])
    n_rows = ints([2, 2, 3, -1, 2, 0, 1, 2])
    logits = np.full((8, 2, 4), np.nan, np.float32)
    logits[6:] = 6
    case = Case(logits, ints(np.full((8, 2), 3)), base, n_rows, slots, ints([[0, 1]] * 2), floats([[2, 0]] * 2),
                biases({2: 1}, {2: 1}))  # fmt: skip
    after = check(case)
    assert np.isnan(after[:6]).all()
    np.testing.assert_array_equal(after[6:], [[[3, 3, 7, 6], [6, 6, 6, 6]], [[3, 3, 7, 6], [3, 3, 7, 3]]])


def test_lanes_and_rows_alone() -> None:
    case = random_case(11, 6, 4, 500, 6, 50)
    case.slots, case.base, case.n_rows = ints(range(6)), ints([3, 10, 20, 30, 40, 49]), ints([4] * 6)
    together = check(case)
    for lane in range(6):
        one = slice(lane, lane + 1)
        for rows in range(1, 5):
            alone = replace(case, logits=case.logits[one, :rows], block=case.block[one, :rows], base=case.base[one],
                            n_rows=ints([rows]), slots=case.slots[one])  # fmt: skip
            np.testing.assert_array_equal(bits(run_op(alone)[0]), bits(together[lane, :rows]))


@pytest.mark.parametrize(("changed", "reason"), [
    ({"block": ints([[1]])}, "block has shape [1,1,1,1], must be [2,1,1,1]"),
    ({"base": ints([1, 1])}, "base has shape [2,1,1,1], must be [1,1,1,1]"),
    ({"penalties": floats([[1, 0, 0]])}, "penalties has shape [3,1,1,1], must be [2,1,1,1]"),
    ({"penalties": ints([[1, 0]])}, "penalties is i32, must be f32"),
    ({"bias": biases({}, {})}, "bias has shape [2,4,2,1], must be [2,4,1,1]"),
    ({"bias": biases({}, size=4097)}, "number of biases is 4097, must be 1..4096"),
    ({"logits": np.zeros((1, 17, 4), np.float32)}, "number of rows is 17, must be 1..16"),
    ({"logits": np.zeros((65, 2, 4), np.float32)}, "number of lanes is 65, must be 1..64"),
    ({"logits": np.zeros((1, 2, 2**20 + 1), np.float32)}, "vocabulary is 1048577, must be 1..1048576"),
])  # fmt: skip
def test_what_is_refused(changed: dict[str, object], reason: str) -> None:
    case = one_lane([[6, 6, 6, 6]] * 2, [0, 1], (2, 0))
    check(case)
    with pytest.raises(Refused) as refused:
        run_op(replace(case, **changed))  # type: ignore[arg-type]
    assert str(refused.value) == f"penalise: {reason}"


@pytest.mark.parametrize("change", ["block", "base", "n_rows", "history", "penalties", "bias"])
def test_the_comparison_can_fail(change: str) -> None:
    """A reference that reads one thing wrongly is told apart."""
    case = one_lane([np.arange(20)] * 4, [3, 4, 3, 5], (1.5, 0.25), {7: 2, 8: 1}, block=[1, 9, 10, 3])
    got = run_op(case)
    before = getattr(case, change)
    other = before - 1 if change in ("base", "n_rows") else before[..., ::-1, :] if change == "bias" else before + 1
    assert (got != penalise(*astuple(replace(case, **{change: other})))).any()
