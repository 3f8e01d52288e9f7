"""How the next token is chosen from a row of logits: the noise, the filters, and the draw on the host.

Greedy takes the largest logit.  Otherwise the draw is Gumbel-max: over the tokens that top-k, top-p and min-p leave,
the largest ``logit / T + G(seed, position, token)``, which is a sample of softmax(logit / T).  G does not depend on the
logits, so verification is equality with the target's own draw, and a draft that adds the same G to its scores tends to
the same token.  The first (lowest) index wins every tie.

The recipe of the noise and of the filters, bit for bit, is in ggml_patches/README.md ("Drawing, bit for bit"); the ops
`sample` and `select` follow it too.  In short: top-k (largest k, ties by lower id), then top-p (the shortest prefix, by
falling rounded distance from the largest logit and then rising id, that holds at least p of what is left; weights are
whole numbers, so their sum has no order), then min-p (logit >= largest + log p), all on the logits before temperature.
At least one token is always kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DeviceError
from .sampling import SamplingParams

F32 = np.float32
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.integer[Any]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LN2 = F32(0.6931471805599453)
_SQRT_HALF = np.int32(0x3F3504F3)
# More than the distance between the smallest and the largest noise: a token this far below the best cannot win.
_SPAN = F32(32.0)
# Elements handled at a time, so that the temporaries stay in the CPU's cache.
_CHUNK = 8192


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _token_bits(seed: int, position: int, tokens: IntArray) -> NDArray[np.uint32]:
    """The upper 32 bits of x in the recipe above, for every token."""
    key = _mix((_mix(seed) + _GOLDEN * (position + 1)) & _MASK)
    z = tokens.astype(np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64((key + _GOLDEN) & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    bits: NDArray[np.uint32] = (z >> np.uint64(32)).astype(np.uint32)
    return bits


def _split(y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """y = 2^k * (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); returns (k, f)."""
    bits = y.view(np.int32)
    k = (bits - _SQRT_HALF) >> np.int32(23)
    return k.astype(F32), (bits - (k << np.int32(23))).view(F32) - F32(1)


def _log_tail(f: FloatArray) -> FloatArray:
    """log(1 + f) as 2 atanh(f / (2 + f)); the series' next term is below half a unit in the last place."""
    s = f / (F32(2) + f)
    z = s * s
    p = F32(1 / 7) + z * F32(1 / 9)
    p = F32(1 / 5) + z * p
    p = F32(1 / 3) + z * p
    t = s + s
    tail: FloatArray = t + t * (z * p)
    return tail


def noise(seed: int, position: int, tokens: IntArray) -> FloatArray:
    """Standard Gumbel noise G(seed, position, token), F32, in the shape of `tokens`.

    `position` is the absolute position of the token being drawn; all arguments are >= 0 and below 2^64.
    """
    tokens = np.asarray(tokens)
    flat = tokens.reshape(-1)
    result = np.empty(flat.size, F32)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        result[part] = _gumbel(_token_bits(seed, position, flat[part]))
    return result.reshape(tokens.shape)


def _gumbel(bits: NDArray[np.uint32]) -> FloatArray:
    odd = bits.astype(np.int64) * 2 + 1
    v = np.minimum(odd.astype(F32) * F32(2.0**-33), F32(1 - 2.0**-24))
    k, f = _split(F32(1) - v)
    k, f = _split(-(k * _LN2 + _log_tail(np.where(k == 0, -v, f))))
    gumbel: FloatArray = -(k * _LN2 + _log_tail(f))
    return gumbel


def _fixed_weights(d: FloatArray) -> NDArray[np.uint64]:
    """floor(exp(d) * 2^32) for d <= 0."""
    result = np.zeros(d.size, np.uint64)
    live = np.flatnonzero(d > F32(-23))
    for start in range(0, live.size, _CHUNK):
        part = live[start : start + _CHUNK]
        result[part] = _fixed_exp(d[part])
    return result


