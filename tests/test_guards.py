"""What supports_op of every backend lets through: the literal sets, and nothing that is one step beside a valid node.

The native walk (test-dflash-ops --only walk) runs what is accepted; here the installed libraries are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from backend_nodes import BACKENDS, F32, I32, MAKE, Sizes, context, gated_delta_net, guard_accepts, supported, tensor

from pyllama_dflash._native import ffi, lib
from pyllama_dflash.ggml.devices import load_backends

WITHOUT_A_SYCL_KERNEL = {"mul_mat"}

TYPES = {"f32": F32, "f16": lib.GGML_TYPE_F16, "bf16": lib.GGML_TYPE_BF16, "q8_0": lib.GGML_TYPE_Q8_0,
         "q4_0": lib.GGML_TYPE_Q4_0, "q4_K": lib.GGML_TYPE_Q4_K, "q5_K": lib.GGML_TYPE_Q5_K,
         "q6_K": lib.GGML_TYPE_Q6_K, "iq4_xs": lib.GGML_TYPE_IQ4_XS, "q2_K": lib.GGML_TYPE_Q2_K,
         "iq4_nl": lib.GGML_TYPE_IQ4_NL, "i32": I32}  # fmt: skip

LITERAL = [
    (("gdn_verify", "gdn_advance", "gdn_commit"), "S", {16, 32, 64, 128}, range(1, 260), {}),
    (("attention",), "D", {16, 32, 64, 128, 256}, range(1, 600), {"k_type": F32, "v_type": F32}),
    (("attention",), "Hq", {1, 2, 3, 4, 5, 6, 7, 8, 16}, range(1, 40), {"Hkv": 1}),
    (("select",), "top_k", {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}, range(-1, 40), {}),
    (
        ("gdn_verify", "conv_verify", "sample", "accept", "dynamic_conv", "penalise"),
        "T",
        set(range(1, 17)),
        range(20),
        {},
    ),
    (("select",), "P", set(range(1, 16)), range(20), {}),
    (("dynamic_conv",), "taps", set(range(1, 9)), range(12), {}),
    (("place",), "rows", {1, 2, 17, 1 << 20}, (-1, 0, 1, 2, 17, 1 << 20, (1 << 20) + 1), {"L": 1}),
    (("place",), "spare", {0, 1, 160}, (-160, -1, 0, 1, 160), {}),
    (("penalise",), "biases", {1, 2, 4096}, (1, 2, 4096, 4097), {}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ops, field, accepted, asked, beside", LITERAL)
def test_literal_sets(
    backend: str, ops: tuple[str, ...], field: str, accepted: set[int], asked: Sequence[int], beside: dict[str, int]
) -> None:
    for op in ops:
        assert {n for n in asked if supported(op, BACKENDS[backend], **{**beside, field: n})} == accepted, op


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "op, field, accepted",
    [
        ("attention", "k_type", {"f32", "f16", "q8_0"}),
        ("attention", "v_type", {"f32", "f16", "q8_0"}),
        ("select", "predecessor_type", {"f32", "f16", "bf16", "q8_0"}),
        ("select", "successor_type", {"f32", "f16", "bf16", "q8_0"}),
        ("mul_mat", "w_type", {"iq4_xs", "q4_K", "q5_K", "q6_K", "q8_0"}),
    ],
)
def test_literal_types(backend: str, op: str, field: str, accepted: set[str]) -> None:
    expected = set() if backend == "SYCL" and op in WITHOUT_A_SYCL_KERNEL else accepted
    assert {name for name, kind in TYPES.items() if supported(op, BACKENDS[backend], **{field: kind})} == expected


@pytest.mark.parametrize("op", MAKE)
def test_kernels_of_each_backend(op: str) -> None:
    has_kernel = {name for name, number in BACKENDS.items() if supported(op, number)}
    assert has_kernel == set(BACKENDS) - ({"SYCL"} if op in WITHOUT_A_SYCL_KERNEL else set())
    assert not supported(op, len(BACKENDS))


Change = Callable[[Any, Any], None]


def damages(node: Any) -> list[tuple[str, Change]]:
    """Ways to break a valid node, each alone; every one has to be refused."""
    ways: list[tuple[str, Change]] = []

    def add(what: str, change: Change) -> None:
        ways.append((what, change))

    def set_source(i: int, make: Callable[[Any], Any]) -> Change:
        def change(ctx: Any, n: Any) -> None:
            n.src[i] = make(ctx)

        return change

    def edit_source(i: int, edit: Callable[[Any], None]) -> Change:
        return lambda ctx, n: edit(n.src[i])

    def other_type(t: Any) -> None:
        t.type = lib.GGML_TYPE_F64

    def odd_stride(t: Any) -> None:
        t.nb[0] *= 2

    def larger(t: Any) -> None:
        t.ne[3] += 1

    def parameter(i: int) -> Change:
        def change(ctx: Any, n: Any) -> None:
            n.op_params[i] = -7  # no sub-op, no count, no flag

        return change

    for i in range(len(node.src)):
        if node.src[i] == ffi.NULL:
            add(f"source {i} set", set_source(i, lambda ctx: tensor(ctx, F32, 4)))
            continue
        add(f"source {i} missing", set_source(i, lambda ctx: ffi.NULL))
        add(f"source {i} of another type", edit_source(i, other_type))
        add(f"source {i} with its elements apart", edit_source(i, odd_stride))
        add(f"source {i} larger", edit_source(i, larger))
    scale = {1} if lib.ggml_dflash_get_op(node) == lib.GGML_DFLASH_OP_ATTENTION else set()  # any bits are a number
    for i in set(range(len(node.op_params))) - scale:
        add(f"parameter {i}", parameter(i))
    return ways


@pytest.mark.parametrize("op", MAKE)
def test_one_step_beside_a_valid_node(op: str) -> None:
    load_backends()
    device = lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU)
    with context() as ctx:
        ways = damages(MAKE[op](ctx, Sizes()))
    assert len(ways) > 20
    for i, (what, _) in enumerate(ways):
        with context() as ctx:
            node = MAKE[op](ctx, Sizes())
            assert lib.ggml_backend_dev_supports_op(device, node), what
            damages(node)[i][1](ctx, node)
            reason = lib.ggml_dflash_check(node)
            assert reason != ffi.NULL, what
            assert ffi.string(reason).decode().startswith((f"{op}: ", "dflash: ")), what
            assert not any(lib.ggml_dflash_supported(number, node) for number in BACKENDS.values()), what
            assert not lib.ggml_backend_dev_supports_op(device, node), what


#
# upstream's GATED_DELTA_NET
#


def test_guard_widths_and_snapshots() -> None:
    assert {n for n in range(1, 300) if guard_accepts(S=n)} == {16, 32, 64, 128}
    assert {n for n in range(9) if guard_accepts(K=n)} == set(range(1, 9))
    assert guard_accepts(S=64, gates=64) and guard_accepts(S=64, gates=1) and not guard_accepts(S=64, gates=2)
    assert {n for n in range(1, 7) if guard_accepts(H=6, Hk=n)} == {1, 2, 3, 6}


def test_guard_layouts() -> None:
    def apart(*sources: int) -> Callable[[Any], None]:
        def change(node: Any) -> None:
            for i in sources:
                node.src[i].nb[2] += 64
                node.src[i].nb[3] = node.src[i].nb[2] * node.src[i].ne[2]

        return change

    assert guard_accepts(apart(0, 1)) and guard_accepts(apart(2)), "q and k alike, and v"
    for sources in ((0,), (1,), (3,), (4,), (5,)):
        assert not guard_accepts(apart(*sources)), sources


def test_guard_types_parameters_and_sources() -> None:
    def parameter(i: int) -> Callable[[Any], None]:
        return lambda node: node.op_params.__setitem__(i, 1)

    def kind(i: int) -> Callable[[Any], None]:
        return lambda node: setattr(node.src[i], "type", lib.GGML_TYPE_F16)

    def missing(i: int) -> Callable[[Any], None]:
        return lambda node: node.src.__setitem__(i, ffi.NULL)

    def extra(i: int) -> Callable[[Any], None]:
        return lambda node: node.src.__setitem__(i, node.src[0])

    assert guard_accepts()
    for i in range(1, 16):
        assert not guard_accepts(parameter(i)), f"parameter {i}"
    for i in range(6):
        assert not guard_accepts(kind(i)) and not guard_accepts(missing(i)), f"source {i}"
    for i in range(6, 10):
        assert not guard_accepts(extra(i)), f"source {i}"


def test_guard_of_other_nodes() -> None:
    assert lib.ggml_dflash_check_gated_delta_net(ffi.NULL) != ffi.NULL
    with context() as ctx:
        node = gated_delta_net(ctx)
        node.op = 0
        assert ffi.string(lib.ggml_dflash_check_gated_delta_net(node)) == b"gated_delta_net: not such a node"
