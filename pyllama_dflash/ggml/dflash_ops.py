"""The engine's own ops (GGML_OP_DFLASH) as builder methods, and the choice between a kernel and what stands in for it.

Shapes: L lanes of T rows, N slots, B rows of log per slot, S state width, Hk/Hv key, value heads, C channels, K taps;
in the ops of tokens V vocabulary, P proposals, H positions of history, M and R pages of a table and a ring.
Meaning and limits of each op: ggml_patches/README.md. The native constructor checks everything and says what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from .._native import ffi, lib
from .ops import Ops, need
from .tensors import ShapeError, Tensor, Type

PAGE = 16

PathName = Literal["kernel", "composed", "host"]
R = TypeVar("R")


class DflashOps(Ops):
    """Builder methods of the op family.

    `paths` counts every use of an op by (op, path): its kernel, ggml's own ops, or the host. `refusals` says of an op
    why some node of it did not go to the kernel.
    """

    paths: Counter[tuple[str, PathName]]
    refusals: dict[str, str]

    def computes(self, node: Tensor) -> bool:
        """Whether the device that the graph is for computes `node`."""
        raise NotImplementedError

    def choose(
        self, op: str, kernel: Callable[[], Tensor], otherwise: Callable[[], R], path: PathName = "composed"
    ) -> Tensor | R:
        """The node that `kernel` makes if the op takes it and the device computes it, else what `otherwise` gives.

        A node that is not taken stays outside the graph. `path` names the way that `otherwise` goes.
        """
        reason = f"{op}: the device has no kernel"
        try:
            node = kernel()
            if self.computes(node):
                self.paths[op, "kernel"] += 1
                return node
        except ShapeError as error:
            reason = str(error)
        self.refusals.setdefault(op, reason)
        self.paths[op, path] += 1
        return otherwise()

    # -- target ------------------------------------------------------------------------------------------------

    def gdn_verify(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, log: Tensor, slots: Tensor,
        pending: Tensor,
    ) -> Tensor:  # fmt: skip
        """Promote each slot's state by its pending log rows, then run T rows from it and log them. -> [S, Hv, T, L]."""
        return self._dflash(lib.ggml_dflash_gdn_verify, q, k, v, g, beta, state, log, slots, pending)

    def gdn_advance(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, log: Tensor, slots: Tensor,
        pending: Tensor, live: Tensor,
    ) -> Tensor:  # fmt: skip
        """As gdn_verify for rows that are final: the state behind the `live` rows is kept. -> [S, Hv, T, L]."""
        return self._dflash(lib.ggml_dflash_gdn_advance, q, k, v, g, beta, state, log, slots, pending, live)

    def gdn_commit(self, state: Tensor, log: Tensor, slots: Tensor, pending: Tensor) -> Tensor:
        """Promote the state by the pending log rows. A view of `state`."""
        return self._dflash(lib.ggml_dflash_gdn_commit, state, log, slots, pending)

    def conv_verify(self, x: Tensor, w: Tensor, rows: Tensor, slots: Tensor, pending: Tensor) -> Tensor:
        """SiLU of the K-tap causal convolution over the slot's window and x [C, T, L]; keeps x. -> [C, T, L]."""
        return self._dflash(lib.ggml_dflash_conv_verify, x, w, rows, slots, pending)

    def conv_advance(self, x: Tensor, w: Tensor, rows: Tensor, slots: Tensor, pending: Tensor, live: Tensor) -> Tensor:
        """As conv_verify for rows that are final: the window moves behind the `live` rows. -> [C, T, L]."""
        return self._dflash(lib.ggml_dflash_conv_advance, x, w, rows, slots, pending, live)

    def conv_commit(self, rows: Tensor, slots: Tensor, pending: Tensor) -> Tensor:
        """Move the window behind the pending rows. A view of `rows`."""
        return self._dflash(lib.ggml_dflash_conv_commit, rows, slots, pending)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, slots: Tensor, base: Tensor, live: Tensor, *,
        scale: float, window: int, causal: bool,
    ) -> Tensor:  # fmt: skip
        """Attention of q [D, Hq, T, L] over paged k, v [D, Hkv, 16 P]; row t stands at position base + t."""
        return self._dflash(lib.ggml_dflash_attention, q, k, v, table, slots, base, live, extra=(scale, window, causal))

    def product(self, w: Tensor, x: Tensor) -> Tensor:
        """W x for w [k, m], x F32 [k, n]: by the own kernel, no column of which depends on n, or by ggml's product."""
        return self.choose("mul_mat", lambda: self._own_product(w, x), lambda: self.mul_mat(w, x))

    def product_by_column(self, w: Tensor, x: Tensor) -> Tensor:
        """As :meth:`product`, but no column's result depends on n: where ggml multiplies, each is a product of its own,
        which reads w again."""

        def composed() -> Tensor:
            k, n = x.shape[:2]
            return self.reshape(self.mul_mat(w, self.reshape(x, k, 1, n)), w.shape[1], n)

        return self.choose("mul_mat", lambda: self._own_product(w, x), composed)

    def _own_product(self, w: Tensor, x: Tensor) -> Tensor:
        return self._dflash(lib.ggml_dflash_mul_mat, w, x)

    # -- draft -------------------------------------------------------------------------------------------------

    def dynamic_conv(self, x: Tensor, coefficients: Tensor, base: Tensor, side: int, block: int) -> Tensor:
        """DFlash2's grouped dynamic convolution of the blocks of x [E, n], n a multiple of `block`. -> [E, T, L].

        coefficients [G * K * 2, n] as their projection leaves them: group fastest, then tap, then side; base [E, K, 2].
        The coefficients of a side are read where they lie.
        """
        groups = check_dynamic_conv(x, coefficients, base, side, block)
        (width, n), taps, row = x.shape[:2], base.shape[1], coefficients.strides[1]
        rows = self.view(x, (width, block, n // block), (x.strides[1], x.strides[1] * block))
        shape = (groups, taps, block, n // block)
        dynamic = self.view(coefficients, shape, (4 * groups, row, row * block), 4 * groups * taps * side)
        fixed = self.view(base, (width, taps), (base.strides[1],), base.strides[2] * side)
        return self._dflash(lib.ggml_dflash_dynamic_conv, rows, dynamic, fixed)

    def select(
        self, logits: Tensor, anchors: Tensor, base: Tensor, sampling: Tensor,
        edges: tuple[Tensor, Tensor, Tensor] | None, top_k: int,
    ) -> Tensor:  # fmt: skip
        """The draft's block I32 [P + 1, L]: anchors I32 [L] and the proposals by logits [V, P, L].

        base I32 [L], sampling I32 [8, L]; `edges`: gate [R, P, L] and the codebooks of predecessors and successors
        [R, V]. A lane whose anchor is no token gives zeros.
        """
        sources = (logits, anchors, base, sampling, *(edges or (None, None, None)))
        return self._dflash(lib.ggml_dflash_select, *sources, extra=(top_k,))

    # -- tokens ------------------------------------------------------------------------------------------------

    def place(
        self, slots: Tensor, live: Tensor, base: Tensor, history: Tensor, table: Tensor, ring: Tensor | None, *,
        rows: int, fill: int, spare: int, ring_spare: int,
    ) -> Tensor:  # fmt: skip
        """Where the rows of a run stand. -> I32 [L (4 rows + 1)], or [L (3 rows + 1)] without a ring.

        slots, live I32 [L]; base I32 [N], history I32 [H, N], table I32 [M, N], ring I32 [R, N]. The result is planes
        of `rows` numbers a lane: tokens, positions, rows of the pages, rows of the ring; then the lanes' base. `fill`
        is the token behind the anchor, -1: the history's. Dead rows go to the pages that start at `spare` and
        `ring_spare`.
        """
        sources = (slots, live, base, history, table, ring)
        return self._dflash(lib.ggml_dflash_place, *sources, extra=(rows, fill, spare, ring_spare))

    def penalise(
        self, logits: Tensor, block: Tensor, base: Tensor, live: Tensor, slots: Tensor, history: Tensor,
        penalties: Tensor, bias: Tensor,
    ) -> Tensor:  # fmt: skip
        """Biases, then penalties of the tokens so far, in logits [V, T, L] themselves. A view of `logits`.

        block I32 [T, L], base, live, slots I32 [L]; history I32 [H, N], penalties F32 [2, N] (repetition, presence),
        bias I32 [2, NB, N] (token id, F32 bits; an id below 0 ends a list).
        """
        sources = (logits, block, base, live, slots, history, penalties, bias)
        return self._dflash(lib.ggml_dflash_penalise, *sources)

    def sample(self, logits: Tensor, base: Tensor, live: Tensor, sampling: Tensor) -> Tensor:
        """The target's tokens I32 [T, L] of logits [V, T, L]; -1 for dead rows and rows that are not finite."""
        return self._dflash(lib.ggml_dflash_sample, logits, base, live, sampling)

    def accept(
        self, tokens: Tensor, block: Tensor, live: Tensor, slots: Tensor, pending: Tensor, base: Tensor, history: Tensor
    ) -> Tensor:
        """I32 [T + 1, L]: how many of the tokens [T, L] are final, and these.

        block I32 [T, L]: the anchor and what was proposed. Writes pending and base I32 [N] and history I32 [H, N].
        """
        return self._dflash(lib.ggml_dflash_accept, tokens, block, live, slots, pending, base, history)

    def _dflash(self, make: Any, *sources: Tensor | None, extra: tuple[Any, ...] = ()) -> Tensor:
        ptr = make(self.context, *(ffi.NULL if s is None else s.ptr for s in sources), *extra)
        if ptr == ffi.NULL:
            reason = ffi.string(lib.ggml_dflash_last_error()).decode()
            raise ShapeError(f"{reason}; got {', '.join(map(repr, sources))}")
        return self.wrap(ptr)


def check_dynamic_conv(x: Tensor, coefficients: Tensor, base: Tensor, side: int, block: int) -> int:
    """The number of groups of a dynamic convolution; ShapeError if its sources do not fit each other."""
    (width, n), taps = x.shape[:2], base.shape[1]
    groups = coefficients.shape[0] // (2 * taps)
    need(base.shape == (width, taps, 2, 1) and base.type == Type.F32, "dynamic_conv", "base F32 [E, K, 2]", x, base)
    fits = coefficients.shape == (groups * taps * 2, n, 1, 1) and groups > 0 and width % groups == 0
    need(fits and n % block == 0 and side in (0, 1), "dynamic_conv", "coefficients [G K 2, n]", x, coefficients)
    need(x.shape[2:] == (1, 1), "dynamic_conv", "x [E, n]", x)
    return groups
