"""A backend without some kernels of the family: what it refuses runs composed, or on the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from unittest import mock

from pyllama_dflash import loader
from pyllama_dflash.answers import Logits
from pyllama_dflash.batch import LaneRows
from pyllama_dflash.ggml import Backend, DeviceInfo, Tensor
from pyllama_dflash.ggml.composed.draft import LatticeNodes
from pyllama_dflash.ggml.graph import op_name
from pyllama_dflash.host_path import Floats, Lattice
from pyllama_dflash.round import Round, read_lattices

FAMILY = (
    "gdn_verify", "gdn_advance", "gdn_commit", "conv_verify", "conv_advance", "conv_commit", "attention", "mul_mat",
    "dynamic_conv", "select", "sample", "accept",
)  # fmt: skip


class Refusing(Backend):
    """Says no to the sub-ops in `refused`, which defaults to all."""

    def __init__(self, device: DeviceInfo, threads: int | None = 1, refused: Collection[str] = FAMILY) -> None:
        super().__init__(device, threads)
        self.refused = {f"dflash.{name}" for name in refused}

    def supports(self, tensor: Tensor) -> bool:
        """See :class:`Backend`."""
        return op_name(tensor.ptr) not in self.refused and super().supports(tensor)


DECISIONS = ("select", "sample", "accept")


@contextlib.contextmanager
def refused(*names: str) -> Iterator[None]:
    """What is loaded inside is computed without the kernels of these names; none given: without any."""
    with mock.patch.object(loader, "Backend", functools.partial(Refusing, refused=names or FAMILY)):
        yield


def logits_of(round_: Round, work: Sequence[LaneRows]) -> Floats:
    """Logits [L, T, V] of a verify whose `sample` is refused."""
    round_.verify(work)
    answer = round_._verify.get(len(work), len(work[0].tokens)).answer
    assert isinstance(answer, Logits)
    return answer.rows(len(work))


def lattices_of(round_: Round, work: Sequence[LaneRows]) -> list[Lattice]:
    """The lattices behind the anchors of a draft whose `select` is refused."""
    round_.propose(work)
    result = round_._propose.get(len(work), round_.models.block).result
    assert isinstance(result, LatticeNodes)
    return read_lattices(result, len(work))
