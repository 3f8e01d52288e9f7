"""What the target's and the draft's graphs share."""

from __future__ import annotations

from ..ggml import Graph, Tensor
from .metadata import Linear


def linear(g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
    """W x, times the tensor's scale where the file has one."""
    y = g.product(w.weight, x)
    return y if w.scale is None else g.mul(y, w.scale)
