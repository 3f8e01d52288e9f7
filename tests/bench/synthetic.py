"""Synthetic pairs of a real model's shapes and types, for measuring: text means nothing, times are the real model's.

    python tests/bench/synthetic.py OUT [--rig] [--shape 27b|tiny] [--seed N]

Writes OUT-target.gguf and OUT-draft.gguf: matrices IQ4_XS, head Q6_K, alpha, beta and the draft Q8_0; 17 GB at 27b,
in pieces of one pool of random blocks a type. With `--rig` every prediction of target and draft is the same token, so
every proposal is accepted; without it none is. Metadata and tensors are those of tests/tiny_pair.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_pair import TinyPair, Weights

TYPES: dict[str, str] = {"matrices": "IQ4_XS", "embedding": "IQ4_XS", "head": "Q6_K", "gates": "Q8_0"}
SHAPES: dict[str, TinyPair] = {
    "27b": TinyPair(
        n_vocab=248320, n_embd=5120, n_ff=17408, n_layer=64, n_head=24, n_head_kv=4, head_dim=256, rope_dims=64,
        n_k_heads=16, n_v_heads=48, state_size=128, context=262144, draft_layers=5, draft_heads=32, draft_kv_heads=8,
        draft_head_dim=128, taps=(6, 20, 34, 48, 62), rank=256, top_k=16, **TYPES,
    ),
    "tiny": TinyPair(n_vocab=4096, n_embd=512, n_ff=1024, n_layer=8, n_head_kv=2, draft_head_dim=64, **TYPES),
}  # fmt: skip

POOL_BYTES = 32 << 20
SCALE_AT = {"IQ4_XS": 0, "Q8_0": 0, "Q6_K": 208}  # byte of a block where its scale lies, an F16
FAVOURED = 300
"""The token of a rigged pair."""
QUIET = 0.02
"""How loud a rigged layer is against the embedding, which is of size 1."""


@functools.cache
def pool(kind: str, seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of a type, [blocks, bytes], as many as a prime number, so that no row repeats the one above it."""
    size = gguf.GGML_QUANT_SIZES[Q[kind]][1]
    blocks = _prime_below(POOL_BYTES // size)
    return (
        np.frombuffer(np.random.default_rng([seed, size]).bytes(blocks * size), np.uint8).reshape(blocks, size).copy()
    )


def _prime_below(n: int) -> int:
    return next(p for p in range(n, 1, -1) if all(p % d for d in range(2, int(p**0.5) + 1)))


@functools.cache
def unit(kind: str, seed: int) -> float:
    """Deviation of the values of a pool's blocks whose scale is 2^-8."""
    blocks = pool(kind, seed)[:4096].copy()
    put_scale(blocks, kind, 2**-8)
    return float(gguf.quants.dequantize(blocks, Q[kind]).std())


def put_scale(blocks: np.ndarray[Any, Any], kind: str, scale: float) -> None:
    """Give all blocks the same scale."""
    at = SCALE_AT[kind]
    blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)


class Drawn:
    """A matrix that exists only while it is written: what gguf's writer needs of an array, and no memory.

    `positive`: no value is below 0. `favoured`: this row is the largest value everywhere.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, kind: str, rows: int, cols: int, deviation: float, seed: int, first: int) -> None:
        per_block, size = gguf.GGML_QUANT_SIZES[Q[kind]]
        self.shape = (rows, cols // per_block * size)
        self.nbytes = rows * self.shape[1]
        self.positive, self.favoured = False, -1
        self._kind, self._seed, self._first = kind, seed, first
        self._scale = 2**-8 * deviation / unit(kind, seed)

    def tofile(self, out: BinaryIO) -> None:
        """Write the pool round and round from block `first` on."""
        blocks = pool(self._kind, self._seed)
        put_scale(blocks, self._kind, self._scale)
        if self.positive:
            blocks = _positive(blocks)
        begin, left = out.tell(), self.nbytes
        data = blocks.reshape(-1)
        at = self._first % len(blocks) * blocks.shape[1]
        while left:
            piece = data[at : at + left]
            out.write(memoryview(piece))
            left, at = left - piece.nbytes, 0
        if self.favoured >= 0:
            end = out.tell()
            out.seek(begin + self.favoured * self.shape[1])
            out.write(_largest(self._scale, self.shape[1]))
            out.seek(end)


def _positive(blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """IQ4_XS blocks whose six-bit scales and values are in the upper, positive half of their range."""
    out = blocks.copy()
    out[:, 2:4] |= 0xAA  # the upper two bits of each scale
    out[:, 8:] |= 0x88
    return out


def _largest(scale: float, size: int) -> bytes:
    """A Q6_K row of 31 x 127 x scale."""
    block = np.full((1, 210), 0xFF, np.uint8)
    block[:, 192:208] = 127
    put_scale(block, "Q6_K", scale)
    return block.tobytes() * (size // 210)


class Streamed(Weights):
    """Large matrices are drawn while they are written."""

    def matrix(self, name: str, n_in: int, n_out: int, kind: str, scale: float | None = None) -> None:
        """See :class:`Weights`."""
        first = int(self.rng(name).integers(1 << 30))
        drawn = Drawn(kind, n_out, n_in, scale if scale is not None else n_in**-0.5, self.seed, first)
        self.model.tensors[name] = (kind, drawn)


class Rigged(Streamed):
    """Every embedding is positive and layers are quiet, so the stream is positive at the end, and one row of the head
    is the largest there: it wins, for the draft's rows too."""

    def matrix(self, name: str, n_in: int, n_out: int, kind: str, scale: float | None = None) -> None:
        """See :class:`Weights`."""
        quiet = name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight"))
        super().matrix(name, n_in, n_out, kind, QUIET * n_in**-0.5 if quiet else scale)
        drawn = self.model.tensors[name][1]
        drawn.positive = name == "token_embd.weight"
        drawn.favoured = FAVOURED if name == "output.weight" else -1


def write(out: str | Path, shape: str = "27b", *, rig: bool = False, seed: int = 7) -> tuple[Path, Path]:
    """Write both files; returns the target's and the draft's path."""
    pair = dataclasses.replace(SHAPES[shape], seed=seed)
    weights = Rigged if rig else Streamed
    return (
        pair.target(weights).write(f"{out}-target.gguf"),
        pair.draft(weights).write(f"{out}-draft.gguf"),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", help="path and beginning of both names")
    parser.add_argument("--rig", action="store_true", help="all proposals are accepted (default: none)")
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(arguments)
    begin = time.perf_counter()
    for path in write(args.out, args.shape, rig=args.rig, seed=args.seed):
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
