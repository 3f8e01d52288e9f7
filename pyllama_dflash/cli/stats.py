"""What `generate --stats` says of one request or of many."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import Engine
    from ..result import Result


@dataclass
class Tally:
    """Sums over the requests that have ended; `reasons` counts how, `seconds` are those of each of the Timings."""

    started: float = 0.0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    def start(self) -> None:
        """The clock on the wall runs from here."""
        self.started = time.perf_counter()

    def add(self, outcome: Result | Exception) -> None:
        """One more has ended."""
        self.wall_s = time.perf_counter() - self.started
        if isinstance(outcome, Exception):
            self.failed += 1
            return
        self.reasons[outcome.finish_reason] += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.tokens += len(outcome.tokens)
        self.rounds += outcome.rounds
        self.proposed += outcome.proposed
        self.accepted = [a + b for a, b in zip_longest(self.accepted, outcome.accepted_per_position, fillvalue=0)]
        self.seconds.update(asdict(outcome.timings))

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, by the clock on the wall."""
        return self.tokens / self.wall_s if self.wall_s else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round of a request."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def mean(self, name: str) -> float:
        """Seconds a request, by the name of one of the Timings."""
        return self.seconds[name] / max(1, self.reasons.total())


def report(engine: Engine, tally: Tally) -> str:
    """The lines. Of several requests, prompt, text and phases are means, and a last line is about all together."""
    done = tally.reasons.total()
    several = done + tally.failed > 1
    decode = tally.seconds["decode_s"]
    ends = ", ".join(f"{n} {reason}" if several else reason for reason, n in tally.reasons.items())
    lines = [
        f"device      {engine.device.name} ({engine.device.description})",
        f"prompt      {round(tally.prompt_tokens / max(1, done), 1):g} tokens in {tally.mean('prefill_s'):.3f} s,"
        f" first token after {tally.mean('first_token_s'):.3f} s",
        f"text        {round(tally.tokens / max(1, done), 1):g} tokens in {tally.mean('decode_s'):.3f} s,"
        f" {tally.tokens / decode if decode else 0.0:.1f} tokens/s (ended by: {ends})",
        f"phases      queued {tally.mean('queued_s'):.3f} s, prefill {tally.mean('prefill_s'):.3f} s,"
        f" decode {tally.mean('decode_s'):.3f} s, of it host {tally.mean('host_s'):.3f} s",
        f"rounds      {tally.rounds}, {tally.mean_accepted_length:.2f} tokens each",
    ]
    if engine.has_draft:
        accepted = " ".join(map(str, tally.accepted))
        lines.append(f"accepted    {accepted} by position, {tally.proposed} proposed")
    lines.append(f"ops         {_paths(engine.paths)}")
    if several:
        lines.append(_total(engine, tally))
    return "\n".join(lines)


def _total(engine: Engine, tally: Tally) -> str:
    work = engine.stats()["work"]
    busy = work["device_s"] + work["host_s"]
    host = work["host_s"] / busy if busy else 0.0
    return (
        f"total       {tally.reasons.total()} requests done, {tally.failed} failed: {tally.tokens} tokens in"
        f" {tally.wall_s:.3f} s, {tally.tokens_per_second:.1f} tokens/s, {tally.mean_accepted_length:.2f} tokens a"
        f" round, host {host:.1%} of the engine's time"
    )


def _paths(paths: dict[str, dict[str, int]]) -> str:
    """Nodes of the graphs by the way they are computed, the ops named that have no kernel at times."""
    kernels = sum(uses.get("kernel", 0) for uses in paths.values())
    others = [f"{op} {n} {path}" for op, uses in paths.items() for path, n in uses.items() if path != "kernel"]
    return ", ".join([f"{kernels} nodes by kernels", *others])
