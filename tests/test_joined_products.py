"""Matrices of one input as one product: same tokens, fewer nodes, no more memory, and apart where it cannot be."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from refusing import Refusing
from tiny_pair import TinyPair

from pyllama_dflash import Engine, SamplingParams, loader
from pyllama_dflash._native import ffi, lib
from pyllama_dflash.ggml import DeviceInfo, Graph, ShapeError, Tensor, TensorSet, Type, choose_device
from pyllama_dflash.ggml.graph import op_name
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.models import dflash, qwen35
from pyllama_dflash.models.tensor_table import Stack
from pyllama_dflash.shapes import ShapeKey
from pyllama_dflash.weights import WeightStore

PROMPTS = [[5, 17], [(7 * i) % 500 for i in range(40)]]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, width=8),
    SamplingParams(max_tokens=24, ignore_eos=True, width=3, temperature=0.8, seed=7),
]
MOVES = {"VIEW", "RESHAPE", "PERMUTE"}


class Uploading(Refusing):
    """The CPU as a device with a memory of its own, one that takes element-wise functions of packed tensors only."""

    def __init__(self, device: DeviceInfo, threads: int | None = 1, refused: Collection[str] = ()) -> None:
        super().__init__(device, threads, refused)

    @property
    def maps_host_memory(self) -> bool:
        """See :class:`Backend`."""
        return False

    def supports(self, tensor: Tensor) -> bool:
        """See :class:`Backend`."""
        packed = op_name(tensor.ptr) != "UNARY" or Tensor(tensor.ptr.src[0], tensor.owner).contiguous
        return packed and super().supports(tensor)


@contextlib.contextmanager
def uploading(*refused: str) -> Iterator[None]:
    """What is loaded inside is uploaded, and computed without the kernels of these names."""
    with mock.patch.object(loader, "Backend", functools.partial(Uploading, refused=refused)):
        yield


def load(pair: Any) -> Engine:
    return Engine.load(*pair, device="cpu", n_ctx=128, threads=1, lanes=2)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    """One after the other, then side by side."""
    alone = [engine.generate(PROMPTS[0], params).tokens for params in PARAMS]
    return alone + [result.tokens for result in engine.generate(PROMPTS, PARAMS)]


def stacks(engine: Engine) -> dict[str, Stack[Tensor]]:
    """All stacks of both models, by a short name."""
    target, draft = engine._loaded.models.target_weights, engine._loaded.models.draft_weights
    assert draft is not None
    found = {}
    for i, layer in enumerate(target.layers):
        found[f"target.{i}.gate_up"] = layer.gate_up
        if layer.gdn is not None:
            found[f"target.{i}.qkv_z"], found[f"target.{i}.alpha_beta"] = layer.gdn.qkv_z, layer.gdn.alpha_beta
        if layer.attention is not None:
            found[f"target.{i}.qkv"] = layer.attention.qkv
    for i, block in enumerate(draft.layers):
        found[f"draft.{i}.qkv"], found[f"draft.{i}.gate_up"] = block.qkv, block.gate_up
    return found


def separate(engine: Engine) -> set[str]:
    return {name for name, stack in stacks(engine).items() if stack.whole is None}


def write(folder: Any, pair: TinyPair, **changed: Any) -> tuple[Any, Any]:
    """The pair's files; `changed`: target or draft after a change."""
    models = {"target": pair.target(), "draft": pair.draft()} | changed
    return models["target"].write(folder / "target.gguf"), models["draft"].write(folder / "draft.gguf")


def plain_draft() -> Any:
    """A draft with what may lack or be added: no values in one layer, GELU, an embedding of its own."""
    model = TinyPair(seed=3, dflash2=False).draft()
    model.kv["dflash.hidden_activation"] = ("str", "gelu_pytorch_tanh")
    del model.tensors["blk.1.attn_v.weight"]
    return model


def odd_target() -> Any:
    """A target with matrices of three rows, 816 bytes each."""
    model = TinyPair(seed=5, n_k_heads=1, n_v_heads=3).target()
    for i, name in itertools.product(range(3), ("alpha", "beta")):
        _, values = model.tensors[f"blk.{i}.ssm_{name}.weight"]
        model.tensors[f"blk.{i}.ssm_{name}.weight"] = ("Q8_0", gguf.quants.quantize(values, Q.Q8_0))
    return model


