"""The soak: one engine serves thousands of requests, and is at the end what it was at the beginning.

    python tests/soak.py [--requests N] [--device NAME] [--seed N] [--markdown FILE]

Ten passes over the same requests of mixed length, seed and way of drawing, shuffled anew each time and sent in waves of
1 to 12 at once to an engine of 8 lanes; one in ten is cancelled while it runs. Counts errors, empty replies and outputs
that are not what they were before; says how memory and speed of the last pass stand to those of the first ones.
Ends with 1 if anything of that is not as it should be.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from promise import PROMPTS, Request, digest
from resident import resident

from pyllama_dflash import DflashError, Engine, SamplingParams
from pyllama_dflash.handle import Handle
from pyllama_dflash.pair_files import shipped

PASSES = 10
WAVES = (1, 2, 3, 4, 5, 6, 8, 12)
CANCELLED = 10
"""One request in so many is cancelled, another one in each pass."""
WARM_UP = 2
"""Passes after which as many graphs are kept as ever, so that memory counts from there."""
MOST_GROWTH = 8 << 20
LEAST_SPEED = 0.8
"""Of the first pass, the machine's own drift taken out; the rest is for the neighbours' use of its caches."""
_MMAP_THRESHOLD = -3


def requests(n: int, seed: int) -> list[Request]:
    """`n` requests, each another."""
    draw, found = random.Random(seed), []
    for i in range(n):
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.0, 0.6, 1.0)), top_p=draw.choice((1.0, 0.95)), top_k=draw.choice((0, 40)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.2)), logit_bias=draw.choice(({}, {}, {20 + i % 50: 2.0})),
            seed=i, max_tokens=draw.choice((1, 2, 8, 16, 24, 32, 48)), width=draw.choice((None, None, 1, 3, 8)),
            ignore_eos=True,
        )  # fmt: skip
        found.append(Request(draw.choice(PROMPTS) * draw.choice((1, 1, 2, 5)), params))
    return found


@dataclass
class Soak:
    """What was seen so far. `speeds`: of each pass tokens a second by `clock`; `machine`: how often such a second ran a
    loop that has nothing to do with the engine; `memory`: bytes behind each pass, `graphs` those of them that retained
    graphs hold, which depend on the shapes that came last."""

    wanted: Sequence[Request]
    clock: Callable[[], float]
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    speeds: list[float] = field(default_factory=list)
    machine: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    _digests: dict[int, str] = field(default_factory=dict)
    _tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _cut: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def run(self, engine: Engine, seed: int, passes: int = PASSES) -> None:
        """All passes."""
        for number in range(passes):
            self._pass(engine, random.Random(f"{seed} {number}"), number)
        for i, tokens in self._cut:
            self.counts["differing"] += self._tokens[i][: len(tokens)] != tokens

    def _pass(self, engine: Engine, draw: random.Random, number: int) -> None:
        order = draw.sample(range(len(self.wanted)), len(self.wanted))
        seconds, before = 0.0, self.counts["tokens"]
        loops: list[float] = []
        while order:
            wave = [order.pop() for _ in range(min(draw.choice(WAVES), len(order)))]
            start = self.clock()
            handles = [engine.submit(self.wanted[i].prompt, self.wanted[i].params) for i in wave]
            for i, handle in zip(wave, handles, strict=True):
                self._gather(i, handle, cancels=(i + number) % CANCELLED == 0)
            seconds += self.clock() - start
            loops.append(_loop(self.clock))
        self.seconds += seconds
        self.speeds.append((self.counts["tokens"] - before) / seconds)
        self.machine.append(len(loops) / sum(loops))
        self.memory.append(resident())
        self.graphs.append(sum(shape.graph.nbytes for shape in engine._round.shapes._kept.values()))

    def _gather(self, i: int, handle: Handle, *, cancels: bool) -> None:
        """The end of a request, and whether it is as before; one that `cancels` does so behind its first chunk."""
        self.counts["requests"] += 1
        try:
            if cancels:
                next(iter(handle))
                handle.cancel()
            result = handle.result(300)
        except (DflashError, TimeoutError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        self.counts["tokens"] += len(result.tokens)
        self.counts["empty"] += not result.tokens
        if result.finish_reason == "cancelled":
            self.counts["cancelled"] += 1
            self._cut.append((i, result.tokens))
            return
        self._tokens.setdefault(i, result.tokens)
        self.counts["repeated"] += i in self._digests
        self.counts["differing"] += self._digests.setdefault(i, digest(result)) != digest(result)

    @property
    def growth(self) -> int:
        """Bytes more behind the last pass than behind the warm-up, without those of graphs."""
        last, first = (self.memory[i] - self.graphs[i] for i in (-1, WARM_UP - 1))
        return last - first

    @property
    def speed(self) -> float:
        """Of the last pass, as a part of the first one's."""
        return self.speeds[-1] / self.speeds[0]

    @property
    def drift(self) -> float:
        """The same of the machine."""
        return self.machine[-1] / self.machine[0]

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        clean = not (self.errors or self.counts["empty"] or self.counts["differing"])
        return clean and self.growth < MOST_GROWTH and self.speed / self.drift > LEAST_SPEED

    def lines(self) -> list[str]:
        """What is to be said of it."""
        c = self.counts
        return [
            f"{c['requests']} requests ({len(self.wanted)} different ones), {c['cancelled']} of them cancelled,"
            f" {c['tokens']} tokens in {self.seconds:.0f} s",
            f"{len(self.errors)} errors, {c['empty']} empty replies, {c['differing']} differ among {c['repeated']}"
            f" repeated outputs and {c['cancelled']} cancelled ones",
            f"memory behind the passes, MiB: {_mib(self.memory)}; of it the graphs' {_mib(self.graphs)};"
            f" the rest {self.growth / 2**20:+.1f} since the second pass",
            f"tokens/s of the passes: {' '.join(f'{s:.0f}' for s in self.speeds)}",
            f"last pass / first pass: {self.speed:.3f}; the machine's own drift, by a loop without the engine:"
            f" {self.drift:.3f}",
        ]


def _mib(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / 2**20:.1f}" for size in sizes)


def _loop(clock: Callable[[], float]) -> float:
    """Seconds of some work that is always the same."""
    start, data = clock(), bytes(1 << 20)
    for _ in range(8):
        hashlib.sha256(data)
    return clock() - start


def soak(n: int, device: str, seed: int = 0, passes: int = PASSES) -> Soak:
    """`n` requests in all, by the pair that ships."""
    # What is freed goes back to the system at once, or the allocator's pools, which settle late, would pass for a leak.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    with Engine.load(*shipped(), device=device, lanes=8, n_ctx=1024, threads=1) as engine:
        # The process's own seconds where it computes itself: its neighbours' do not count.
        seen = Soak(
            requests(n // passes, seed), time.process_time if engine.device.kind == "cpu" else time.perf_counter
        )
        seen.run(engine, seed, passes)
    return seen


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", metavar="FILE", help="write the lines as a list too")
    args = parser.parse_args()
    seen = soak(args.requests, args.device, args.seed)
    lines = [*seen.lines(), *seen.errors[:10]]
    print("\n".join(lines))
    if args.markdown:
        Path(args.markdown).write_text("".join(f"* {line}\n" for line in lines))
    return not seen.passed


if __name__ == "__main__":
    sys.exit(main())
