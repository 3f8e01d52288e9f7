"""Runs of `pyllama-dflash bench` in this process, for its tests."""

from __future__ import annotations

from pyllama_dflash import cli
from pyllama_dflash.bench import copying

copying.CPU_BYTES = 8 << 20  # what copies reach does not matter here

TOKENS, WAVES = 24, 2


def arguments(pair, *more):
    """A short run on one thread."""
    return [
        "bench", "-m", pair.target, "-md", pair.draft, "--device", "cpu", "-t", "1", "--prompt-tokens", "12",
        "-n", TOKENS, "--waves", WAVES, *more,
    ]  # fmt: skip


def run(*given):
    """The exit code."""
    return cli.main([str(argument) for argument in given])