def _fixed_exp(d: FloatArray) -> NDArray[np.uint64]:
    n = np.rint(d * F32(1.4426950408889634))
    r = (d - n * F32(0.693359375)) + n * F32(2.12194440e-4)
    p = F32(1 / 720) + r * F32(1 / 5040)
    for c in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = F32(c) + r * p
    power = (n.astype(np.int32) + np.int32(32 + 127)) << np.int32(23)  # the bits of 2^(n + 32)
    weights: NDArray[np.uint64] = (p * power.view(F32)).astype(np.uint64)
    return weights


def _top_k(logits: FloatArray, k: int) -> NDArray[np.int64]:
    """Ids (rising) of the k largest logits, ties by lower id."""
    if k >= logits.size:
        return np.arange(logits.size)
    least = np.partition(logits, logits.size - k)[logits.size - k]
    above = np.flatnonzero(logits > least)
    ties = np.flatnonzero(logits == least)[: k - above.size]
    return np.sort(np.concatenate([above, ties]))


def _top_p(logits: FloatArray, ids: NDArray[np.int64], p: float) -> NDArray[np.int64]:
    """Those of `ids` (rising) that make up the shortest prefix by falling logit with at least p of the weight."""
    values = logits[ids]
    distance = values - values.max()
    weights = _fixed_weights(distance)
    need = max(1, math.ceil(p * int(weights.sum())))
    for depth in (1, 2, 4, 8, 32):  # sort no more than the part that is needed
        near = np.flatnonzero(distance > -depth)
        if int(weights[near].sum()) >= need:
            break
    # The bits of a float >= +0 order like the float; with the index below them a plain sort settles ties by lower id.
    keys = ((-distance[near] + F32(0)).view(np.uint32).astype(np.uint64) << np.uint64(32)) | near.astype(np.uint64)
    order = (np.sort(keys) & np.uint64(0xFFFFFFFF)).astype(np.int64)
    count = int(np.searchsorted(np.cumsum(weights[order]), np.uint64(need))) + 1
    return np.sort(ids[order[:count]])


def kept_tokens(logits: FloatArray, params: SamplingParams) -> NDArray[np.int64]:
    """Ids, rising, of the tokens that top-k, top-p and min-p leave of a finite row `logits` [V]."""
    ids = _top_k(logits, params.top_k) if params.top_k else np.arange(logits.size)
    if params.top_p < 1.0:
        ids = _top_p(logits, ids, params.top_p)
    if params.min_p > 0.0:
        ids = ids[logits[ids] >= logits.max() + F32(math.log(params.min_p))]
    return ids


def _over(logits: FloatArray, params: SamplingParams) -> FloatArray:
    with np.errstate(over="ignore"):  # an absurd quotient becomes infinite; the lowest id wins among such
        scaled: FloatArray = logits / F32(params.temperature)
    return scaled


def draw(logits: FloatArray, params: SamplingParams, position: int) -> int:
    """The token at absolute `position`, chosen from its row of logits, F32 [V]; -inf marks a forbidden token.

    Raises:
        DeviceError: the row holds NaN or +inf, or nothing but -inf.
    """
    logits = np.asarray(logits, F32)
    first = int(np.argmax(logits))  # a NaN wins argmax, so looking at the winner checks the row
    best = logits[first]
    if not math.isfinite(best):
        raise DeviceError(f"logits at position {position} are not finite (token {first}: {best})")
    if params.greedy:
        return first
    ids = kept_tokens(logits, params)
    scaled = _over(logits[ids], params)
    near = np.flatnonzero(scaled >= scaled.max() - _SPAN)
    ids = ids[near]
    return int(ids[np.argmax(scaled[near] + noise(params.seed, position, ids))])


def draft_scores(scores: FloatArray, candidate_ids: IntArray, params: SamplingParams, position: int) -> FloatArray:
    """What the draft's walk maximises over its candidates for `position`: scores / T + noise, or the plain scores.

    `scores` (F32) and `candidate_ids` have the same shape; so has the result.
    """
    if params.greedy:
        return scores
    return _over(scores, params) + noise(params.seed, position, candidate_ids)
