"""Strategies for sampling parameters: every value that is taken, by name; and things that mostly are not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

VALID: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.just(0.0) | st.floats(1e-6, 1e6),
    "top_k": st.integers(0, 2**31 - 1),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(1e-6, 1e6),
    "presence_penalty": st.floats(-1e4, 1e4),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.just(-math.inf) | st.floats(-1e9, 1e9), max_size=8),
    "seed": st.integers(0, 2**64 - 1),
    "max_tokens": st.integers(1, 2**31 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=16).map(tuple),
    "ignore_eos": st.booleans(),
    "width": st.none() | st.integers(1, 16),
}
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.text() | st.binary()
    | st.floats(width=16).map(np.float16) | st.integers(-(2**63), 2**63 - 1).map(np.int64) | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
