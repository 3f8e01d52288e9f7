"""Bias and penalties: what they do to a row of logits before anything is drawn from it, and how a slot holds them.

The meaning of the op `penalise`, for one row of logits x, every operation rounded to F32 by itself:

    bias:         x[id] <- x[id] + b                                        of every entry of logit_bias
    repetition:   x[v] <- x[v] / r  if x[v] > 0  else  x[v] * r             of every distinct token v seen so far
    presence:     x[v] <- x[v] - p                                          of the same tokens

Seen are the tokens at all positions up to and including the row's own: a function of the text alone, so that a row has
the same logits in a block as in plain decoding. Ids that the row does not have are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import RequestError
from .sampling import SamplingParams

F32 = np.float32
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def neutral(params: SamplingParams) -> bool:
    """Whether nothing of this applies: no bias, and penalties that are 1 and 0 in F32."""
    return not params.logit_bias and not _penalises(params)


def adjusted(logits: Floats, params: SamplingParams, seen: Sequence[int] | Ints) -> Floats:
    """The row that is drawn from: a changed copy of `logits` [V], or `logits` itself where nothing applies.

    `seen`: token ids, in any order and as often as they like, up to and including the row's own input token.
    """
    if neutral(params):
        return logits
    row: Floats = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):  # a row that is not finite is the draw's to refuse
        _add_bias(row, params)
        if _penalises(params):
            _penalise(row, params, seen)
    return row


def penalties_of(params: SamplingParams) -> Floats:
    """A slot's `penalties`: F32 [2], repetition and presence."""
    return np.array([params.repetition_penalty, params.presence_penalty], F32)


def bias_of(params: SamplingParams, capacity: int) -> Ints:
    """A slot's `bias`: I32 [capacity, 2], pairs of a token id and a bias as F32 bits, by rising id.

    The pairs behind the last are (-1, 0); a list that fills the memory has none.

    Raises:
        RequestError: more entries than `capacity`.
    """
    n = len(params.logit_bias)
    if n > capacity:
        raise RequestError("logit_bias", f"{n} entries", f"at most {capacity}")
    pairs = np.tile(np.array([-1, 0], np.int32), (capacity, 1))
    pairs[:n, 0], values = _bias(params)
    pairs[:n, 1] = values.view(np.int32)
    return pairs


def check_bias(params: SamplingParams, n_vocab: int) -> None:
    """Refuse a bias for a token that a vocabulary of `n_vocab` does not have, and biases that leave no token.

    Raises:
        RequestError: names logit_bias, the largest id and the limit.
    """
    forbidden = sum(bias == -math.inf for bias in params.logit_bias.values())
    if forbidden >= n_vocab:
        raise RequestError("logit_bias", f"{forbidden} tokens forbidden", f"at most {n_vocab - 1}, all but one")
    largest = max(params.logit_bias, default=-1)
    if largest >= n_vocab:
        raise RequestError("logit_bias", largest, f"token ids below {n_vocab}, the size of the vocabulary")


def _penalises(params: SamplingParams) -> bool:
    repetition, presence = penalties_of(params)
    return bool(repetition != 1 or presence != 0)


def _bias(params: SamplingParams) -> tuple[Ints, Floats]:
    return np.array(list(params.logit_bias), np.int32), np.array(list(params.logit_bias.values()), F32)


def _add_bias(row: Floats, params: SamplingParams) -> None:
    ids, values = _bias(params)
    known = ids < row.size
    row[ids[known]] += values[known]


def _penalise(row: Floats, params: SamplingParams, seen: Sequence[int] | Ints) -> None:
    tokens = np.asarray(seen, np.int64)
    is_seen = np.zeros(row.size, np.bool_)
    is_seen[tokens[(tokens >= 0) & (tokens < row.size)]] = True
    repetition, presence = penalties_of(params)
    x = row[is_seen]
    row[is_seen] = np.where(x > 0, x / repetition, x * repetition) - presence
