"""The promise: the tokens of a request depend on the request alone.

    python tests/promise.py [--device NAME] [--tokens N] [--json FILE]

Every request of a fixed set (greedy, seeded, penalised) is run alone in plain steps; then all of them again for every
way of speculating and every number of lanes, submitted in random order, some of them while others run. Prints what
differs and how many requests ran, and ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyllama_dflash import Engine, Result, SamplingParams
from pyllama_dflash.pair_files import shipped

PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    '"""A small parser."""\n',
    "for i in range(10):\n    print(",
    "def mean(values):\n    return",
    "x",
    "import numpy as np\n\n\ndef softmax(x):\n    # numerically stable\n" * 8,
]
LANES = (1, 2, 3, 4, 5, 6, 8)
WIDTHS = (("off", 1), ("on", 8), ("adaptive", None))


@dataclass(frozen=True)
class Request:
    """A prompt and how its text is drawn."""

    prompt: str
    params: SamplingParams


def requests(tokens: int) -> list[Request]:
    """Each prompt greedy, seeded, and seeded with penalties and a bias; lengths differ."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        length = tokens - 3 * (i % 4)
        seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=100 + i, max_tokens=length, ignore_eos=True)
        found += [
            Request(prompt, SamplingParams(max_tokens=length, ignore_eos=True)),
            Request(prompt, seeded),
            Request(
                prompt,
                seeded.replaced(repetition_penalty=1.2, presence_penalty=0.3, logit_bias={20 + i: 2.0}, top_k=40),
            ),
        ]
    return found


def digest(result: Result) -> str:
    """Of the complete output: tokens, text and why it ended."""
    whole = json.dumps([result.tokens, result.text, result.finish_reason])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def alone(files: Sequence[Path], wanted: Sequence[Request], **options: object) -> list[str]:
    """The digest of each request run by itself, in plain steps, by an engine without a draft."""
    with Engine.load(files[0], lanes=1, **options) as engine:
        return [digest(engine.generate(r.prompt, r.params)) for r in wanted]


def together(engine: Engine, wanted: Sequence[Request], width: int | None, rng: random.Random) -> list[str]:
    """The digests of all requests submitted in random order: first some, others behind a chunk of one before."""
    order = rng.sample(range(len(wanted)), len(wanted))
    handles = {}
    chunks: Iterator[object] = iter(())
    for n, i in enumerate(order):
        if n > engine.lanes and rng.random() < 0.5:
            next(chunks, None)
        handles[i] = engine.submit(wanted[i].prompt, wanted[i].params.replaced(width=width))
        if rng.random() < 0.3:
            chunks = iter(handles[i])
    return [digest(handles[i].result()) for i in range(len(wanted))]


@dataclass
class Report:
    """What was run and what differed: (speculation, lanes, index of the request)."""

    requests: int
    seconds: float
    differing: list[tuple[str, int, int]]


def check(files: Sequence[Path], tokens: int, lanes: Sequence[int] = LANES, seed: int = 0, **options: object) -> Report:
    """All ways of speculating and all numbers of lanes."""
    wanted, rng, start = requests(tokens), random.Random(seed), time.perf_counter()
    expected, count, differing = alone(files, wanted, **options), len(wanted), []
    for n in lanes:
        with Engine.load(*files, lanes=n, **options) as engine:
            for name, width in WIDTHS:
                found = together(engine, wanted, width, rng)
                count += len(found)
                differing += [
                    (name, n, i) for i, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1
                ]
    return Report(count, time.perf_counter() - start, differing)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--json")
    args = parser.parse_args()
    report = check(shipped(), args.tokens, device=args.device, n_ctx=512, kv_type=args.kv_type)
    print(f"{report.requests} requests in {report.seconds:.1f} s, {len(report.differing)} differ")
    for name, lanes, i in report.differing:
        print(f"  speculation {name}, {lanes} lanes: request {i}")
    if args.json:
        Path(args.json).write_text(json.dumps(dataclasses.asdict(report)))
    return bool(report.differing)


if __name__ == "__main__":
    sys.exit(main())
