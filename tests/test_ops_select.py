"""GGML_OP_DFLASH select against reference/selector.py and draws.draft_scores().

With whole numbers the edge scores are exact in any order of summing, so the proposals must be the reference's. With
other numbers every step of the walk must be a best candidate within the rounding of its score.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from op_harness import OpRun, Refused, meaning
from reference.selector import greedy_walk, selector_scores, step_scores, without_nan

from pyllama_dflash._native import ffi, lib
from pyllama_dflash.draws import draft_scores
from pyllama_dflash.sampling import SamplingParams, column

TOP_KS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
TYPES = {name: getattr(lib, f"GGML_TYPE_{name}") for name in ("F32", "F16", "BF16", "Q8_0")}
WARM = SamplingParams(temperature=0.7, seed=21)
GREEDY = SamplingParams()


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass
class Case:
    """logits [L, P, V]; gate [L, P, R] and codebooks [V, R] (as the op reads them), or None."""

    logits: np.ndarray
    anchors: np.ndarray
    top_k: int
    gate: np.ndarray | None = None
    predecessor: np.ndarray | None = None
    successor: np.ndarray | None = None
    types: tuple[str, str] = ("F32", "F32")
    base: np.ndarray = field(default_factory=lambda: ints([]))
    params: list[SamplingParams] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.params:
            self.base, self.params = ints(range(len(self.logits))), [GREEDY] * len(self.logits)

    def edges(self, lane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        if self.gate is None or self.predecessor is None or self.successor is None:
            return None
        before, after = (
            meaning(book, TYPES[kind]).astype(np.float64)
            for book, kind in zip((self.predecessor, self.successor), self.types, strict=True)
        )
        return self.gate[lane].astype(np.float64), before, after

    def lane(self, lane: int, rows: int) -> Case:
        part = slice(lane, lane + 1)
        return replace(
            self, logits=self.logits[part, :rows], gate=None if self.gate is None else self.gate[part, :rows],
            anchors=self.anchors[part], base=self.base[part], params=self.params[part],
        )  # fmt: skip


def make_case(
    seed: int, shape: tuple[int, int, int], rank: int, top_k: int, whole: bool, types: tuple[str, str] = ("F32", "F32")
) -> Case:
    lanes, rows, vocabulary = shape
    rng = np.random.default_rng(seed)

    def numbers(*shape: int, size: float = 1.0) -> np.ndarray:
        values = rng.standard_normal(shape) * size
        return (np.round(values) if whole else values).astype(np.float32)

    gate, predecessor, successor = numbers(lanes, rows, rank), numbers(vocabulary, rank), numbers(vocabulary, rank)
    if whole:  # a block of Q8_0 keeps whole numbers when its largest is 127
        predecessor[:, ::32] = successor[:, ::32] = 127
    anchors = ints(rng.integers(0, vocabulary, lanes))
    return Case(numbers(*shape, size=4), anchors, top_k, gate, predecessor, successor, types)


def run_op(case: Case, n_threads: int = 2) -> np.ndarray:
    """The op's proposals [L, P]; in front of them stand the anchors, 0 in a dead lane."""
    with OpRun(n_threads) as run:
        sampling = np.stack([column(p) for p in case.params])
        sources = [run.source(array) for array in (case.logits, case.anchors, case.base, sampling)]
        if case.gate is None:
            sources += [ffi.NULL] * 3
        else:
            sources.append(run.source(case.gate))
            for book, kind in zip((case.predecessor, case.successor), case.types, strict=True):
                sources.append(run.source(book, None if kind == "F32" else TYPES[kind]))
        node = run.op("select", *sources, case.top_k)
        run.compute(node)
        lanes, rows, vocabulary = case.logits.shape
        block = run.read(node).reshape(lanes, rows + 1)
        is_live = (case.anchors >= 0) & (case.anchors < vocabulary)
        np.testing.assert_array_equal(block[:, 0], np.where(is_live, case.anchors, 0))
        return block[:, 1:]


