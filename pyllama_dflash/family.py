"""Each op of the family on the way that the device has: its kernel, a composition of ggml's ops, or the host.

The choice falls per node, when a graph is built, and is counted in `Graph.paths`. b is the batch, i a layer.
Shapes as in :mod:`.ggml.dflash_ops`.
"""

from __future__ import annotations

from . import lane_inputs as inputs
from .batch import Batch
from .cache import PagedKV, RecurrentState
from .ggml import Graph, ShapeError, Tensor
from .ggml.composed import conv, draft, gdn
from .ggml.composed.attention import attention as composed_attention
from .ggml.composed.draft import LatticeNodes
from .ggml.composed.rows import Shown
from .history import History

# -- gated delta net ---------------------------------------------------------------------------------------------------


def gdn_verify(g: Graph, b: Batch, memory: RecurrentState, i: int, rows: gdn.Rows) -> Tensor:
    """Rows that may still be rejected. -> [S, Hv, T, L]."""
    state, log = memory.state[i], memory.log[i]

    def kernel() -> Tensor:
        return g.gdn_verify(rows.q, rows.k, rows.v, rows.decay, rows.beta, state, log, b.slots, memory.pending)

    def composed() -> Tensor:
        at, kept = _replay(b, memory, state), inputs.logged(b, memory)
        return gdn.verify(g, rows, state, log, at, kept, _head_rows(b, memory, state, only_live=False))

    return g.effect(g.choose("gdn_verify", kernel, composed))


def gdn_advance(g: Graph, b: Batch, memory: RecurrentState, i: int, rows: gdn.Rows) -> Tensor:
    """Rows that are final. -> [S, Hv, T, L]."""
    state, log = memory.state[i], memory.log[i]

    def kernel() -> Tensor:
        sources = (rows.q, rows.k, rows.v, rows.decay, rows.beta, state, log, b.slots, memory.pending, b.live)
        return g.gdn_advance(*sources)

    def composed() -> Tensor:
        at, taken = _replay(b, memory, state), inputs.taken(b, memory)
        return gdn.advance(g, rows, state, log, at, taken, _head_rows(b, memory, state, only_live=True))

    return g.effect(g.choose("gdn_advance", kernel, composed))


def gdn_commit(g: Graph, b: Batch, memory: RecurrentState, i: int) -> Tensor:
    """What is pending goes into the state. -> the state behind it."""
    state, log = memory.state[i], memory.log[i]
    node = g.choose(
        "gdn_commit",
        lambda: g.gdn_commit(state, log, b.slots, memory.pending),
        lambda: gdn.commit(g, state, log, _replay(b, memory, state)),
    )
    return g.effect(node)


def _replay(b: Batch, memory: RecurrentState, state: Tensor) -> gdn.Replay:
    return inputs.replay(b, memory, state.shape[0], state.shape[2])


def _head_rows(b: Batch, memory: RecurrentState, state: Tensor, *, only_live: bool) -> Shown:
    return inputs.shown(b, memory, state.shape[0] * state.shape[2], only_live=only_live)


# -- convolution -------------------------------------------------------------------------------------------------------


def conv_verify(g: Graph, b: Batch, memory: RecurrentState, i: int, x: Tensor, w: Tensor) -> Tensor:
    """Rows that may still be rejected. x and result [C, T, L]."""
    rows, taps = memory.rows[i], w.shape[0]

    def composed() -> Tensor:
        shown = inputs.shown(b, memory, x.shape[0], only_live=False)
        at, kept = inputs.window(b, memory, taps), inputs.windowed(b, memory, taps)
        return conv.verify(g, x, w, rows, at, kept, shown)

    return g.effect(g.choose("conv_verify", lambda: g.conv_verify(x, w, rows, b.slots, memory.pending), composed))


def conv_advance(g: Graph, b: Batch, memory: RecurrentState, i: int, x: Tensor, w: Tensor) -> Tensor:
    """Rows that are final. x and result [C, T, L]."""
    rows, taps = memory.rows[i], w.shape[0]

    def composed() -> Tensor:
        shown = inputs.shown(b, memory, x.shape[0], only_live=True)
        at, last = inputs.window(b, memory, taps), inputs.last_window(b, memory, taps)
        return conv.advance(g, x, w, rows, at, last, shown)

    return g.effect(
        g.choose("conv_advance", lambda: g.conv_advance(x, w, rows, b.slots, memory.pending, b.live), composed)
    )


