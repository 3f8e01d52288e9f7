"""Whole models against the vendored libllama running the same files: logits, proposals, greedy text.

Matrices in quantised files are multiplied by activations rounded to 8 bits. One last-bit difference in front of such a
rounding moves a whole step, and a trained network amplifies it: upstream differs from itself (tiled matmul on or off,
keys and values in F16 or F32) by 1e-4 and more. So arithmetic is held to 1e-6 on files whose tensors are F32 (tiny
ones, and the shipped pair written out in F32), and quantised files to being nearer to that than upstream is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import oracle
import pytest
from dequantised import write_f32
from refusing import DECISIONS, lattices_of, logits_of, refused
from tiny_pair import TinyPair

from pyllama_dflash import Engine
from pyllama_dflash.cache import LaneCache
from pyllama_dflash.ggml import Type
from pyllama_dflash.lane_rows import GREEDY, LaneRows
from pyllama_dflash.loader import Loaded, load
from pyllama_dflash.pair_files import shipped
from pyllama_dflash.round import Round

LENGTHS = [1, 2, 7, 8, 9, 63, 500, 2100]
NMSE = 1e-6
ROUNDS = 200
CONTEXT = 2304
EXACT = ["tiny-f32", "tiny-f32-dflash1", "shipped-f32"]
QUANTISED = ["tiny-iq4_xs", "shipped"]


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

    def start(self, tokens) -> None:
        """A new request that will be given `tokens`."""
        self.cache.release(0)
        self.cache.open(0, tokens, GREEDY)
        self.cache.grow(0, CONTEXT)

    def prefill(self, n: int) -> None:
        """Compute the first `n` tokens."""
        for at in range(0, n, 256):
            rows = min(256, n - at)
            self.round.advance(LaneRows(0, at, rows), max(8, 1 << (rows - 1).bit_length()))

    def final(self, tokens) -> None:
        """These tokens' rows, the last that were computed, are final."""
        self.cache.recurrent.set_pending(0, len(tokens))
        self.cache.history.set_base(0, int(self.cache.history.bases[0]) + len(tokens))

    def logits(self, tokens) -> np.ndarray:
        """Teacher-forced logits of the last block's rows, the rest by prefill."""
        self.start(tokens)
        first = len(tokens) - min(len(tokens), self.loaded.models.block)
        self.prefill(first)
        return logits_of(self.round, 0, first, tokens[first:])

    def close(self) -> None:
        self.round.close()
        self.cache.close()
        self.loaded.resources.close()


def files(name: str, folder) -> tuple[str, str]:
    f32 = {"matrices": "F32", "embedding": "F32", "head": "F32", "draft_matrices": "F32", "codebooks": "F32"}
    tiny = {
        "tiny-f32": TinyPair(**f32),
        "tiny-f32-dflash1": TinyPair(seed=4, dflash2=False, tied=True, mtp=True, **f32),
        "tiny-iq4_xs": TinyPair(seed=3, matrices="IQ4_XS", head="Q6_K", state_size=128, recurrent="bool"),
    }
    if name in tiny:
        return tuple(map(str, tiny[name].write(folder)))
    pair = shipped()
    if name == "shipped-f32":
        pair = tuple(write_f32(path, folder / path.name) for path in pair)
    return tuple(map(str, pair))


@pytest.fixture(scope="module")
def runner(request, tmp_path_factory):
    target, draft = files(request.param, tmp_path_factory.mktemp(request.param))
    with refused(*DECISIONS):  # logits and scores are compared, not what is made of them
        made = Runner(target, draft, load(target, draft, "cpu", None, False))
    yield made
    made.close()


exact = pytest.mark.parametrize("runner", EXACT, indirect=True)
quantised = pytest.mark.parametrize("runner", QUANTISED, indirect=True)