def tolerance(case: Case, lane: int, row: int, before: int, candidates: np.ndarray) -> np.ndarray:
    """What the scores of the candidates may be off: a rounding of 2^-24 of the size of the terms in each step of the
    longest sum, then the division by the temperature and the addition of the noise."""
    unit, edges = 2.0**-24, case.edges(lane)
    size = 2 * np.abs(case.logits[lane, row, candidates].astype(np.float64))
    if edges is not None:
        terms = np.abs(edges[2][candidates] * (edges[1][before] * edges[0][row]))
        size = size + (terms.shape[1] + 4) * terms.sum(1)
    params = case.params[lane]
    return size * unit if params.greedy else size * unit / params.temperature + 4 * unit * (size / 0.1 + 23)


def check(case: Case, whole: bool) -> np.ndarray:
    """The op's proposals, every step of its walks checked."""
    got = run_op(case)
    check_walks(case, got, whole)
    return got


def check_walks(case: Case, got: np.ndarray, whole: bool) -> None:
    vocabulary = case.logits.shape[2]
    for lane, anchor in enumerate(case.anchors):
        if not 0 <= anchor < vocabulary:
            assert not got[lane].any()
            continue
        before = int(anchor)
        for row, taken in enumerate(got[lane]):
            candidates, exact = step_scores(case.logits[lane], case.edges(lane), before, row, case.top_k)
            position = int(case.base[lane]) + row + 1
            with np.errstate(invalid="ignore"):
                scores = without_nan(draft_scores(exact.astype(np.float32), candidates, case.params[lane], position))
            if whole:
                assert taken == candidates[np.argmax(scores)], (lane, row)
            else:
                assert taken in candidates
                off = tolerance(case, lane, row, before, candidates)
                mine = np.flatnonzero(candidates == taken)[0]
                assert (scores[mine] + off[mine] >= scores - off).all(), (lane, row)
            before = int(taken)


@pytest.mark.parametrize("top_k", TOP_KS)
def test_greedy_walk_of_the_reference(top_k: int) -> None:
    case = make_case(top_k, (3, 5, 1000), 64, top_k, whole=True)
    want = []
    for lane, anchor in enumerate(case.anchors):
        edges = case.edges(lane)
        assert edges is not None
        want.append(greedy_walk(*selector_scores(case.logits[lane], *edges, int(anchor), top_k)))
    np.testing.assert_array_equal(run_op(case), want)


@pytest.mark.parametrize("top_k", TOP_KS)
@pytest.mark.parametrize("vocabulary", [16, 33, 1000, 4099])
def test_steps(top_k: int, vocabulary: int) -> None:
    for whole in (True, False):
        case = make_case(vocabulary, (3, 4, vocabulary), 33 if not whole else 32, top_k, whole)
        check(case, whole)
        case.params, case.base = [WARM, GREEDY, WARM.replaced(temperature=1.0)], ints([2**31 - 1, 0, 5])
        check(case, whole)


@pytest.mark.parametrize("before", TYPES)
@pytest.mark.parametrize("after", TYPES)
def test_codebook_types(before: str, after: str) -> None:
    for whole in (True, False):
        case = make_case(5, (2, 7, 300), 64, 8, whole, (before, after))
        greedy = check(case, whole)
        assert (greedy != run_op(replace(case, gate=case.gate * 0))).any(), "the edges do not count"
        case.params = [WARM] * 2
        check(case, whole)


@pytest.mark.parametrize(("vocabulary", "rank", "rows", "lanes"), [(1, 1, 15, 1), (64, 1024, 15, 1), (50, 7, 1, 64)])
def test_shapes_at_the_limits(vocabulary: int, rank: int, rows: int, lanes: int) -> None:
    check(make_case(3, (lanes, rows, vocabulary), rank, 1 if vocabulary == 1 else 16, whole=False), whole=False)


