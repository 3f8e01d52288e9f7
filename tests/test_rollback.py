"""Rollback: whatever is rejected leaves no trace. States are compared bit for bit with a lane that never speculated.

What counts is decided here, not by the pair: `sample` and `accept` are refused. Once with the other kernels, once with
all ops composed.
"""

from __future__ import annotations

import numpy as np
import pytest
from refusing import DECISIONS, FAMILY, lattices_of, logits_of, refused

from pyllama_dflash import family
from pyllama_dflash.batch import Batch
from pyllama_dflash.cache import LaneCache
from pyllama_dflash.ggml import Graph, Type
from pyllama_dflash.lane_rows import GREEDY, LaneRows
from pyllama_dflash.loader import load
from pyllama_dflash.round import Round

PROMPT = [5, 17, 300, 42, 8, 99, 123, 250, 77, 31, 6]
BLOCK = 8
GARBAGE = [1, 2, 3, 4, 5, 6, 7]
NEXT = [11, 222, 33, 144, 55, 66, 177, 88, 9, 10, 211, 12, 13, 214, 15, 16, 117, 18, 19, 120, 21, 22, 23, 124]


@pytest.fixture(scope="module", params=[DECISIONS, FAMILY], ids=["kernels", "composed"])
def models(tiny_pair, request):
    with refused(*request.param):
        loaded = load(tiny_pair.target, tiny_pair.draft, "cpu", 1, False)
    yield loaded
    loaded.resources.close()


class Lane:
    """A slot with its own caches, driven row by row."""

    def __init__(self, loaded) -> None:
        m = loaded.models
        self.cache = LaneCache(
            loaded.backend, m.target, m.draft, n_ctx=256, slots=2, block=BLOCK, piece=256, kv_type=Type.F16
        )
        self.round = Round(loaded.backend, m, self.cache)
        self.backend = loaded.backend
        self.slot = 1
        self.cache.open(self.slot, PROMPT, GREEDY)
        self.cache.grow(self.slot, 256)
        self.advance(PROMPT, 16)

    @property
    def base(self) -> int:
        """Position of the next row, as the device has it."""
        base = int(self.cache.history.base.get().ravel()[self.slot])
        assert base == self.cache.history.bases[self.slot]
        return base

    def advance(self, tokens, rows: int) -> None:
        self.cache.history.put(self.slot, self.base, tokens)
        self.round.advance(LaneRows(self.slot, self.base, len(tokens)), rows)

    def verify(self, tokens):
        return logits_of(self.round, self.slot, self.base, tokens)

    def accept(self, rows: int) -> None:
        self.cache.recurrent.set_pending(self.slot, rows)
        self.cache.history.set_base(self.slot, self.base + rows)

    def settled(self) -> list[np.ndarray]:
        """The slot's states and windows with everything pending promoted (and nothing pending afterwards)."""
        r = self.cache.recurrent
        with Graph(self.backend) as g:
            batch = Batch.of(g, self.cache, 1, 1)
            for i in r.state:
                family.gdn_commit(g, batch, r, i)
                family.conv_commit(g, batch, r, i, 4)
            g.build()
            batch.fill([LaneRows(self.slot, 0, 0)], self.cache.slots)
            g.run()
        r.set_pending(self.slot, 0)
        return [t.get()[self.slot] for t in r.state.values()] + [
            t.get().reshape(2, -1, t.shape[0])[self.slot, :3] for t in r.rows.values()
        ]

    def close(self) -> None:
        self.round.close()
        self.cache.close()


@pytest.fixture
def lanes(models):
    made = [Lane(models), Lane(models)]
    yield made
    for lane in made:
        lane.close()


def plain(lane: Lane, tokens) -> np.ndarray:
    """Logits of single rows, each final."""
    rows = []
    for token in tokens:
        rows.append(lane.verify([token])[0])
        lane.accept(1)
    return np.stack(rows)


def block(lane: Lane, good, rows: int) -> np.ndarray:
    """A block whose first `rows` rows are `good` and final, the rest garbage and rejected."""
    logits = lane.verify([*good[:rows], *GARBAGE][:BLOCK])
    lane.accept(rows)
    return logits[:rows]


@pytest.mark.parametrize("rows", range(BLOCK + 1))
def test_state_after_each_accepted_length(lanes, rows):
    speculating, reference = lanes
    got = block(speculating, NEXT, rows)
    if rows:
        assert np.array_equal(got, plain(reference, NEXT[:rows]))
    for a, b in zip(speculating.settled(), reference.settled(), strict=True):
        assert np.array_equal(a, b)
    follow = NEXT[rows]
    assert np.array_equal(speculating.verify([follow]), reference.verify([follow]))


@pytest.mark.parametrize("first", [1, 3, 8])
@pytest.mark.parametrize("second", [0, 1, 5, 8])
def test_twice_in_a_row(lanes, first, second):
    speculating, reference = lanes
    block(speculating, NEXT, first)
    block(speculating, NEXT[first:], second)
    plain(reference, NEXT[: first + second])
    follow = NEXT[first + second]
    assert np.array_equal(speculating.verify([follow]), reference.verify([follow]))
    for a, b in zip(speculating.settled(), reference.settled(), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("first", [1, 4, 8])
def test_through_a_plain_step(lanes, first):
    speculating, reference = lanes
    block(speculating, NEXT, first)
    plain(speculating, NEXT[first : first + 1])
    block(speculating, NEXT[first + 1 :], 3)
    plain(reference, NEXT[: first + 4])
    for a, b in zip(speculating.settled(), reference.settled(), strict=True):
        assert np.array_equal(a, b)


def test_prefill_uses_up_pending_rows(lanes):
    speculating, reference = lanes
    block(speculating, NEXT, 5)
    speculating.advance(NEXT[5:12], 8)
    plain(reference, NEXT[:12])
    for a, b in zip(speculating.settled(), reference.settled(), strict=True):
        assert np.array_equal(a, b)


def test_pieces_do_not_change_the_state(models):
    whole, cut = Lane(models), Lane(models)
    whole.advance(NEXT[:20], 32)
    cut.advance(NEXT[:7], 8)
    cut.advance(NEXT[7:20], 16)
    for a, b in zip(whole.settled(), cut.settled(), strict=True):
        assert np.array_equal(a, b)
    assert whole.base == cut.base == len(PROMPT) + 20
    assert np.array_equal(whole.verify(NEXT[:8]), cut.verify(NEXT[:8]))
    whole.close()
    cut.close()


def test_draft_ring_forgets_rejected_rows(lanes):
    """Proposals depend on accepted tokens only, whatever was rejected at the same positions before."""
    a, b = lanes
    block(a, NEXT, 3)
    b.verify([*NEXT[:3], 400, 401, 402, 403, 404])
    b.accept(3)
    for lane in lanes:
        lane.cache.history.put(lane.slot, lane.base, [NEXT[3]])
    (one,), (two,) = (lattices_of(lane.round, [LaneRows(lane.slot, lane.base, BLOCK)]) for lane in lanes)
    for x, y in ((one.ids, two.ids), (one.first, two.first), (one.edges, two.edges)):
        assert np.array_equal(x, y)


def test_clearing_a_slot_leaves_its_neighbour_alone(models):
    lane = Lane(models)
    before = lane.settled()
    lane.cache.open(0, NEXT, GREEDY)
    lane.cache.grow(0, 16)
    lane.cache.recurrent.clear(0)
    lane.cache.release(0)
    for x, y in zip(before, lane.settled(), strict=True):
        assert np.array_equal(x, y)
    lane.close()
