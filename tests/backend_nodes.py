"""Nodes of GGML_OP_DFLASH and GATED_DELTA_NET without data, by their sizes: something to ask a backend's predicate.

Shapes and letters are those of ggml_patches/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pyllama_dflash._native import ffi, lib

BACKENDS = {"CPU": lib.GGML_DFLASH_BACKEND_CPU, "CUDA": lib.GGML_DFLASH_BACKEND_CUDA,
            "HIP": lib.GGML_DFLASH_BACKEND_HIP, "SYCL": lib.GGML_DFLASH_BACKEND_SYCL}  # fmt: skip

F32, I32 = lib.GGML_TYPE_F32, lib.GGML_TYPE_I32


@dataclass(frozen=True)
class Sizes:
    """Sizes, types and parameters of a valid node of any sub-op."""

    S: int = 32
    Hk: int = 1
    Hv: int = 6
    T: int = 3
    L: int = 2
    N: int = 3
    B: int = 16
    C: int = 48
    D: int = 256
    Hq: int = 4
    Hkv: int = 2
    pages: int = 4
    max_pages: int = 5
    k_type: int = lib.GGML_TYPE_F16
    v_type: int = lib.GGML_TYPE_F16
    window: int = 0
    causal: int = 1
    K: int = 512
    M: int = 24
    w_type: int = lib.GGML_TYPE_Q8_0
    G: int = 6
    taps: int = 2
    V: int = 320
    P: int = 3
    top_k: int = 4
    edges: bool = True
    R: int = 256
    predecessor_type: int = lib.GGML_TYPE_F16
    successor_type: int = lib.GGML_TYPE_F16
    positions: int = 70
    biases: int = 5
    rows: int = 3
    ring_pages: int = 6
    fill: int = -1
    spare: int = 160


@contextmanager
def context() -> Iterator[Any]:
    """A ggml context for metadata."""
    ctx = lib.ggml_init({"mem_size": 64 * lib.ggml_tensor_overhead(), "mem_buffer": ffi.NULL, "no_alloc": True})
    try:
        yield ctx
    finally:
        lib.ggml_free(ctx)


def tensor(ctx: Any, kind: int, *shape: int) -> Any:
    """A tensor of a shape in ggml's order; its rows have to be whole blocks of the type."""
    return lib.ggml_new_tensor_4d(ctx, kind, *(*shape, 1, 1, 1)[:4])


Make = Callable[[Any, Sizes], Any]


def _gdn(name: str) -> Make:
    def make(ctx: Any, z: Sizes) -> Any:
        memory = [tensor(ctx, F32, z.S, z.S, z.Hv, z.N), tensor(ctx, F32, 2 * z.S + 1, z.Hv, z.B, z.N),
                  tensor(ctx, I32, z.L), tensor(ctx, I32, z.N)]  # fmt: skip
        qk = [tensor(ctx, F32, z.S, z.Hk, z.T, z.L) for _ in range(2)]
        rows = [*qk, tensor(ctx, F32, z.S, z.Hv, z.T, z.L), *(tensor(ctx, F32, z.Hv, z.T, z.L) for _ in range(2))]
        last = [tensor(ctx, I32, z.L)] if name == "gdn_advance" else []
        return _call(ctx, name, *([] if name == "gdn_commit" else rows), *memory, *last)

    return make


def _conv(name: str) -> Make:
    def make(ctx: Any, z: Sizes) -> Any:
        memory = [tensor(ctx, F32, z.C, 3 + z.B, z.N), tensor(ctx, I32, z.L), tensor(ctx, I32, z.N)]
        rows = [] if name == "conv_commit" else [tensor(ctx, F32, z.C, z.T, z.L), tensor(ctx, F32, 4, z.C)]
        last = [tensor(ctx, I32, z.L)] if name == "conv_advance" else []
        return _call(ctx, name, *rows, *memory, *last)

    return make


def _attention(ctx: Any, z: Sizes) -> Any:
    node = _call(
        ctx, "attention", tensor(ctx, F32, z.D, z.Hq, z.T, z.L), tensor(ctx, z.k_type, z.D, z.Hkv, 16 * z.pages),
        tensor(ctx, z.v_type, z.D, z.Hkv, 16 * z.pages), tensor(ctx, I32, z.max_pages, z.N), tensor(ctx, I32, z.L),
        tensor(ctx, I32, z.L), tensor(ctx, I32, z.L), 0.1, z.window, True,
    )  # fmt: skip
    if node != ffi.NULL:
        node.op_params[3] = z.causal
    return node


def _mul_mat(ctx: Any, z: Sizes) -> Any:
    return _call(ctx, "mul_mat", tensor(ctx, z.w_type, z.K, z.M), tensor(ctx, F32, z.K, z.T, z.L))


def _dynamic_conv(ctx: Any, z: Sizes) -> Any:
    x, coef = tensor(ctx, F32, z.C, z.T, z.L), tensor(ctx, F32, z.G, z.taps, z.T, z.L)
    return _call(ctx, "dynamic_conv", x, coef, tensor(ctx, F32, z.C, z.taps))


