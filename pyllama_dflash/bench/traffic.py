"""What a round does by its graph: nodes that compute, and the bytes it cannot but move."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .._native import ffi, lib
from ..cache import LaneCache, PagedKV
from ..engine import Engine
from ..ggml import Graph, Tensor
from ..ggml.dflash_ops import PAGE
from ..ggml.graph import _NO_COMPUTE, op_name
from ..shapes import ShapeKey

FORMULA = (
    "bytes a round = weights + L (state + log + conv + KV). weights: the matrices and vectors that nodes of the graph"
    " read, once a node (the head twice: for the draft's rows and the target's), gathered rows (embedding, codebooks)"
    " left out. state: 2 x 4 S S Hv a GDN layer (read and written). log: 4 (2 S + 1) Hv (a + T). conv: 4 C (K - 1 + a +"
    " T). KV: bytes of a position's keys and values x (p + T) a full-attention layer, and x min(ring, p + T) a draft"
    " layer where it speculates. L lanes, T rows, a accepted rows of the round before (mean), p mean position of the"
    " anchor. Activations are left out."
)
_GATHERS = {"GET_ROWS", "dflash.select"}


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one round: nodes that compute, in all and by op; bytes by what they are."""

    launches: int
    ops: dict[str, int]
    bytes: dict[str, int]


def of_round(engine: Engine, lanes: int, rows: int, accepted: float, position: float, *, feeds: bool) -> Work | None:
    """What the graphs of a round of so many lanes and rows do; None when they are not kept. `feeds`: whether its lanes
    may speculate. Called while no request runs."""
    keys = _keys(engine, lanes, rows, feeds and engine.has_draft)
    if not keys:
        return None
    graphs = [engine._round.shapes.get(key).graph for key in keys]
    ops: Counter[str] = Counter()
    for graph in graphs:
        ops.update({op: count for op, count in graph.nodes.items() if op not in _NO_COMPUTE})
    weights = set(_addresses((engine._loaded.models.target_weights, engine._loaded.models.draft_weights)))
    sizes = {"weights": sum(size for graph in graphs for size in _read(graph, weights))}
    sizes |= _memory(engine._cache, lanes, rows, accepted, position, drafts=keys[0].kind == "round")
    return Work(ops.total(), dict(ops.most_common()), sizes)


def _keys(engine: Engine, lanes: int, rows: int, feeds: bool) -> list[ShapeKey]:
    """The graphs of a round: one, or the draft's and the target's where the host walks the lattice between them."""
    shapes = engine._round.shapes
    drafted, verify = ShapeKey("round", lanes, rows, True), ShapeKey("verify", lanes, rows, feeds)
    wanted = [verify] if rows == 1 else [drafted]
    if rows > 1 and drafted in shapes.keys and shapes.get(drafted).lattice is not None:
        wanted.append(verify)
    return wanted if set(wanted) <= set(shapes.keys) else []


def _addresses(tree: Any) -> Iterator[int]:
    """Where the weights lie."""
    if isinstance(tree, Tensor):
        yield _address(tree.ptr)
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _addresses(part)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _addresses(getattr(tree, field.name))


def _address(ptr: Any) -> int:
    return int(ffi.cast("uintptr_t", ptr.data))


def _read(graph: Graph, weights: set[int]) -> Iterator[int]:
    """Bytes of each weight that a node of a built graph reads as a whole."""
    skipped = _NO_COMPUTE | _GATHERS
    for i in range(lib.ggml_graph_n_nodes(graph._graph)):
        node = lib.ggml_graph_node(graph._graph, i)
        if op_name(node) in skipped:
            continue
        for source in node.src:
            if source != ffi.NULL and _address(source) in weights:
                yield int(lib.ggml_nbytes(source))


def _memory(
    cache: LaneCache, lanes: int, rows: int, accepted: float, position: float, *, drafts: bool
) -> dict[str, int]:
    """Bytes of states, logs, windows, keys and values, of all lanes (`FORMULA`)."""
    r, slots = cache.recurrent, cache.slots
    state = sum(tensor.nbytes // slots for tensor in r.state.values())
    log_row = sum(tensor.nbytes // slots // r.block for tensor in r.log.values())
    conv_row = sum(tensor.strides[1] for tensor in r.rows.values())
    kept = next(iter(r.rows.values())).shape[1] - r.block if r.rows else 0
    sizes = {
        "state": 2 * state,
        "log": log_row * (accepted + rows),
        "conv": conv_row * (kept + accepted + rows),
        "kv": _row_bytes(cache.kv) * (position + rows),
    }
    if drafts and cache.ring is not None:
        ring = (cache.ring.n_pages - 1) * PAGE // slots
        sizes["ring"] = _row_bytes(cache.ring) * min(ring, position + rows)
    return {name: round(lanes * size) for name, size in sizes.items()}


def _row_bytes(kv: PagedKV) -> int:
    """Bytes of a position's keys and values in all layers."""
    return sum(tensor.strides[2] for tensor in (*kv.k.values(), *kv.v.values()))
