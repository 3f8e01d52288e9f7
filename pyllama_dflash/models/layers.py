"""What the target's and the draft's graphs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ggml import Graph, Tensor
from .tensor_table import Linear, Stack


def linear(g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
    """W x, times the tensor's scale where the file has one."""
    return _scaled(g, w, g.product(w.weight, x))


def linear_by_column(g: Graph, w: Linear[Tensor], x: Tensor) -> Tensor:
    """As :func:`linear`, each column of x as if it were alone."""
    return _scaled(g, w, g.product_by_column(w.weight, x))


@dataclass(frozen=True)
class Products:
    """What the matrices of a stack give for the same x: `parts` [m_i, n].

    Of one product, `whole` [sum m_i, n], they are windows: a column is packed, and the next one lies sum m_i further.
    """

    parts: tuple[Tensor, ...]
    whole: Tensor | None


def products(
    g: Graph, w: Stack[Tensor], x: Tensor, linear: Callable[[Graph, Linear[Tensor], Tensor], Tensor]
) -> Products:
    """W_i x for all parts of `w`, each by `linear` or all at once; x [k, n]."""
    if w.whole is None:
        return Products(tuple(linear(g, part, x) for part in w.parts), None)
    whole = linear(g, Linear(w.whole), x)
    return Products(windows(g, whole, [part.weight.shape[1] for part in w.parts]), whole)


def side_by_side(g: Graph, *of_one_x: Products) -> None:
    """Schedule products of the same x one behind the other, so that a device can prepare x for all of them together."""
    for p in of_one_x:
        if p.whole is not None:
            g.effect(p.whole)


def each(g: Graph, f: Callable[[Tensor], Tensor], p: Products) -> tuple[Tensor, ...]:
    """`f`, which works element by element, of every part.

    Devices want packed operands there, which windows are not, so f is taken of the whole: the caller may leave parts
    unused, which is cheaper than a copy of the others.
    """
    if p.whole is None:
        return tuple(f(part) for part in p.parts)
    return windows(g, f(p.whole), [part.shape[0] for part in p.parts])


def windows(g: Graph, y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of y [sum of sizes, n] cut into [size, n] each, where they lie."""
    cut, done = [], 0
    for size in sizes:
        cut.append(g.view(y, (size, y.shape[1]), (y.strides[1],), 4 * done))
        done += size
    return tuple(cut)


def _scaled(g: Graph, w: Linear[Tensor], y: Tensor) -> Tensor:
    return y if w.scale is None else g.mul(y, w.scale)