PAIRS = {
    "often accepted": (TinyPair(rigged=True), {}),
    "super-blocks": (TinyPair(seed=2, matrices="IQ4_XS", head="Q6_K"), {}),
    "no kernel for the type": (TinyPair(seed=4, matrices="Q4_0", draft_matrices="F16"), {}),
    "parts that start anywhere": (TinyPair(seed=5, n_k_heads=1, n_v_heads=3), {"target": odd_target}),
    "gelu, one layer without values": (TinyPair(seed=3, dflash2=False), {"draft": plain_draft}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_product_gives_the_same_tokens(tmp_path, name):
    pair, changes = PAIRS[name]
    paths = write(tmp_path, pair, **{key: make() for key, make in changes.items()})
    with load(paths) as engine:
        assert separate(engine) == set(stacks(engine)), "tensors lie as in the file there"
        expected, nbytes = tokens(engine), engine._loaded.weight_bytes
    with uploading(), load(paths) as engine:
        assert not separate(engine)
        assert tokens(engine) == expected
        assert engine._loaded.weight_bytes == nbytes


def test_compositions_take_windows(tiny_pair):
    ops = ("conv_verify", "conv_advance", "gdn_verify", "gdn_advance", "mul_mat", "attention")
    paths = tiny_pair.target, tiny_pair.draft
    with mock.patch.object(loader, "Backend", functools.partial(Refusing, refused=ops)), load(paths) as engine:
        expected = tokens(engine)
    with uploading(*ops), load(paths) as engine:
        assert not separate(engine)
        assert tokens(engine) == expected
        assert engine._round.paths["conv_verify", "composed"] and not engine._round.paths["conv_verify", "kernel"]


@pytest.mark.parametrize("kind", ["round", "verify", "advance"])
def test_nodes_fall_and_nothing_is_copied(tiny_pair, kind):
    def nodes(engine: Engine) -> Counter[str]:
        graph = engine._round.shapes.get(ShapeKey(kind, 1, 8, True)).graph
        found = Counter({op: n for op, n in graph.nodes.items() if op not in MOVES})
        found["products"] = found.pop("dflash.mul_mat") + found.pop("MUL_MAT", 0)
        return found

    paths = tiny_pair.target, tiny_pair.draft
    with load(paths) as engine:
        before = nodes(engine)
    with uploading(), load(paths) as engine:
        after, draft = nodes(engine), engine._loaded.models.draft
    assert draft is not None
    saved = 3 * 3 + 3  # three layers of qkv + z, alpha + beta, gate + up; one of q + k + v, gate + up
    saved += {"round": 3 * draft.n_layer, "verify": 0, "advance": -2}[kind]  # prefill ends at the last k and v
    assert before - after == {"products": saved} and not after - before


def test_the_whole_is_the_parts_and_takes_no_memory(tmp_path):
    target = odd_target().write(tmp_path / "target.gguf")
    backend = Uploading(choose_device("cpu")[0])
    with GGUFFile(target) as file:
        store = WeightStore(file, backend)
        weights = qwen35.bind(qwen35.Qwen35Params.from_file(file), store)
        store.load(False)
        gdn = weights.layers[0].gdn
        assert gdn is not None
        for stack in (weights.layers[0].gate_up, gdn.qkv_z, gdn.alpha_beta):
            assert stack.whole is not None
            parts = [part.weight for part in stack.parts]
            assert [part.name for part in parts] == stack.whole.name.split(" + ")
            infos = [file.tensors[part.name] for part in parts]
            start = int(ffi.cast("uintptr_t", stack.whole.ptr.data))
            for part, info in zip(parts, infos, strict=True):
                raw = np.frombuffer(ffi.buffer(file.mapping()), np.uint8, info.nbytes, info.offset)
                assert np.array_equal(part.get(), raw) and part.shape[:2] == info.shape
                assert int(ffi.cast("uintptr_t", part.ptr.data)) == start
                start += info.nbytes
            assert stack.whole.nbytes == sum(info.nbytes for info in infos)
        align = lib.ggml_backend_get_alignment(backend.ptr)
        assert store._stored.nbytes <= sum(-(-info.nbytes // align) * align for info in file.tensors.values())
        store.close()
    backend.close()


def test_types_that_differ_stay_separate(tmp_path, caplog):
    pair = TinyPair(seed=2, matrices="IQ4_XS", head="Q6_K")
    target, draft = pair.target(), pair.draft()
    other_target, other_draft = TinyPair(seed=2).target(), TinyPair(seed=2, draft_matrices="Q6_K").draft()
    for name in ("blk.3.attn_k.weight", "blk.0.ffn_up.weight"):
        target.tensors[name] = other_target.tensors[name]
    beta = gguf.quants.quantize(target.tensors["blk.1.ssm_beta.weight"][1], Q.Q8_0)
    target.tensors["blk.1.ssm_beta.weight"] = ("Q8_0", beta)
    for name in ("q", "k", "v"):
        draft.tensors[f"blk.1.attn_{name}.weight"] = other_draft.tensors[f"blk.1.attn_{name}.weight"]
    paths = write(tmp_path, pair, target=target, draft=draft)
    with load(paths) as engine:
        expected = tokens(engine)
    with caplog.at_level(logging.INFO, "pyllama_dflash"), uploading(), load(paths) as engine:
        assert separate(engine) == {"target.0.gate_up", "target.1.alpha_beta", "target.3.qkv"}
        weights = engine._loaded.models.draft_weights
        assert weights is not None and weights.append is None, "the layers' keys and values are of two types"
        assert tokens(engine) == expected
    names = "blk.3.attn_q.weight + blk.3.attn_k.weight + blk.3.attn_v.weight"
    assert f"{names}: separate products, types IQ4_XS, Q8_0" in caplog.messages


def test_a_part_with_a_scale_stays_separate(tmp_path):
    pair = TinyPair(seed=6)
    target, draft = pair.target(), pair.draft()
    for name in ("blk.0.attn_qkv", "blk.2.ssm_beta", "blk.3.attn_v", "blk.1.ffn_up"):
        target.tensors[f"{name}.scale"] = ("F32", np.array([1.25], np.float32))
    draft.tensors["blk.0.attn_v.scale"] = ("F32", np.array([0.75], np.float32))
    paths = write(tmp_path, pair, target=target, draft=draft)
    with load(paths) as engine:
        expected = tokens(engine)
    with uploading(), load(paths) as engine:
        assert separate(engine) == {
            "target.0.qkv_z", "target.2.alpha_beta", "target.3.qkv", "target.1.gate_up", "draft.0.qkv",
        }  # fmt: skip
        assert tokens(engine) == expected


def test_files_are_checked_tensor_by_tensor(tiny_pair):
    with GGUFFile(tiny_pair.draft) as file:
        weights = dflash.check(file, dflash.DFlashParams.from_file(file))
        assert weights.layers[0].qkv.whole is None
        assert [part.weight.name for part in weights.layers[0].gate_up.parts] == [
            "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight",
        ]  # fmt: skip


def test_swiglu_takes_rows_with_gaps(kernels):
    values = np.random.default_rng(1).standard_normal((5, 48), np.float32)
    with Graph(kernels) as g:
        both = g.input("both", Type.F32, 48, 5)
        gate, up = (g.view(both, (24, 5), (4 * 48,), 96 * i) for i in range(2))
        out = g.output(g.swiglu(gate, up), "out")
        with pytest.raises(ShapeError, match="swiglu: packed rows"):
            g.swiglu(g.permute(gate, 1, 0, 2, 3), g.permute(up, 1, 0, 2, 3))
        g.build()
        both.set(values)
        g.run()
        got = out.get().reshape(5, 24)
    expected = values[:, :24] / (1 + np.exp(-values[:, :24])) * values[:, 24:]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_rows_of_a_matrix_are_checked(kernels):
    kept, other = TensorSet(kernels, 3), TensorSet(kernels, 3)
    matrix, foreign = kept.new("m", Type.Q8_0, 64, 6), other.new("n", Type.Q8_0, 64, 6)
    for tensor, first, n in ((matrix, -1, 2), (matrix, 5, 2), (matrix, 2, 0), (foreign, 0, 2)):
        with pytest.raises(ShapeError, match="which has to be a matrix of this set"):
            kept.rows("rows", tensor, first, n)
    rows = kept.rows("rows", matrix, 4, 2)
    last = kept.rows("last", rows, 1, 1)
    with pytest.raises(ShapeError, match=r"full \(3\)"):
        kept.rows("more", matrix, 0, 1)
    kept.allocate()
    matrix.set(np.arange(6 * 68, dtype=np.uint8))
    assert np.array_equal(rows.get(), matrix.get()[4 * 68 :]) and np.array_equal(last.get(), matrix.get()[5 * 68 :])
    kept.close()
    other.close()
