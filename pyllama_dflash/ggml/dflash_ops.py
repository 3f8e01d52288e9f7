"""The engine's own ops (GGML_OP_DFLASH) as builder methods, and DFlash2's dynamic convolution composed of ggml's.

Shapes: L lanes of T rows, N slots, B rows of log per slot, S state width, Hk/Hv key, value heads, C channels, K taps.
Meaning and limits of each op: ggml_patches/README.md. The native constructor checks everything and says what is wrong.
"""

from __future__ import annotations

from typing import Any

from .._native import ffi, lib
from .ops import Ops, need
from .tensors import ShapeError, Tensor, Type

PAGE = 16


class DflashOps(Ops):
    """Builder methods of the op family."""

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
        """W x for w [k, m], x F32 [k, n]: by the own kernel where it takes these types and the device has it, whose
        result does not depend on n; else by ggml's. :attr:`Graph.nodes` shows which."""
        ptr = lib.ggml_dflash_mul_mat(self.context, w.ptr, x.ptr)
        if ptr != ffi.NULL:
            node = self.wrap(ptr)
            if self.computes(node):
                return node
        return self.mul_mat(w, x)

    def computes(self, node: Tensor) -> bool:
        """Whether the device that the graph is for computes `node`."""
        raise NotImplementedError

    def dynamic_conv(self, x: Tensor, coefficients: Tensor, base: Tensor, side: int, block: int) -> Tensor:
        """DFlash2's grouped dynamic convolution, composed.

        y[e, t] = sum_tap (base[e, tap, side] + coefficients[g(e), tap, side, t]) * x[e, t - tap], with x zero before
        each block. x [E, n], n a multiple of `block`; coefficients [G * K * 2, n], group fastest; base [E, K, 2].
        """
        width, n, taps = x.shape[0], x.shape[1], base.shape[1]
        groups = coefficients.shape[0] // (2 * taps)
        need(base.shape == (width, taps, 2, 1) and base.type == Type.F32, "dynamic_conv", "base F32 [E, K, 2]", x, base)
        fits = coefficients.shape == (groups * taps * 2, n, 1, 1) and groups > 0 and width % groups == 0
        need(fits and n % block == 0 and side in (0, 1), "dynamic_conv", "coefficients [G K 2, n]", x, coefficients)
        result = None
        for tap in range(min(taps, block)):
            part = 4 * groups * (tap + taps * side)
            dynamic = self.view(coefficients, (1, groups, n), (4, coefficients.strides[1]), part)
            spread = self.repeat(dynamic, width // groups, groups, n)
            fixed = self.view(base, (width // groups, groups), (), 4 * width * (tap + taps * side))
            weight = self.reshape(self.add(spread, fixed), width, n)
            term = self.mul(weight, self._shifted(x, tap, block))
            result = term if result is None else self.add(result, term)
        assert result is not None
        return result

    def _shifted(self, x: Tensor, tap: int, block: int) -> Tensor:
        """x delayed by `tap` rows inside each block, zeros in front."""
        if tap == 0:
            return x
        width, n = x.shape[0], x.shape[1]
        kept = self.view(x, (width, block - tap, n // block), (x.strides[1], x.strides[1] * block))
        return self.reshape(self.pad_front(kept, tap), width, n)

    def _dflash(self, make: Any, *sources: Tensor, extra: tuple[Any, ...] = ()) -> Tensor:
        ptr = make(self.context, *(s.ptr for s in sources), *extra)
        if ptr == ffi.NULL:
            reason = ffi.string(lib.ggml_dflash_last_error()).decode()
            raise ShapeError(f"{reason}; got {', '.join(map(repr, sources))}")
        return self.wrap(ptr)
