"""ggml's own ops as builder methods. Each checks what ggml would assert."""

from __future__ import annotations

import math
from typing import Any

from .._native import ffi, lib
from .tensors import MAX_DIMS, ShapeError, Tensor, Type, check_shape

ROPE_NEOX = 2
FLOATS = (Type.F32, Type.F16, Type.BF16)


def need(condition: bool, op: str, reason: str, *tensors: Tensor) -> None:
    """Raise ShapeError naming the op, the reason and the tensors unless `condition` holds."""
    if not condition:
        raise ShapeError(f"{op}: {reason}; got {', '.join(map(repr, tensors))}")


class Ops:
    """Builder methods over a native context; a subclass provides `context` and wraps results."""

    @property
    def context(self) -> Any:
        """The native metadata context new nodes go to."""
        raise NotImplementedError

    def wrap(self, ptr: Any) -> Tensor:
        """A handle on a new node."""
        raise NotImplementedError

    # -- shapes ------------------------------------------------------------------------------------------------

    def reshape(self, a: Tensor, *shape: int) -> Tensor:
        """The same elements under another shape; `a` must be contiguous."""
        full = check_shape(a.type, shape)
        need(a.contiguous and math.prod(full) == a.nelements, "reshape", f"cannot become {list(shape)}", a)
        return self.wrap(lib.ggml_reshape_4d(self.context, a.ptr, *full))

    def view(self, a: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] = (), offset: int = 0) -> Tensor:
        """A window on `a`: `strides` in bytes of dimensions 1.., `offset` in bytes; must stay inside `a`."""
        full = check_shape(a.type, shape)
        packed = [a.type.row_bytes(full[0])]
        for n in full[1:3]:
            packed.append(packed[-1] * n)
        nb = [*strides, *packed[len(strides) :]]
        need(all(s >= 0 for s in nb) and offset >= 0, "view", "strides and offset are not negative", a)
        end = offset + a.type.row_bytes(full[0]) + sum((n - 1) * s for n, s in zip(full[1:], nb, strict=True))
        need(end <= a.nbytes, "view", f"{list(shape)} at {offset} ends at byte {end} of {a.nbytes}", a)
        return self.wrap(lib.ggml_view_4d(self.context, a.ptr, *full, *nb, offset))

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Dimension i of `a` becomes dimension axes[i]; no data moves."""
        need(sorted(axes) == list(range(MAX_DIMS)), "permute", f"axes {axes} are no permutation of 0..3", a)
        return self.wrap(lib.ggml_permute(self.context, a.ptr, *axes))

    def cont(self, a: Tensor) -> Tensor:
        """A packed copy."""
        return self.wrap(lib.ggml_cont(self.context, a.ptr))

    def repeat(self, a: Tensor, *shape: int) -> Tensor:
        """`a` tiled to `shape`, each number a multiple of a's."""
        full = check_shape(a.type, shape)
        need(a.type == Type.F32 and _repeats(a.shape, full), "repeat", f"F32 that tiles {list(shape)} is needed", a)
        return self.wrap(lib.ggml_repeat_4d(self.context, a.ptr, *full))

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """`a` then `b` along `dim`."""
        same = a.type == b.type and all(a.shape[d] == b.shape[d] for d in range(MAX_DIMS) if d != dim)
        need(0 <= dim < MAX_DIMS and same, "concat", f"shapes agree but for dimension {dim}", a, b)
        return self.wrap(lib.ggml_concat(self.context, a.ptr, b.ptr, dim))

    def pad_front(self, a: Tensor, rows: int) -> Tensor:
        """`rows` zero rows in front along dimension 1."""
        need(a.type == Type.F32 and a.strides[0] == 4 and 0 <= rows < 1 << 20, "pad_front", "F32 rows are needed", a)
        return self.wrap(lib.ggml_pad_ext(self.context, a.ptr, 0, 0, rows, 0, 0, 0, 0, 0))

    # -- arithmetic --------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, b broadcast over a."""
        return self._binary("add", lib.ggml_add, a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b, b broadcast over a."""
        return self._binary("sub", lib.ggml_sub, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b elementwise, b broadcast over a."""
        return self._binary("mul", lib.ggml_mul, a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """a * factor."""
        return self._unary("scale", lambda ctx, x: lib.ggml_scale(ctx, x, factor), a)

    def exp(self, a: Tensor) -> Tensor:
        """e to the power of a."""
        return self._unary("exp", lib.ggml_exp, a)

    def silu(self, a: Tensor) -> Tensor:
        """a * sigmoid(a)."""
        return self._unary("silu", lib.ggml_silu, a)

    def gelu(self, a: Tensor) -> Tensor:
        """The tanh approximation of GELU."""
        return self._unary("gelu", lib.ggml_gelu, a)

    def sigmoid(self, a: Tensor) -> Tensor:
        """1 / (1 + exp(-a))."""
        return self._unary("sigmoid", lib.ggml_sigmoid, a)

    def softplus(self, a: Tensor) -> Tensor:
        """log(1 + exp(a)), a itself above 20."""
        return self._unary("softplus", lib.ggml_softplus, a)

    def tanh(self, a: Tensor) -> Tensor:
        """tanh(a)."""
        return self._unary("tanh", lib.ggml_tanh, a)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        need(gate.type == up.type == Type.F32 and gate.shape == up.shape, "swiglu", "equal F32 shapes", gate, up)
        packed = gate.contiguous_from(1) and up.contiguous_from(1)
        need(packed, "swiglu", "packed rows are needed", gate, up)
        return self.wrap(lib.ggml_swiglu_split(self.context, gate.ptr, up.ptr))

    def rms_norm(self, a: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
        """a / sqrt(mean(a^2 over dimension 0) + eps), times `weight` when given."""
        need(a.type == Type.F32 and a.strides[0] == 4 and eps >= 0, "rms_norm", "F32 rows are needed", a)
        normed = self.wrap(lib.ggml_rms_norm(self.context, a.ptr, eps))
        return normed if weight is None else self.mul(normed, weight)

    def soft_max(self, a: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Softmax of a * scale + mask over dimension 0; a F32 [n, T, H, L], mask F32 [n, T, 1, L]."""
        need(a.type == mask.type == Type.F32 and a.contiguous and mask.contiguous, "soft_max", "packed F32", a, mask)
        fits = mask.shape == (a.shape[0], a.shape[1], 1, a.shape[3])
        need(fits, "soft_max", "a mask [n, T, 1, L] of rows [n, T, H, L] is needed", a, mask)
        return self.wrap(lib.ggml_soft_max_ext(self.context, a.ptr, mask.ptr, scale, 0.0))

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        """y[m, n] = sum_k w[k, m] x[k, n]; x F32, the higher dimensions of w broadcast over x's."""
        fits = w.shape[0] == x.shape[0] and not (x.shape[2] % w.shape[2] or x.shape[3] % w.shape[3])
        need(fits and x.type == Type.F32, "mul_mat", "w [k, m] and F32 x [k, n] are needed", w, x)
        packed = w.strides[0] == w.type.block_bytes and x.strides[0] == 4 and w.strides[1] >= w.strides[0]
        need(packed and w.type not in (Type.I32, Type.I64), "mul_mat", "float rows without gaps are needed", w, x)
        return self.wrap(lib.ggml_mul_mat(self.context, w.ptr, x.ptr))

    # -- rows --------------------------------------------------------------------------------------------------

    def get_rows(self, a: Tensor, ids: Tensor) -> Tensor:
        """F32 rows a[:, ids]; a [E, V], ids I32 [n]. The caller keeps ids within 0..V-1."""
        two_d = a.shape[2:] == (1, 1) and a.strides[0] == a.type.block_bytes
        need(two_d and a.type not in (Type.I32, Type.I64), "get_rows", "a float matrix is needed", a, ids)
        need(ids.type == Type.I32 and ids.shape[1:] == (1, 1, 1), "get_rows", "ids are an I32 vector", a, ids)
        return self.wrap(lib.ggml_get_rows(self.context, a.ptr, ids.ptr))

    def pick(self, a: Tensor, ids: Tensor) -> Tensor:
        """a[ids[j, row], row]: single elements of each row of F32 a [V, n]; ids I32 [k, n]. -> [k, n]."""
        need(a.type == Type.F32 and a.contiguous and a.shape[2:] == (1, 1), "pick", "an F32 matrix is needed", a, ids)
        fits = ids.type == Type.I32 and ids.shape[1:] == (a.shape[1], 1, 1)
        need(fits, "pick", "I32 ids per row are needed", a, ids)
        column = self.reshape(a, 1, a.shape[0], a.shape[1])
        return self.reshape(self.wrap(lib.ggml_get_rows(self.context, column.ptr, ids.ptr)), *ids.shape)

    def set_rows(self, a: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        """a[:, rows] = values in place, -> view of a; a [E, R] of a type that stores, values F32 [E, n], rows [n]."""
        fits = a.shape[0] == values.shape[0] and a.shape[2:] == values.shape[2:] == (1, 1)
        need(fits and values.type == Type.F32 and values.strides[0] == 4, "set_rows", "F32 rows are needed", a, values)
        need(a.type in (*FLOATS, Type.Q8_0) and a.contiguous, "set_rows", "F32, F16, BF16 or Q8_0 rows", a)
        vector = rows.type in (Type.I32, Type.I64) and rows.shape == (values.shape[1], 1, 1, 1)
        need(vector, "set_rows", "one I32 or I64 row number per value row is needed", rows, values)
        return self.wrap(lib.ggml_set_rows(self.context, a.ptr, values.ptr, rows.ptr))

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """I32 ids of the k largest of each row, in no particular order."""
        need(a.type == Type.F32 and a.contiguous and 1 <= k <= a.shape[0], "top_k", f"k {k} within the row", a)
        return self.wrap(lib.ggml_top_k(self.context, a.ptr, k))

    def rope(self, a: Tensor, positions: Tensor, dims: int, base: float, factors: Tensor | None = None) -> Tensor:
        """Rotate the first `dims` of each head, pairs (i, i + dims/2). a F32 [D, heads, n], positions I32 [n]."""
        need(a.type == Type.F32 and a.strides[0] == 4, "rope", "F32 rows are needed", a)
        need(0 < dims <= a.shape[0] and dims % 2 == 0, "rope", f"{dims} even dimensions within the head", a)
        vector = positions.type == Type.I32 and positions.shape == (a.shape[2], 1, 1, 1)
        need(vector, "rope", "one I32 position per row", a, positions)
        if factors is not None:
            need(factors.type == Type.F32 and factors.shape[0] >= dims // 2, "rope", "a factor per pair", factors)
        c = ffi.NULL if factors is None else factors.ptr
        args = (dims, ROPE_NEOX, 0, base, 1.0, 0.0, 1.0, 0.0, 0.0)
        return self.wrap(lib.ggml_rope_ext(self.context, a.ptr, positions.ptr, c, *args))

    # -- shared checks -----------------------------------------------------------------------------------------

    def _unary(self, op: str, make: Any, a: Tensor) -> Tensor:
        need(a.type == Type.F32 and a.contiguous_from(1), op, "F32 with packed rows is needed", a)
        return self.wrap(make(self.context, a.ptr))

    def _binary(self, op: str, make: Any, a: Tensor, b: Tensor) -> Tensor:
        need(a.type == b.type == Type.F32 and _repeats(b.shape, a.shape), op, "b must tile F32 a", a, b)
        need(a.strides[0] == b.strides[0] == 4, op, "rows without gaps are needed", a, b)
        return self.wrap(make(self.context, a.ptr, b.ptr))


def _repeats(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return all(big % little == 0 for little, big in zip(small, large, strict=True))