def conv_commit(g: Graph, b: Batch, memory: RecurrentState, i: int, taps: int) -> Tensor:
    """The window moves behind what is pending. -> the rows behind it."""
    rows = memory.rows[i]
    node = g.choose(
        "conv_commit",
        lambda: g.conv_commit(rows, b.slots, memory.pending),
        lambda: conv.commit(g, rows, inputs.window(b, memory, taps)),
    )
    return g.effect(node)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(
    g: Graph, b: Batch, kv: PagedKV, q: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int,
    causal: bool,
) -> Tensor:  # fmt: skip
    """q [D, Hq, T, L] over pages `keys`, `values` of `kv`, row t at position base + t. -> [D, Hq, T, L]."""

    def kernel() -> Tensor:
        places = (kv.table, b.slots, b.base, b.live)
        return g.attention(q, keys, values, *places, scale=scale, window=window, causal=causal)

    def composed() -> Tensor:
        seen = inputs.seen(b, kv, window, causal, q.shape[0] * q.shape[1])
        return composed_attention(g, q, keys, values, seen, scale)

    return g.choose("attention", kernel, composed)


# -- draft and tokens --------------------------------------------------------------------------------------------------


def dynamic_conv(g: Graph, x: Tensor, coefficients: Tensor, base: Tensor, side: int, block: int) -> Tensor:
    """One side of a dynamic convolution of x [E, n], see :meth:`DflashOps.dynamic_conv`. -> [E, n]."""
    sources = (x, coefficients, base, side, block)
    y = g.choose("dynamic_conv", lambda: g.dynamic_conv(*sources), lambda: draft.dynamic_conv(g, *sources))
    return g.reshape(y, x.shape[0], x.shape[1])


def select(
    g: Graph, b: Batch, logits: Tensor, edges: tuple[Tensor, Tensor, Tensor] | None, top_k: int
) -> Tensor | LatticeNodes:
    """The block I32 [T, L], anchor and proposals, or the lattice that the host walks. logits [V, T - 1, L] of the rows
    behind the anchor; `edges`: gate [R, T - 1, L] and the codebooks predecessor and successor [R, V], None for DFlash1.
    """
    anchors = _anchors(g, b)

    def kernel() -> Tensor:
        return g.select(logits, anchors, b.base, inputs.sampling(b), edges, top_k)

    def composed() -> LatticeNodes:
        if edges is None:
            return draft.unary_lattice(g, logits, top_k)
        return draft.selector_lattice(g, logits, anchors, *edges, top_k)

    return g.choose("select", kernel, composed)


def sample(g: Graph, b: Batch, history: History, block: Tensor, logits: Tensor) -> Tensor | None:
    """The target's tokens I32 [T, L] of logits [V, T, L], which `penalise` adjusts first; None: the host does both.

    block I32 [T, L]: the rows' own tokens.
    """

    def kernel() -> Tensor:
        memory = (history.history, history.penalties, history.bias)
        adjusted = g.penalise(logits, block, b.base, b.live, b.slots, *memory)
        if not g.computes(adjusted):
            raise ShapeError("penalise: the device has no kernel")
        return g.sample(adjusted, b.base, b.live, inputs.sampling(b))

    tokens = g.choose("sample", kernel, lambda: None, "host")
    if tokens is None:
        g.paths["penalise", "host"] += 1
        g.refusals.setdefault("penalise", g.refusals["sample"])
    else:
        g.paths["penalise", "kernel"] += 1
    return tokens


def accept(
    g: Graph, b: Batch, memory: RecurrentState, history: History, block: Tensor, tokens: Tensor | None
) -> Tensor | None:
    """I32 [T + 1, L]: count of final tokens, and they; None: the host compares.

    block I32 [T, L]: anchor and proposals; tokens I32 [T, L] as `sample` gives them.
    """

    def kernel() -> Tensor:
        if tokens is None:
            raise ShapeError("accept: the tokens are drawn on the host")
        return g.accept(tokens, block, b.live, b.slots, memory.pending, history.base, history.history)

    return g.choose("accept", kernel, lambda: None, "host")


def _anchors(g: Graph, b: Batch) -> Tensor:
    """The tokens of row 0 of each lane, I32 [L]."""
    rows = g.view(b.tokens, (1, b.lanes), (4 * b.rows,))
    return g.reshape(rows if rows.contiguous else g.cont(rows), b.lanes)
