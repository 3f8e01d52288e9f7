"""Who runs next, decided on real caches without computing anything; pages, widths and what rounds cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from engine_model import BLOCK, PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_dflash import RequestError, SamplingParams
from pyllama_dflash.cache import LaneCache
from pyllama_dflash.ggml import Backend, Type, choose_device
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.lanes import Lane
from pyllama_dflash.models.qwen35 import Qwen35Params
from pyllama_dflash.pages import PagePool, finishes, pages_for
from pyllama_dflash.scheduler import PIECE, Scheduler
from pyllama_dflash.tokenizer import Tokenizer
from pyllama_dflash.width import Acceptance, Costs, common_width, widths_of
from pyllama_dflash.worker import bucket

N_CTX = 600


class Bare:
    """Schedulers over real caches of the CPU, and lanes to schedule; nothing is computed."""

    def __init__(self, path) -> None:
        self.tokenizer = Tokenizer(path)
        self._backend = Backend(choose_device("cpu")[0], threads=1)
        with GGUFFile(path) as file:
            self._params = Qwen35Params.from_file(file)
        self._caches: list[LaneCache] = []

    def scheduler(self, slots: int, pages: int) -> tuple[Scheduler, LaneCache]:
        cache = LaneCache(
            self._backend, self._params, None, n_ctx=N_CTX, slots=slots, block=BLOCK, piece=PIECE, kv_type=Type.F16,
            pool=16 * pages,
        )  # fmt: skip
        self._caches.append(cache)
        return Scheduler(cache, BLOCK), cache

    def lane(self, prompt: int, max_tokens: int, width: int | None = None) -> Lane:
        params = SamplingParams(max_tokens=max_tokens, width=width, ignore_eos=True)
        return Lane([1] * prompt, params, N_CTX, self.tokenizer)

    def forget(self) -> None:
        while self._caches:
            self._caches.pop().close()

    def close(self) -> None:
        self.forget()
        self._backend.close()
        self.tokenizer.close()


@pytest.fixture(scope="module")
def module_bare(tmp_path_factory) -> Iterator[Bare]:
    made = Bare(PAIRS["often"].write(tmp_path_factory.mktemp("bare"))[0])
    yield made
    made.close()


@pytest.fixture
def bare(module_bare) -> Iterator[Bare]:
    yield module_bare
    module_bare.forget()


# -- pages ---------------------------------------------------------------------------------------------------------


@given(st.integers(-2, 12), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5))
@settings(max_examples=500, deadline=None)
def test_finishes_is_whether_some_order_works(free, lanes):
    lanes = [(held, held + more) for held, more in lanes]

    def works(order) -> bool:
        left = free
        for held, need in order:
            if need - held > left:
                return False
            left += held
        return left >= 0

    assert finishes(free, lanes) == any(works(order) for order in itertools.permutations(lanes))


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (600, 38)])
def test_pages_for(positions, pages):
    assert pages_for(positions) == pages


def test_a_pool_gives_the_lowest_pages_or_none():
    pool = PagePool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.give([1])
    with pytest.raises(RequestError) as caught:
        pool.take(3)
    assert str(caught.value) == "cache pages: 3 given; expected 2 free of 4"
    assert (pool.free, pool.take(2), pool.free) == (2, [1, 3], 0)


# -- lanes ---------------------------------------------------------------------------------------------------------


def play(scheduler: Scheduler, cache: LaneCache, seed: int) -> int:
    """Run all lanes to their ends as a worker would, with made-up tokens. Steps taken."""
    draw = random.Random(seed)
    for step in itertools.count():
        while scheduler.next_admitted() is not None:
            pass
        if not scheduler.lanes:
            return step
        found, moved = scheduler.next_piece(), 0
        if found is not None:
            lane, item = found
            assert item.base == lane.base and item.rows <= PIECE and lane.base + item.rows <= lane.prompt_tokens - 1
            assert 16 * cache.held(lane.slot) >= lane.base + item.rows
            lane.base += item.rows
            moved += item.rows
        for lane, item in scheduler.next_round():
            assert item.base == lane.base and 1 <= item.rows <= min(BLOCK, lane.params.width or BLOCK)
            assert 16 * cache.held(lane.slot) >= lane.base + item.rows <= N_CTX
            lane.take([2] * draw.randint(1, item.rows), item.rows)
            moved += 1
            if lane.finish is not None:
                scheduler.retire(lane)
        assert moved, "nobody moves"
    raise AssertionError


wanted = st.tuples(st.integers(1, N_CTX - 1), st.integers(1, N_CTX), st.sampled_from((None, 1, 2, 8, 16)))


@given(st.integers(1, 5), st.integers(1, 90), st.lists(wanted, min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_everybody_finishes_whatever_the_pool(module_bare, slots, pages, requests, seed):
    scheduler, cache = module_bare.scheduler(slots, min(pages, 38 * slots))
    for prompt, max_tokens, width in requests:
        lane = module_bare.lane(prompt, max_tokens, width)
        if pages_for(min(N_CTX, prompt + max_tokens + BLOCK)) > cache.pool.pages:
            with pytest.raises(RequestError, match=r"the whole pool$"):
                scheduler.check(lane)
        else:
            scheduler.check(lane)
            scheduler.submit(lane)
    play(scheduler, cache, seed)
    assert cache.pool.free == cache.pool.pages and len(scheduler._slots) == slots
    module_bare.forget()


def test_admission_takes_the_lowest_slot_and_pages_for_prompt_and_block(bare):
    scheduler, cache = bare.scheduler(3, 114)
    lanes = [bare.lane(n, 500) for n in (9, 25, 599, 4)]
    for lane in lanes:
        scheduler.submit(lane)
    assert [scheduler.next_admitted() for _ in range(4)] == [*lanes[:3], None]
    assert [lane.slot for lane in lanes[:3]] == [0, 1, 2]
    assert [cache.held(slot) for slot in range(3)] == [2, 3, 38]
    scheduler.retire(lanes[1])
    assert scheduler.next_admitted() is lanes[3] and lanes[3].slot == 1 and cache.held(1) == 1
    scheduler.retire(lanes[1])  # not a second time
    assert [lane.slot for lane in scheduler.running] == [0, 2, 1] and not scheduler._slots


def test_a_lane_gets_no_page_that_another_needs_to_finish(bare):
    scheduler, cache = bare.scheduler(2, 8)
    first, second = bare.lane(8, 96), bare.lane(8, 96)  # 7 pages each
    for lane in (first, second):
        scheduler.submit(lane)
    assert [scheduler.next_admitted(), scheduler.next_admitted()] == [first, second]
    for lane in (first, second):
        lane.base, lane.acceptance = 16, Acceptance()
    assert [lane for lane, _ in scheduler.next_round()] == [first]
    assert (cache.held(first.slot), cache.held(second.slot)) == (2, 1)
    scheduler.retire(first)
    assert [lane for lane, _ in scheduler.next_round()] == [second]


def test_pieces_are_cut_at_multiples_and_come_in_order_of_admission(bare):
    scheduler, _ = bare.scheduler(2, 76)
    lanes = [bare.lane(520, 8), bare.lane(258, 8)]
    for lane in lanes:
        scheduler.submit(lane)
        scheduler.next_admitted()
    pieces = []
    while (found := scheduler.next_piece()) is not None:
        lane, item = found
        pieces.append((lanes.index(lane), item.base, item.rows))
        lane.base += item.rows
    assert pieces == [(0, 0, 256), (0, 256, 256), (0, 512, 7), (1, 0, 256), (1, 256, 1)]


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (8, 8), (9, 16), (16, 16), (129, 256), (256, 256)])
def test_prefill_graphs_are_few(rows, size):
    assert bucket(rows) == size


# -- widths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "widths"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (16, (1, 2, 4, 8, 16))]
)
def test_widths(block, widths):
    assert widths_of(block) == widths


def test_costs_are_medians_without_the_first_runs():
    costs, widths = Costs(), (1, 2, 4, 8)
    assert costs.of(1, widths) == {1: 1, 2: 1, 4: 1, 8: 1}
    for seconds in (90, 80, 2, 1, 3):  # the first two warm up
        costs.note(2, 1, seconds)
    for seconds in (50, 60, 6, 5, 100):
        costs.note(2, 4, seconds)
    for lanes in (1, 2, 8):  # what was never measured costs what the next narrower does, of the nearest lanes
        assert costs.of(lanes, widths) == {1: 1, 2: 1, 4: 3, 8: 3}
    for seconds in (0, 0, 12):
        costs.note(3, 1, seconds)
        costs.note(3, 2, 1.5 * seconds)
    for lanes in (2, 3):  # each width of the nearest lanes that it was measured of
        assert costs.of(lanes, widths) == {1: 1, 2: 1.5, 4: 3, 8: 3}
    for seconds in range(20, 29):  # old ones are forgotten, and nothing is cheaper than a plain step
        costs.note(2, 1, seconds)
    assert costs.of(2, widths) == {1: 1, 2: 1.5, 4: 1, 8: 1}


def test_the_choice_is_the_most_tokens_for_the_time():
    costs = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.5}
    lane = Acceptance()
    for final, best in ((8, 8), (3, 4), (1, 1)):
        for _ in range(60):
            lane.note(8, final)
        expected = {w: sum(lane.rate**i for i in range(w)) / cost for w, cost in costs.items()}
        assert lane.wish(costs) == max(expected, key=expected.__getitem__) == best
        assert lane.wish({1: 1.0}) == 1
    assert lane.rate == pytest.approx(0, abs=1e-2)


def test_rate_is_accepted_of_tried():
    lane = Acceptance()
    assert lane.rate == 0.75
    lane.note(8, 3)  # two accepted, a third tried
    assert lane.rate == pytest.approx((0.9 * 3 + 2) / (0.9 * 4 + 3))
    lane.note(8, 8)  # seven accepted, none rejected
    assert lane.rate == pytest.approx((0.81 * 3 + 0.9 * 2 + 7) / (0.81 * 4 + 0.9 * 3 + 7))
    before = lane.rate
    lane.note(1, 1)
    assert lane.rate == before


def test_plain_lanes_try_again_less_and_less_often():
    """A lane whose proposals are never accepted: the plain rounds between two that speculate."""
    lane, rows = Acceptance(), []
    for _ in range(2000):
        rows.append(2 if lane.due else 1)
        lane.note(rows[-1], 1)
    waits = [len(list(group)) for wide, group in itertools.groupby(rows, lambda r: r > 1) if not wide][:-1]
    assert waits == [4, 8, 16, 32, 64, *[128] * (len(waits) - 5)] and len(waits) > 10
    for wait in (64, 32, 16, 8, 4, 4):  # proposals are accepted again, and it tries sooner
        lane.note(2, 2)
        for _ in range(wait):
            assert not lane.due
            lane.note(1, 1)
        assert lane.due


def rated(rate: float) -> Acceptance:
    """A lane of which about that share was accepted lately."""
    lane = Acceptance()
    for _ in range(200):
        for final in (8, 1):
            if final == 1 or rate > 0:
                lane.note(8, 8 if rate == 1 else final)
    return lane


def test_a_round_is_as_wide_as_pays_for_all_its_lanes():
    good, bad = rated(1), rated(0)
    costs = {1: 1.0, 2: 1.3, 4: 1.6, 8: 2.2}
    assert common_width([(good, 8)], 1, costs) == 8 and common_width([(bad, 1)], 1, costs) == 1
    assert common_width([(good, 8), (bad, 1)], 1, costs) == 8  # 8 + 1 tokens in 2.2 against 2 in 1
    assert common_width([(good, 8), *[(bad, 1)] * 7], 1, costs) == 1  # 15 in 2.2 against 8 in 1
    assert common_width([(good, 8), *[(bad, 1)] * 7], 3, costs) == 4  # somebody asked for three: 11 in 1.6, 15 in 2.2
    assert common_width([(bad, 1)], 16, costs) == 8