def test_without_edges_it_is_the_largest_logit_or_the_draw() -> None:
    logits = np.random.default_rng(2).standard_normal((4, 7, 4099), dtype=np.float32)
    case = Case(logits, ints([0, 4098, 5, 6]), 16)
    np.testing.assert_array_equal(check(case, whole=True), logits.argmax(2))
    case.params = [WARM, GREEDY, WARM, WARM]
    check(case, whole=True)


def test_dead_lanes() -> None:
    """Zeros: tokens that the target can embed."""
    case = make_case(4, (6, 3, 40), 32, 4, whole=True)
    case.anchors = ints([39, -1, 40, 0, -(2**31), 2**31 - 1])
    case.logits[[1, 2, 4, 5]] = np.nan  # not read
    got = check(case, whole=True)
    assert (got.any(1) == [True, False, False, True, False, False]).all()


@pytest.mark.parametrize("top_k", [1, 4, 16])
@pytest.mark.parametrize("rank", [0, 32])
def test_ties_and_bad_numbers(top_k: int, rank: int) -> None:
    case = make_case(6, (1, 8, 100), 32, top_k, whole=True)
    if rank == 0:
        case.gate = case.predecessor = case.successor = None
    rows = case.logits[0]
    rows[0], rows[1], rows[2, :97] = np.nan, -np.inf, np.nan
    rows[3] = 1.0
    rows[4, 50], rows[4, 0] = np.inf, np.nan
    rows[5, [20, 99]] = np.inf
    rows[6, :90], rows[6, [0, 40]] = -np.inf, np.nan
    rows[7], rows[7, 1::2] = -0.0, 0.0
    greedy = check(case, whole=True)
    if rank == 0:
        assert greedy[0, [0, 1, 3, 4, 5, 7]].tolist() == [0, 0, 0, 50, 20, 0]
    case.params = [WARM]
    check(case, whole=True)


def test_edges_that_are_not_finite_never_win() -> None:
    case = make_case(8, (1, 2, 30), 32, 8, whole=True)
    assert case.successor is not None and case.gate is not None
    case.gate[:] = np.abs(case.gate) + 1
    best = step_scores(case.logits[0], case.edges(0), int(case.anchors[0]), 0, 8)[0]
    case.successor[best[:4]] = np.nan
    got = check(case, whole=True)
    assert got[0, 0] not in best[:4]
    case.successor[:] = np.nan  # nothing can win: the first candidate
    assert run_op(case)[0, 0] == best[0]


def test_lanes_and_leading_rows_alone() -> None:
    case = make_case(9, (3, 5, 500), 256, 12, whole=False)
    case.params = [WARM, GREEDY, WARM]
    together = run_op(case)
    np.testing.assert_array_equal(run_op(case, n_threads=3), together)
    for lane in range(3):
        for rows in range(1, 6):
            np.testing.assert_array_equal(run_op(case.lane(lane, rows))[0], together[lane, :rows])


@pytest.mark.parametrize("top_k", [0, 9, 10, 11, 13, 14, 15, 17, -1])
def test_other_top_ks_are_refused(top_k: int) -> None:
    with pytest.raises(Refused, match=f"^select: top_k {top_k} is not one of 1..8, 12, 16$"):
        run_op(make_case(1, (1, 1, 40), 32, top_k, whole=True))


@pytest.mark.parametrize("whole", [True, False])
def test_the_comparison_can_fail(whole: bool) -> None:
    """Walks that another anchor, seed, position, gate or codebook would give are told apart."""
    case = make_case(12, (8, 7, 300), 64, 8, whole)
    case.params = [WARM] * 8
    got = run_op(case)
    check_walks(case, got, whole)
    assert case.gate is not None and case.successor is not None
    for other in (
        replace(case, anchors=(case.anchors + 1) % 300),
        replace(case, params=[WARM.replaced(seed=1)] * 8),
        replace(case, base=case.base + 1),
        replace(case, gate=-case.gate),
        replace(case, successor=case.successor[::-1]),
    ):
        with pytest.raises(AssertionError):
            check_walks(other, got, whole)