def _select(ctx: Any, z: Sizes) -> Any:
    edges = [ffi.NULL] * 3
    if z.edges:
        edges = [tensor(ctx, F32, z.R, z.P, z.L), tensor(ctx, z.predecessor_type, z.R, z.V),
                 tensor(ctx, z.successor_type, z.R, z.V)]  # fmt: skip
    lists = [tensor(ctx, I32, z.L), tensor(ctx, I32, z.L), tensor(ctx, I32, lib.GGML_DFLASH_SAMPLING_WORDS, z.L)]
    return _call(ctx, "select", tensor(ctx, F32, z.V, z.P, z.L), *lists, *edges, z.top_k)


def _sample(ctx: Any, z: Sizes) -> Any:
    lists = [tensor(ctx, I32, z.L), tensor(ctx, I32, z.L), tensor(ctx, I32, lib.GGML_DFLASH_SAMPLING_WORDS, z.L)]
    return _call(ctx, "sample", tensor(ctx, F32, z.V, z.T, z.L), *lists)


def _accept(ctx: Any, z: Sizes) -> Any:
    blocks = [tensor(ctx, I32, z.T, z.L) for _ in range(2)]
    lists = [tensor(ctx, I32, n) for n in (z.L, z.L, z.N, z.N)]
    return _call(ctx, "accept", *blocks, *lists, tensor(ctx, I32, z.positions, z.N))


def _place(ctx: Any, z: Sizes) -> Any:
    lists = [tensor(ctx, I32, n) for n in (z.L, z.L, z.N)]
    history, table = tensor(ctx, I32, z.positions, z.N), tensor(ctx, I32, z.max_pages, z.N)
    ring = tensor(ctx, I32, z.ring_pages, z.N) if z.ring_pages else ffi.NULL
    return _call(ctx, "place", *lists, history, table, ring, z.rows, z.fill, z.spare, 0)


def _penalise(ctx: Any, z: Sizes) -> Any:
    rows = [tensor(ctx, F32, z.V, z.T, z.L), tensor(ctx, I32, z.T, z.L), *(tensor(ctx, I32, z.L) for _ in range(3))]
    memory = [tensor(ctx, I32, z.positions, z.N), tensor(ctx, F32, 2, z.N), tensor(ctx, I32, 2, z.biases, z.N)]
    return _call(ctx, "penalise", *rows, *memory)


def _call(ctx: Any, name: str, *arguments: Any) -> Any:
    return getattr(lib, f"ggml_dflash_{name}")(ctx, *arguments)


MAKE: dict[str, Make] = {
    "gdn_verify": _gdn("gdn_verify"), "gdn_advance": _gdn("gdn_advance"), "gdn_commit": _gdn("gdn_commit"),
    "conv_verify": _conv("conv_verify"), "conv_advance": _conv("conv_advance"), "conv_commit": _conv("conv_commit"),
    "attention": _attention, "mul_mat": _mul_mat, "dynamic_conv": _dynamic_conv, "select": _select,
    "sample": _sample, "accept": _accept, "place": _place, "penalise": _penalise,
}  # fmt: skip


def supported(op: str, backend: int, **changes: Any) -> bool:
    """Whether the predicate of the backend takes a node of these sizes, parameters and types."""
    with context() as ctx:
        node = MAKE[op](ctx, replace(Sizes(), **changes))
        return node != ffi.NULL and bool(lib.ggml_dflash_supported(backend, node))


#
# upstream's op
#


def _op_number(name: str) -> int:
    return next(n for n in range(lib.GGML_OP_COUNT) if ffi.string(lib.ggml_op_name(n)) == name.encode())


def gated_delta_net(ctx: Any, S: int = 32, Hk: int = 2, H: int = 4, T: int = 3, N: int = 2, K: int = 1,
                    gates: int = 1) -> Any:  # fmt: skip
    """q, k [S,Hk,T,N], v [S,H,T,N], g [gates,H,T,N], beta [1,H,T,N], state [S,S,H,N], K snapshots; filled in by hand,
    because upstream's constructor aborts."""
    node = tensor(ctx, F32, S * H, T * N + K * S * N)
    node.op = _op_number("GATED_DELTA_NET")
    node.op_params[0] = K
    shapes = [(S, Hk, T, N), (S, Hk, T, N), (S, H, T, N), (gates, H, T, N), (1, H, T, N), (S, S, H, N)]
    for i, shape in enumerate(shapes):
        node.src[i] = tensor(ctx, F32, *shape)
    return node


def guard_accepts(change: Callable[[Any], None] = lambda node: None, **sizes: int) -> bool:
    """Whether our guard takes such a node, changed."""
    with context() as ctx:
        node = gated_delta_net(ctx, **sizes)
        change(node)
        return bool(lib.ggml_dflash_check_gated_delta_net(node) == ffi.NULL)