def tokens_of(runner: Runner, n: int, seed: int) -> list[int]:
    """Seeded tokens; random ones are as good as text for comparing arithmetic."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, min(runner.n_vocab, 8000), n)]


def nmse(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.sum((ours - theirs) ** 2, dtype=np.float64) / np.sum(theirs**2, dtype=np.float64))


@exact
@pytest.mark.parametrize("length", LENGTHS)
def test_logits(runner, length):
    tokens = tokens_of(runner, length, length)
    ours = runner.logits(tokens)
    assert nmse(ours, oracle.logits(runner.target, tokens, last=len(ours))) <= NMSE


@quantised
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_quantised_files(runner, length, tmp_path):
    """Ours (12-bit activations) are nearer to the weights' exact logits than upstream's (8-bit) are."""
    tokens = tokens_of(runner, length, length)
    ours = runner.logits(tokens)
    exact = oracle.logits(write_f32(Path(runner.target), tmp_path / "exact.gguf"), tokens, last=len(ours))
    assert nmse(ours, exact) <= max(NMSE, 0.1 * nmse(oracle.logits(runner.target, tokens, last=len(ours)), exact))


@exact
def test_logits_of_every_row(runner):
    tokens, block = tokens_of(runner, 63, 5), runner.loaded.models.block
    runner.start(tokens)
    rows = []
    for base in range(0, len(tokens), block):
        part = tokens[base : base + block]
        rows.append(logits_of(runner.round, 0, base, part))
        runner.final(part)
    assert nmse(np.concatenate(rows), oracle.logits(runner.target, tokens)) <= NMSE


@exact
def test_proposals(runner):
    """Candidates, scores and walks of 200 blocks, each behind exactly its own history."""
    tokens, anchors = block_starts(runner)
    assert differing(runner, tokens, anchors, oracle.rounds(runner.target, runner.draft, tokens, anchors)) == 0


@quantised
def test_proposals_of_quantised_files(runner):
    tokens, anchors = block_starts(runner)
    theirs = oracle.rounds(runner.target, runner.draft, tokens, anchors)
    other = oracle.rounds(runner.target, runner.draft, tokens, anchors, kv="f16", tiled=True)
    apart = int(np.sum(np.any(oracle.walk(*theirs) != oracle.walk(*other), axis=1)))
    assert differing(runner, tokens, anchors, theirs) <= 4 + 2 * apart


@exact
def test_greedy_text(runner):
    for parted, margin in compare_greedy(runner):
        assert parted is None or margin < 1e-3


@quantised
def test_greedy_text_of_quantised_files(runner):
    """Tokens part only where libllama's two best logits are closer than the noise of 8-bit activations."""
    for parted, margin in compare_greedy(runner):
        assert parted is None or margin < 0.5


def block_starts(runner: Runner) -> tuple[list[int], list[int]]:
    return tokens_of(runner, ROUNDS + 30, 11), list(range(20, 20 + ROUNDS))


def differing(runner: Runner, tokens, anchors, theirs) -> int:
    """How many walks part from the oracle's at a place that is no tie."""
    ids, scores = theirs
    runner.start(tokens)
    runner.prefill(anchors[0])
    count = 0
    for r, n in enumerate(anchors):
        (ours,) = lattices_of(runner.round, [LaneRows(0, n, runner.loaded.models.block)])
        if ids.shape[-1] == 1:
            count += parts_from_best(ours, ids[r, :, 0])
        else:
            count += parts_from_walk(ours, ids[r], scores[r])
        logits_of(runner.round, 0, n, tokens[n : n + 1])
        runner.final(tokens[n : n + 1])
    return count


def parts_from_best(ours, best) -> bool:
    """Without a selector a row's best candidate is the oracle's, or as good."""
    rows = [ours.first, *ours.edges[:, 0]]
    return any(
        token not in ids or unary.max() - unary[ids == token][0] > tie(unary)
        for ids, unary, token in zip(ours.ids, rows, best, strict=True)
    )


def parts_from_walk(ours, ids, scores) -> bool:
    """Row by row along the oracle's walk: the same best candidate behind the same predecessor, or as good."""
    mine = theirs = 0
    for t in range(len(ids)):
        a, b = ours.first if t == 0 else ours.edges[t - 1, mine], scores[t, theirs]
        theirs = int(np.argmax(b))
        token = ids[t, theirs]
        if token not in ours.ids[t]:
            return True
        mine = int(np.flatnonzero(ours.ids[t] == token)[0])
        if a.max() - a[mine] > tie(b):
            return True
    return False


def tie(scores: np.ndarray) -> float:
    """Two scores closer than this are as good as equal in F32."""
    return 1e-5 * float(np.abs(scores).max())


def compare_greedy(runner: Runner) -> list[tuple[int | None, float]]:
    """Where our greedy tokens part from libllama's, and the oracle's margin between its two best logits there."""
    prompts = [tokens_of(runner, n, 100 + n) for n in (3, 17, 40)]
    theirs, margins = oracle.greedy_all(runner.target, prompts, 48, kv="f32")
    found = []
    with Engine.load(runner.target, runner.draft, device="cpu", n_ctx=256, kv_type="f32") as engine:
        for prompt, expected, margin in zip(prompts, theirs, margins, strict=True):
            ours = engine.generate(prompt, max_tokens=48, ignore_eos=True, width=16).tokens
            parted = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b), None)
            found.append((parted, 0.0 if parted is None else float(margin[parted])))
    return found
