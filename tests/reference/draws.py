"""Noise, filters and draw, one number at a time, as ggml_patches/README.md ("Drawing, bit for bit") states them.

Whole numbers and F32 steps. A Python float op followed by rounding to F32 is the F32 op, because 53 bits are more than
twice 24 plus two.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

from pyllama_dflash.sampling import SamplingParams

M64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def r(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def float_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


def bits_float(i: int) -> float:
    return struct.unpack("<f", struct.pack("<i", i))[0]


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & M64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def slow_log(y: float, small: float | None = None) -> float:
    """log(y); with `small`, y is 1 - small."""
    i = float_bits(y)
    k = (i - 0x3F3504F3) >> 23
    f = r(bits_float(i - (k << 23)) - 1.0)
    if small is not None and k == 0:
        f = -small
    s = r(f / r(2.0 + f))
    z = r(s * s)
    p = r(1 / 9)
    for n in (7, 5, 3):
        p = r(r(1 / n) + r(z * p))
    t = r(s + s)
    return r(r(k * r(math.log(2))) + r(t + r(t * r(z * p))))


def slow_noise(seed: int, position: int, token: int) -> float:
    key = mix((mix(seed) + GOLDEN * (position + 1)) & M64)
    fraction = mix((key + GOLDEN * (token + 1)) & M64) >> 32
    v = min(r(r(float(2 * fraction + 1)) * 2.0**-33), 1 - 2.0**-24)
    return -slow_log(-slow_log(r(1.0 - v), small=v))


def slow_weight(d: float) -> int:
    if not d > -23:
        return 0
    n = round(r(d * r(1.4426950408889634)))
    rest = r(r(d - r(n * 0.693359375)) + r(n * r(2.12194440e-4)))
    p = r(1 / 5040)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = r(r(c) + r(rest * p))
    return math.floor(Fraction(p) * Fraction(2) ** (n + 32))


def slow_kept(logits: list[float], params: SamplingParams) -> list[int]:
    best = max(logits)
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        ids.sort(key=lambda i: (-r(logits[i] - best), i))  # rounded: logits that differ may be equally far
        weights = [slow_weight(r(logits[i] - best)) for i in ids]
        need, held = max(1, math.ceil(params.top_p * sum(weights))), 0
        for count, weight in enumerate(weights, 1):
            held += weight
            if held >= need:
                ids = ids[:count]
                break
    if params.min_p > 0:
        ids = [i for i in ids if logits[i] >= r(best + r(math.log(params.min_p)))]
    return sorted(ids)


def slow_draw(logits: list[float], params: SamplingParams, position: int) -> int:
    ids = slow_kept(logits, params)
    value = {i: r(r(logits[i] / r(params.temperature)) + slow_noise(params.seed, position, i)) for i in ids}
    return max(ids, key=lambda i: (value[i], -i))
