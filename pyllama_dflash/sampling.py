"""What a request asks of the sampler and when it ends: the parameters, their limits, and the words the ops read."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import RequestError

MAX_STOPS = 16
MAX_BIASES = 1024
MAX_WIDTH = 16
_MAX_ID = 2**31 - 1
MAX_BIAS = 1e9
"""With the limits of penalties and temperature, adjusted logits and their quotients stay far from the end of F32."""

# Of each parameter that is a number: what is allowed (never NaN, which fails every comparison), and how to say it.
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x == 0 or 1e-6 <= x <= 1e6, "0 (greedy) or 1e-06..1e+06"),
    "top_p": (lambda x: 0 <= x <= 1, "a number in 0..1"),
    "min_p": (lambda x: 0 <= x <= 1, "a number in 0..1"),
    "repetition_penalty": (lambda x: 1e-6 <= x <= 1e6, "a number in 1e-06..1e+06"),
    "presence_penalty": (lambda x: -1e4 <= x <= 1e4, "a number in -10000..10000"),
}
_WHOLE_NUMBERS = {"top_k": (0, 2**31 - 1), "seed": (0, 2**64 - 1), "max_tokens": (1, 2**31 - 1)}


class LogitBias(Mapping[int, float]):
    """What is added to a token's logit: token id -> bias, by rising id. Immutable and hashable.

    Raises:
        RequestError: no mapping, too many entries, an id that is none, a bias that is neither in -1e9..1e9 nor -inf.
    """

    def __init__(self, entries: Mapping[int, float]) -> None:
        if not isinstance(entries, Mapping):
            raise RequestError("logit_bias", entries, "a mapping of token ids to numbers")
        if len(entries) > MAX_BIASES:
            raise RequestError("logit_bias", f"{len(entries)} entries", f"at most {MAX_BIASES}")
        self._of = dict(sorted(_checked_bias(token, bias) for token, bias in entries.items()))
        self._hash = hash(tuple(self._of.items()))

    def __getitem__(self, token: int) -> float:
        return self._of[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._of)


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler and when it ends.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filter off.  Before the filters comes `logit_bias`
    (token id -> what is added to its logit; -inf forbids the token), then, for the tokens that prompt and text hold
    already, `repetition_penalty` (a logit above 0 is divided by it, others are multiplied) and `presence_penalty`
    (subtracted).  `stop` strings end the text before their first occurrence and are not part of it.  `width` is the
    most rows a round may have: 1 decodes in plain steps, None follows what was accepted lately; same tokens anyway.

    Raises:
        RequestError: a value of the wrong type or outside its limit; names parameter, value and limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # kept as a LogitBias
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    width: int | None = None

    def __post_init__(self) -> None:
        for name, (allowed, limit) in _NUMBERS.items():
            number = _as_float(getattr(self, name))
            if not allowed(number):
                raise RequestError(name, getattr(self, name), limit)
            self._keep(name, number)
        for name, (low, high) in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if not (_is_integer(value) and low <= value <= high):
                raise RequestError(name, value, f"a whole number in {low}..{high}")
            self._keep(name, int(value))
        if self.width is not None:
            if not (_is_integer(self.width) and 1 <= self.width <= MAX_WIDTH):
                raise RequestError("width", self.width, f"None or a whole number in 1..{MAX_WIDTH}")
            self._keep("width", int(self.width))
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise RequestError("ignore_eos", self.ignore_eos, "True or False")
        self._keep("ignore_eos", bool(self.ignore_eos))
        self._keep("logit_bias", LogitBias(self.logit_bias))
        self._keep("stop", _checked_stops(self.stop))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, without noise."""
        return self.temperature == 0.0

    def replaced(self, **overrides: Any) -> SamplingParams:
        """A copy with some values changed; an unknown name is a RequestError."""
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in overrides.items():
            if name not in known:
                raise RequestError(name, value, "one of " + ", ".join(known))
        return dataclasses.replace(self, **overrides)


@functools.lru_cache(maxsize=64)
def column(params: SamplingParams) -> NDArray[np.int32]:
    """The parameters as the ops `select` and `sample` read them: 8 words of I32 (enum ggml_dflash_sampling).

    seed (2 words), temperature F32, top_k, top_p F64 (2 words), log(min_p) F32, 0. The same array for equal parameters.
    """
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    packed = struct.pack("<QfidfI", params.seed, params.temperature, params.top_k, params.top_p, log_min_p, 0)
    words = np.frombuffer(packed, "<i4").astype(np.int32)
    words.flags.writeable = False
    return words


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _as_float(value: Any) -> float:
    """`value` as a float, never -0 (so that equal parameters have equal bits); NaN where it is no number or too big."""
    if not (_is_integer(value) or isinstance(value, (float, np.floating))):
        return math.nan
    try:
        return float(value) + 0.0
    except OverflowError:
        return math.nan


def _checked_bias(token: Any, bias: Any) -> tuple[int, float]:
    number = _as_float(bias)
    if not (_is_integer(token) and 0 <= token <= _MAX_ID and (number == -math.inf or -MAX_BIAS <= number <= MAX_BIAS)):
        limit = f"token ids in 0..{_MAX_ID}, each with -inf or a number in -1e+09..1e+09"
        raise RequestError("logit_bias", {token: bias}, limit)
    return int(token), number


def _checked_stops(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    limit = f"at most {MAX_STOPS} non-empty strings of valid Unicode"
    if not isinstance(stop, (tuple, list)) or len(stop) > MAX_STOPS:
        raise RequestError("stop", stop, limit)
    for item in stop:
        if not isinstance(item, str) or not item or not is_unicode(item):
            raise RequestError("stop", item, limit)
    return tuple(stop)


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: Python and JSON can spell halves of characters, which no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
