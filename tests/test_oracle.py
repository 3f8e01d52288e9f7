"""Whole models against the vendored libllama running the same files: logits, proposals, greedy text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
import pytest
from tiny_pair import TinyPair

from pyllama_dflash.batch import LaneRows
from pyllama_dflash.cache import LaneCache
from pyllama_dflash.ggml import Type
from pyllama_dflash.loader import Loaded, load
from pyllama_dflash.pair_files import shipped
from pyllama_dflash.round import Round

LENGTHS = [1, 2, 7, 8, 9, 63, 500, 2100]
NMSE = 1e-6  # both sides quantise activations to 8 bits: a last-bit difference may move one step of one element
ROUNDS = 200
CONTEXT = 2304


@dataclass
class Runner:
    """A loaded pair and one lane, driven with given tokens."""

    target: str
    draft: str
    loaded: Loaded

    def __post_init__(self) -> None:
        m = self.loaded.models
        self.cache = LaneCache(
            self.loaded.backend, m.target, m.draft, n_ctx=CONTEXT, slots=1, block=m.block, piece=256, kv_type=Type.F32
        )
        self.round = Round(self.loaded.backend, m, self.cache)

    @property
    def n_vocab(self) -> int:
        return self.loaded.models.target.n_vocab

    def start(self) -> None:
        self.cache.release(0)
        self.cache.open(0, CONTEXT)

    def prefill(self, tokens, start: int = 0) -> None:
        for at in range(start, len(tokens), 256):
            piece = tokens[at : min(at + 256, len(tokens))]
            self.round.advance([LaneRows(0, at, piece)], max(8, 1 << (len(piece) - 1).bit_length()))

    def logits(self, tokens) -> np.ndarray:
        """Teacher-forced logits of the last block's rows, the rest by prefill."""
        self.start()
        rows = min(len(tokens), self.loaded.models.block)
        self.prefill(tokens[: len(tokens) - rows])
        (out,) = self.round.verify([LaneRows(0, len(tokens) - rows, tokens[len(tokens) - rows :])])
        return out

    def close(self) -> None:
        self.round.close()
        self.cache.close()
        self.loaded.resources.close()


@pytest.fixture(scope="module", params=["f32", "iq4_xs", "dflash1", "shipped"])
def runner(request, tmp_path_factory):
    if request.param == "shipped":
        target, draft = shipped()
    else:
        shapes = {
            "f32": TinyPair(matrices="F32", embedding="F32", head="F32", draft_matrices="F32", codebooks="F32"),
            "iq4_xs": TinyPair(seed=3, matrices="IQ4_XS", head="Q6_K", state_size=128, recurrent="bool", tied=False),
            "dflash1": TinyPair(seed=4, dflash2=False, matrices="Q4_K", tied=True, draft_matrices="Q8_0"),
        }
        target, draft = shapes[request.param].write(tmp_path_factory.mktemp(request.param))
    made = Runner(str(target), str(draft), load(target, draft, "cpu", 2, False))
    yield made
    made.close()


def tokens_of(runner: Runner, n: int, seed: int) -> list[int]:
    """Seeded tokens; random ones are as good as text for comparing arithmetic."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, min(runner.n_vocab, 8000), n)]


def nmse(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.sum((ours - theirs) ** 2, dtype=np.float64) / np.sum(theirs**2, dtype=np.float64))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(runner, length):
    tokens = tokens_of(runner, length, length)
    ours = runner.logits(tokens)
    theirs = oracle.logits(runner.target, tokens, last=len(ours))
    assert nmse(ours, theirs) <= NMSE


def test_logits_of_every_row(runner):
    tokens, block = tokens_of(runner, 63, 5), runner.loaded.models.block
    runner.start()
    rows = []
    for base in range(0, len(tokens), block):
        part = tokens[base : base + block]
        rows.append(runner.round.verify([LaneRows(0, base, part)])[0])
        runner.round.accept(0, len(part))
    assert nmse(np.concatenate(rows), oracle.logits(runner.target, tokens)) <= NMSE


def test_proposals(runner):
    """Candidates, scores and walk of 200 blocks at different positions, each behind exactly its own history."""
    tokens = tokens_of(runner, ROUNDS + 30, 11)
    anchors = list(range(20, 20 + ROUNDS))
    ids, scores = oracle.rounds(runner.target, runner.draft, tokens, anchors)
    runner.start()
    runner.prefill(tokens[: anchors[0]])
    differing = 0
    for r, n in enumerate(anchors):
        (ours,) = runner.round.propose([0], [n], [tokens[n]])
        if ids.shape[-1] == 1:
            differing += compare_best(ours, ids[r, :, 0])
        else:
            differing += compare_lattice(ours, ids[r], scores[r])
        runner.round.verify([LaneRows(0, n, [tokens[n]])])
        runner.round.accept(0, 1)
    assert differing <= ROUNDS // 50, f"{differing} of {ROUNDS} walks differ, ties aside"


def compare_best(ours, best) -> int:
    """Without a selector: each row's best candidate is the oracle's, or as good as it."""
    rows = np.concatenate([ours.first[None], ours.edges[:, 0]])
    differs = 0
    for ids, unary, token in zip(ours.ids, rows, best, strict=True):
        assert token in ids
        gap = unary.max() - unary[ids == token][0]
        differs |= gap > tie(unary)
    return int(differs)


def compare_lattice(ours, ids, scores) -> int:
    """1 if the walks part where the scores leave no doubt. Scores are compared candidate by candidate."""
    walked, best, theirs_best = [], 0, 0
    for t in range(len(ids)):
        mine, other = ours.first if t == 0 else ours.edges[t - 1, best], scores[t, theirs_best]
        common = [(int(np.flatnonzero(ours.ids[t] == i)[0]), j) for j, i in enumerate(ids[t]) if i in ours.ids[t]]
        assert len(common) >= len(ids[t]) - 2, "candidates differ in more than the last places"
        a, b = np.array([mine[i] for i, _ in common]), np.array([other[j] for _, j in common])
        assert nmse(a, b) < 1e-4
        best, theirs_best = int(np.argmax(mine)), int(np.argmax(other))
        if ours.ids[t, best] != ids[t, theirs_best]:
            top = np.sort(other)[-2:]
            return int(top[1] - top[0] > tie(other))
        walked.append(best)
    return 0


def tie(scores: np.ndarray) -> float:
    """Two scores closer than this are as good as equal: the rounding of 8-bit activations."""
    return 2e-3 * float(np.abs(scores).max())


def test_greedy_text(runner):
    """Our greedy tokens are libllama's, but for places where its two best logits nearly tie."""
    from pyllama_dflash import Engine

    prompts = [tokens_of(runner, n, 100 + n) for n in (3, 17, 40)]
    theirs, margins = oracle.greedy_all(runner.target, prompts, 48, kv="f16")
    with Engine.load(runner.target, runner.draft, device="cpu", n_ctx=256) as engine:
        for prompt, expected, margin in zip(prompts, theirs, margins, strict=True):
            ours = engine.generate(prompt, max_tokens=48, ignore_eos=True).tokens
            parted = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b), None)
            assert parted is None or margin[parted] < 0.02, f"parted at {parted}, margin {margin[parted]}"
