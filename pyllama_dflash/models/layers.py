"""What the target's and the draft's graphs share."""

from __future__ import annotations

from ..ggml import Graph, Tensor
from .metadata import Linear


def linear(g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
    """W x, times the tensor's scale where the file has one."""
    return _scaled(g, w, g.product(w.weight, x))


def linear_by_column(g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
    """As :func:`linear`, each column of x as if it were alone."""
    return _scaled(g, w, g.product_by_column(w.weight, x))


def _scaled(g: Graph, w: Linear[Tensor], y: Tensor) -> Tensor:
    return y if w.scale is None else g.mul(y, w.scale)
