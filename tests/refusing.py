"""A backend without some kernels of the family: what it refuses runs composed, or on the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from unittest import mock

from pyllama_dflash import loader
from pyllama_dflash.answers import Logits
from pyllama_dflash.ggml import Backend, DeviceInfo, Tensor
from pyllama_dflash.ggml.graph import op_name
from pyllama_dflash.host_path import Floats, Lattice
from pyllama_dflash.lane_rows import LaneRows
from pyllama_dflash.round import Round, read_lattices
from pyllama_dflash.shapes import ShapeKey

FAMILY = (
    "gdn_verify", "gdn_advance", "gdn_commit", "conv_verify", "conv_advance", "conv_commit", "attention", "mul_mat",
    "dynamic_conv", "select", "place", "penalise", "sample", "accept",
)  # fmt: skip


class Refusing(Backend):
    """Says no to the sub-ops in `refused`, which defaults to all."""

    def __init__(self, device: DeviceInfo, threads: int | None = 1, refused: Collection[str] = FAMILY) -> None:
        super().__init__(device, threads)
        self.refused = {f"dflash.{name}" for name in refused}

    def supports(self, tensor: Tensor) -> bool:
        """See :class:`Backend`."""
        return op_name(tensor.ptr) not in self.refused and super().supports(tensor)


DECISIONS = ("select", "penalise", "sample", "accept")


@contextlib.contextmanager
def refused(*names: str) -> Iterator[None]:
    """What is loaded inside is computed without the kernels of these names; none given: without any."""
    with mock.patch.object(loader, "Backend", functools.partial(Refusing, refused=names or FAMILY)):
        yield


def logits_of(round_: Round, slot: int, base: int, tokens: Sequence[int]) -> Floats:
    """Logits [T, V] of `tokens` at positions base, base + 1, ... of a slot, where `sample` is refused.

    Rows are what is given, not what the round makes of them: afterwards the slot's history holds `tokens` and is else
    what it was, its anchor stands at `base` and nothing is pending; the caller says what is final.
    """
    history = round_.cache.history
    history.set_base(slot, base)
    history.put(slot, base, tokens)
    held = history.tokens[slot, base : base + len(tokens) + 1].tolist()
    round_.verify([LaneRows(slot, base, len(tokens))])
    answer = round_.shapes.get(round_.shapes.keys[-1]).answer
    assert isinstance(answer, Logits)
    (logits,) = answer.rows(1)
    history.set_base(slot, base)
    history.put(slot, base, held)
    round_.cache.recurrent.set_pending(slot, 0)
    return logits


def lattices_of(round_: Round, work: Sequence[LaneRows]) -> list[Lattice]:
    """The lattices behind the anchors of a draft whose `select` is refused; only the draft runs."""
    shape = round_.shapes.get(ShapeKey("round", len(work), max(item.rows for item in work), feeds=True))
    assert shape.lattice is not None
    shape.batch.fill(work, round_.cache.slots)
    shape.graph.run()
    return read_lattices(shape.lattice, len(work))
