"""Prompts of the kinds people type, cut from documents: headers, headers with a docstring, beginnings of modules."""

from __future__ import annotations

import ast
import random
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer


def of_document(text: str, rng: random.Random, most: int) -> list[str]:
    """Up to ``most`` prompts from one module."""
    out: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return []
    lines = text.split("\n")
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    for node in rng.sample(nodes, min(len(nodes), most)):
        body = node.body[0]
        end = body.lineno - 1  # the header alone
        documented = (
            isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant) and isinstance(body.value.value, str)
        )
        if documented and rng.random() < 0.75:
            end = body.end_lineno or end
        elif body.lineno == node.lineno:
            continue
        elif rng.random() < 0.25:
            end = min(end + rng.randint(1, 4), node.end_lineno or end)  # and a few lines of the body
        cut = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
        if documented and rng.random() < 0.15:
            cut = "from typing import List\n\n\n" + cut
        out.append(cut + ("\n" if documented or rng.random() < 0.5 else ""))
    start = rng.choice(
        [0, 0, *[i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "import ", "from "))]]
    )
    out.append("\n".join(lines[start : start + rng.randint(1, 12)]) + "\n")
    return [p for p in out if len(p) >= 8]


def _job(job: tuple[list[str], Path, int, int, int]) -> list[list[int]]:
    documents, tokenizer, seed, most, limit = job
    tok = Tokenizer.from_file(str(tokenizer))
    rng = random.Random(seed)
    texts = [p for d in documents for p in of_document(d, rng, most)]
    ids = [e.ids for e in tok.encode_batch_fast(texts, add_special_tokens=False)]
    return [i[: rng.randint(limit // 2, limit)] for i in ids if i]


def build(documents: list[str], tokenizer: Path, seed: int, most: int, limit: int, jobs: int) -> list[list[int]]:
    """Token ids of prompts (at most ``limit`` each) from all documents, shuffled."""
    parts = [(documents[i :: 4 * jobs], tokenizer, seed + i, most, limit) for i in range(4 * jobs)]
    with ProcessPoolExecutor(jobs) as pool:
        prompts = [p for part in pool.map(_job, parts) for p in part]
    random.Random(seed).shuffle(prompts)
    return prompts
