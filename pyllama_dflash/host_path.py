"""What the host does where the device has no kernel: walk a draft's lattice, draw from logits, compare with proposals.

Each function is the meaning of an op (`select`, `penalise` and `sample`, `accept`) and gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .draws import draft_scores, draw
from .errors import DeviceError
from .penalties import adjusted
from .sampling import SamplingParams

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Lattice:
    """What a draft says about the rows 1.. of one lane's block.

    ids [T - 1, k] candidate tokens; first [k] scores of row 1 behind the anchor; edges [T - 2, k, k] scores of
    candidate b (last axis) of a row behind candidate a of the row before. Without a selector a row's scores do not
    depend on the row before.
    """

    ids: Ints
    first: Floats
    edges: Floats


def walk(lattice: Lattice, params: SamplingParams, base: int) -> list[int]:
    """`select`: proposals behind an anchor at position `base`, left to right, each the best behind the one before.

    With a temperature the scores carry the noise that the target's draw at that position will carry, so that both tend
    to the same token.
    """
    proposals: list[int] = []
    scores, best = lattice.first, 0
    for t, ids in enumerate(lattice.ids):
        if t > 0:
            scores = lattice.edges[t - 1, best]
        best = int(np.argmax(draft_scores(scores, ids, params, base + t + 1)))
        proposals.append(int(ids[best]))
    return proposals


def drawn(logits: Floats, params: SamplingParams, base: int, seen: Ints) -> Iterator[int]:
    """`penalise` and `sample`: the token of each row of [T, V], row t's at position base + t + 1; -1 for a row that is
    not finite. `seen` [base + T]: the tokens at positions 0 .. base + T - 1."""
    for t, row in enumerate(logits):
        position = base + t + 1
        try:
            yield draw(adjusted(row, params, seen[:position]), params, position)
        except DeviceError:
            yield -1


def accepted(tokens: Iterable[int], proposals: Sequence[int]) -> list[int]:
    """`accept`: the tokens that are final. Row 0's, and row t's while the tokens before it are the proposals."""
    final: list[int] = []
    for t, token in enumerate(tokens):
        if token < 0:
            break
        final.append(token)
        if t >= len(proposals) or proposals[t] != token:
            break
    return final
