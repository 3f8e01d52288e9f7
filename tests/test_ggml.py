"""The ggml layer: arithmetic against NumPy, memory, and that nothing ggml would assert on gets through to it."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_dflash.errors import DeviceError, EngineClosed, RequestError
from pyllama_dflash.ggml import Backend, Graph, ShapeError, TensorSet, Type, choose_device, list_devices

F32, F16, I32, I64, Q8 = Type.F32, Type.F16, Type.I32, Type.I64, Type.Q8_0


@pytest.fixture(scope="module")
def backend():
    opened = Backend(choose_device("cpu")[0], threads=1)
    yield opened
    opened.close()


@pytest.fixture
def g(backend):
    with Graph(backend, max_nodes=256) as graph:
        yield graph


def run(g, out, **values):
    g.build()
    for tensor, array in values.values():
        tensor.set(array)
    g.run()
    return out.get()


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_arithmetic(g):
    x, w = g.input("x", F32, 32, 5), g.input("w", F32, 32, 3)
    a, b = random(5, 32), random(3, 32)
    y = g.output(g.silu(g.rms_norm(g.add(g.mul_mat(w, x), g.mul_mat(w, x)), 1e-6)), "y")
    got = run(g, y, x=(x, a), w=(w, b)).reshape(5, 3)
    want = 2 * a @ b.T
    want = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-6)
    assert np.allclose(got, want / (1 + np.exp(-want)), atol=1e-5)


@pytest.mark.parametrize("kind", [I32, I64])
def test_pick_and_rows(g, kind):
    x, ids = g.input("x", F32, 6, 4), g.input("ids", I32, 2, 4)
    table, rows = g.input("table", F32, 6, 4), g.input("rows", kind, 4)
    y = g.output(g.pick(x, ids), "y")
    z = g.output(g.set_rows(table, x, rows), "z")
    a = random(4, 6)
    chosen = np.array([[0, 5], [1, 1], [2, 3], [4, 0]], np.int32)
    got = run(
        g, y, x=(x, a), ids=(ids, chosen), rows=(rows, np.array([3, 1, 0, 2], np.int32 if kind == I32 else np.int64))
    )
    assert np.array_equal(got.reshape(4, 2), np.take_along_axis(a, chosen, 1))
    assert np.array_equal(z.get().reshape(4, 6)[[3, 1, 0, 2]], a)


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 2, 8])
def test_dynamic_convolution(g, taps, block):
    from reference.dynamic_conv import dynamic_conv

    width, groups, lanes = 32, 4, 3
    x, c = random(block * lanes, width), random(block * lanes, groups * taps * 2)
    base = random(2, taps, width)
    tx, tc = g.input("x", F32, width, block * lanes), g.input("c", F32, groups * taps * 2, block * lanes)
    tb = g.input("base", F32, width, taps, 2)
    y = [g.output(g.dynamic_conv(tx, tc, tb, side, block), "y") for side in (0, 1)]
    run(g, y[0], x=(tx, x), c=(tc, c), b=(tb, base))
    for side in (0, 1):
        parts = [slice(i * block, (i + 1) * block) for i in range(lanes)]
        want = np.concatenate([dynamic_conv(x[p], c[p], base, side, width // groups) for p in parts])
        assert np.allclose(y[side].get().reshape(want.shape), want, atol=1e-5)


def test_inputs_keep_their_values_between_runs(g):
    x = g.input("x", F32, 8)
    y = g.output(g.scale(g.silu(g.scale(x, 2.0)), 1.0), "y")
    first = run(g, y, x=(x, random(8)))
    g.run()
    assert np.array_equal(first, y.get())


BAD = {
    "reshape": lambda g, t: g.reshape(t.x, 7, 7),
    "reshape of a permuted": lambda g, t: g.reshape(g.permute(t.x, 1, 0, 2, 3), 32, 5),
    "view past the end": lambda g, t: g.view(t.x, (32, 5), (), 4),
    "view negative": lambda g, t: g.view(t.x, (32, 1), (-128,), 0),
    "permute": lambda g, t: g.permute(t.x, 0, 0, 2, 3),
    "repeat": lambda g, t: g.repeat(t.x, 33, 5),
    "concat": lambda g, t: g.concat(t.x, t.w, 0),
    "concat dim": lambda g, t: g.concat(t.x, t.x, 4),
    "add": lambda g, t: g.add(t.x, t.w),
    "add types": lambda g, t: g.add(t.x, t.half),
    "mul_mat": lambda g, t: g.mul_mat(t.narrow, t.x),
    "mul_mat of ids": lambda g, t: g.mul_mat(t.ids, t.x),
    "mul_mat by half": lambda g, t: g.mul_mat(t.w, t.half),
    "get_rows": lambda g, t: g.get_rows(t.x, t.rows),
    "get_rows 2d": lambda g, t: g.get_rows(t.x, t.pairs),
    "set_rows": lambda g, t: g.set_rows(t.x, t.x, t.half),
    "set_rows 2d": lambda g, t: g.set_rows(t.x, t.x, t.pairs),
    "set_rows count": lambda g, t: g.set_rows(t.x, t.w, t.rows),
    "pick": lambda g, t: g.pick(t.x, t.ids),
    "top_k 0": lambda g, t: g.top_k(t.x, 0),
    "top_k wide": lambda g, t: g.top_k(t.x, 33),
    "rope odd": lambda g, t: g.rope(t.heads, t.ids, 3, 1e4),
    "rope wide": lambda g, t: g.rope(t.heads, t.ids, 34, 1e4),
    "rope positions": lambda g, t: g.rope(t.heads, t.pairs, 8, 1e4),
    "swiglu": lambda g, t: g.swiglu(t.x, t.w),
    "silu of ids": lambda g, t: g.silu(t.ids),
    "rms_norm of half": lambda g, t: g.rms_norm(t.half, 1e-6),
    "pad": lambda g, t: g.pad_front(t.x, -1),
    "dynamic_conv": lambda g, t: g.dynamic_conv(t.x, t.w, t.heads, 0, 5),
    "gdn_verify": lambda g, t: g.gdn_verify(t.x, t.x, t.x, t.x, t.x, t.x, t.x, t.ids, t.ids),
    "conv_verify": lambda g, t: g.conv_verify(t.x, t.w, t.x, t.ids, t.ids),
    "attention": lambda g, t: g.attention(
        t.x, t.x, t.x, t.ids, t.ids, t.ids, t.ids, scale=1.0, window=0, causal=True
    ),
    "select": lambda g, t: g.select(t.x, t.ids, t.ids, t.ids, None, 4),
    "place": lambda g, t: g.place(t.ids, t.ids, t.ids, t.x, t.pairs, None, rows=2, fill=-1, spare=0, ring_spare=0),
    "place of no rows": lambda g, t: g.place(
        t.ids, t.ids, t.ids, t.pairs, t.pairs, None, rows=0, fill=-1, spare=0, ring_spare=0
    ),
    "penalise": lambda g, t: g.penalise(t.x, t.pairs, t.ids, t.ids, t.ids, t.pairs, t.x, t.pairs),
    "sample": lambda g, t: g.sample(t.half, t.ids, t.ids, t.ids),
    "accept": lambda g, t: g.accept(t.pairs, t.x, t.ids, t.ids, t.ids, t.ids, t.pairs),
}  # fmt: skip


class Tensors:
    def __init__(self, g) -> None:
        self.x, self.w, self.narrow = g.input("x", F32, 32, 5), g.input("w", F32, 32, 3), g.input("n", F32, 16, 3)
        self.half, self.heads = g.input("half", F16, 32, 5), g.input("heads", F32, 32, 2, 5)
        self.ids, self.rows, self.pairs = g.input("ids", I32, 5), g.input("rows", I64, 5), g.input("pairs", I32, 2, 5)


@pytest.mark.parametrize("name", BAD)
def test_bad_shapes_are_errors_not_aborts(g, name):
    tensors = Tensors(g)
    with pytest.raises(ShapeError):
        BAD[name](g, tensors)
    y = g.output(g.silu(tensors.x), "y")  # the graph is still usable
    assert run(g, y, x=(tensors.x, random(5, 32))).shape == (1, 1, 5, 32)


sizes = st.integers(-2, 40)


@settings(max_examples=300, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([F32, F16, I32, I64, Q8]), min_size=3, max_size=3),
    shapes=st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=3, max_size=3),
    op=st.sampled_from(
        ["add", "mul", "mul_mat", "get_rows", "set_rows", "pick", "concat", "swiglu", "rope", "rms_norm", "reshape"]
    ),
    number=sizes,
)
def test_random_nodes_never_abort(backend, kinds, shapes, op, number):
    """Whatever is asked for either is refused by us or builds, and then is computed or refused by the device."""
    with Graph(backend, max_nodes=16) as g, contextlib.suppress(ShapeError, DeviceError):
        a, b, c = (g.input(f"t{i}", k, *s) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True)))
        calls = {
            "add": lambda: g.add(a, b),
            "mul": lambda: g.mul(a, b),
            "mul_mat": lambda: g.mul_mat(a, b),
            "get_rows": lambda: g.get_rows(a, b),
            "set_rows": lambda: g.set_rows(a, b, c),
            "pick": lambda: g.pick(a, b),
            "concat": lambda: g.concat(a, b, number),
            "swiglu": lambda: g.swiglu(a, b),
            "rope": lambda: g.rope(a, b, number, 1e4),
            "rms_norm": lambda: g.rms_norm(a, 1e-6, b),
            "reshape": lambda: g.reshape(a, number, *shapes[1][:2]),
        }
        g.output(calls[op](), "y")
        g.build()
        g.run()  # inputs are zero: every id and row number is within range


def test_set_and_get_check_type_and_size(backend):
    tensors = TensorSet(backend, 4)
    x, q = tensors.new("x", F32, 4, 2), tensors.new("q", Q8, 32)
    with pytest.raises(ShapeError, match="no memory"):
        x.set(np.zeros(8, np.float32))
    tensors.allocate()
    with pytest.raises(ShapeError, match="float64"):
        x.set(np.zeros(8))
    with pytest.raises(ShapeError, match="do not fit"):
        x.set(np.zeros(9, np.float32))
    with pytest.raises(ShapeError, match="do not fit"):
        x.set(np.zeros(1, np.float32), -4)
    assert q.get().nbytes == 34
    tensors.close()
    with pytest.raises(EngineClosed):
        x.get()


@pytest.mark.parametrize("shape", [(), (0,), (1, 2, 3, 4, 5), (31,), (1 << 40, 1 << 20)])
def test_shapes_of_new_tensors(backend, shape):
    tensors = TensorSet(backend, 4)
    with pytest.raises(ShapeError):
        tensors.new("x", Q8 if shape == (31,) else F32, *shape)
    tensors.close()


def test_closed_graph_and_backend(backend):
    graph = Graph(backend)
    x = graph.input("x", F32, 4)
    graph.close()
    graph.close()
    with pytest.raises(EngineClosed):
        graph.silu(x)
    other = Backend(choose_device("cpu")[0], threads=1)
    other.close()
    with pytest.raises(EngineClosed):
        Graph(other).build()


def test_too_many_nodes_is_an_error(backend):
    with Graph(backend, max_nodes=8) as g, pytest.raises(ShapeError, match="more than"):
        x = g.input("x", F32, 4)
        for _ in range(40):
            x = g.silu(x)


def test_graph_that_was_not_built(g):
    g.output(g.silu(g.input("x", F32, 4)), "y")
    with pytest.raises(ShapeError, match="not built"):
        g.run()


def test_graphs_are_freed(backend):
    """Thousands of graphs without growth: everything a graph holds goes with its close."""
    import resource

    def build() -> None:
        with Graph(backend, max_nodes=64) as g:
            g.output(g.silu(g.input("x", F32, 1 << 16)), "y")
            g.build()
            g.run()

    for _ in range(50):
        build()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        build()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096, "kB"


def test_devices():
    devices = list_devices()
    cpu = [d for d in devices if d.kind == "cpu"]
    assert len(cpu) == 1 and cpu[0].memory_total > 0
    device, reason = choose_device("auto")
    assert device in devices and reason.startswith("auto:")
    with pytest.raises(RequestError, match="device"):
        choose_device("nothing of that name")
    with pytest.raises(RequestError, match="threads"):
        Backend(cpu[0], threads=0)


def test_weights_are_mapped_not_copied(tiny_pair):
    from pyllama_dflash._native import ffi
    from pyllama_dflash.gguf_file import GGUFFile
    from pyllama_dflash.models import qwen35
    from pyllama_dflash.weights import WeightStore

    opened = Backend(choose_device("cpu")[0], threads=1)
    with GGUFFile(tiny_pair.target) as file:
        params = qwen35.Qwen35Params.from_file(file)
        store = WeightStore(file, opened)
        weights = qwen35.bind(params, store)
        store.load()
        start = int(ffi.cast("uintptr_t", file.mapping()))
        up = weights.layers[0].gate_up.parts[1].weight
        for tensor in (weights.token_embd, weights.head.weight, up, weights.output_norm):
            assert start <= int(ffi.cast("uintptr_t", tensor.ptr.data)) < start + file.size
        store.close()
    opened.close()


def test_native_lines_go_to_logging_only(tiny_pair, caplog, capfd):
    from pyllama_dflash import Engine

    with caplog.at_level(logging.DEBUG, "pyllama_dflash.native"):
        Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=64, threads=1).close()
    assert any("llama_model_loader" in r.message or "llama" in r.message for r in caplog.records)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_silent_at_exit_with_everything_open(tiny_pair):
    """An engine that nobody closed does not crash or print at interpreter exit."""
    code = (
        "from pyllama_dflash import Engine; "
        f"e = Engine.load({str(tiny_pair.target)!r}, {str(tiny_pair.draft)!r}, device='cpu', n_ctx=64, threads=1); "
        "s = e.stream([5, 6], max_tokens=30, ignore_eos=True); next(s)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
