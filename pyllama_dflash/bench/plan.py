"""What a run of the bench is asked to do, checked before anything heavy is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..engine import MAX_LANES
from ..errors import FileError, RequestError
from ..sampling import MAX_WIDTH

MAX_WAVES, MAX_TOKENS, MAX_PROMPT = 1000, 1 << 16, 1 << 18

Width = int | Literal["adaptive"]


@dataclass(frozen=True)
class Plan:
    """`width`: rows of a round of ours (None: the draft's whole block); `other`: of the setting between its halves.
    `stock`: the URL of a running llama-server, or the program. RequestError or FileError for what cannot work."""

    target: str
    draft: str | None
    lanes: tuple[int, ...]
    waves: int
    tokens: int
    prompts: str
    prompt_tokens: int
    width: Width | None
    other: Width
    device: str
    kv_type: str
    threads: int | None
    seed: int
    stock: str | None

    def __post_init__(self) -> None:
        for path in (self.target, self.draft):
            if path is not None and not Path(path).is_file():
                raise FileError(path, "no such file")
        if not self.lanes:
            raise RequestError("--lanes", "none", "numbers with commas between them")
        for lanes in self.lanes:
            _within("--lanes", lanes, 1, MAX_LANES)
        _within("--waves", self.waves, 1, MAX_WAVES)
        _within("-n", self.tokens, 2, MAX_TOKENS)
        _within("--prompt-tokens", self.prompt_tokens, 2, MAX_PROMPT)
        for name, width in (("--width", self.width), ("--other", self.other)):
            if isinstance(width, int):
                _within(name, width, 1, MAX_WIDTH)
        if self.stock is not None and not self.stock_is_url and not os.access(self.stock, os.X_OK):
            raise RequestError("--stock", self.stock, "http://HOST:PORT of a server, or a llama-server program")

    @property
    def stock_is_url(self) -> bool:
        """Whether the stock server runs already."""
        return self.stock is not None and self.stock.startswith(("http://", "https://"))

    def widths(self, block: int) -> tuple[Width, Width]:
        """`width` and `other` for a draft of this block (1: there is none)."""
        for name, width in (("--width", self.width), ("--other", self.other)):
            if isinstance(width, int) and width > block:
                raise RequestError(name, width, f"at most {block}, the draft's block" if block > 1 else "1: no draft")
        return block if self.width is None else self.width, self.other


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise RequestError(name, value, f"{least}..{most}")
