"""The synthetic pairs that the bench is run on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pyllama_dflash import Engine
from pyllama_dflash.gguf_file import GGUFFile

sys.path.insert(0, str(Path(__file__).parent / "bench"))
import synthetic


@pytest.mark.parametrize("rig", [True, False])
def test_synthetic_pairs_accept_all_or_nothing(tmp_path, rig):
    target, draft = synthetic.write(tmp_path / "s", "tiny", rig=rig)
    with Engine.load(target, draft, lanes=2, device="cpu", n_ctx=128, threads=1) as engine:
        for result in engine.generate([[3, 4, 5], [600, 700]], max_tokens=24, ignore_eos=True, width=8):
            if rig:
                assert set(result.tokens) == {synthetic.FAVOURED}
                assert result.rounds == 3 and result.accepted_per_position == (3,) * 7
            else:
                assert result.rounds == 24 and sum(result.accepted_per_position) == 0


def test_synthetic_types_and_seeds(tmp_path):
    first, _ = synthetic.write(tmp_path / "a", "tiny", seed=1)
    again, _ = synthetic.write(tmp_path / "b", "tiny", seed=1)
    other, _ = synthetic.write(tmp_path / "c", "tiny", seed=2)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    with GGUFFile(first) as file:
        kinds = {name: tensor.type_name for name, tensor in file.tensors.items()}
    assert kinds["output.weight"] == "Q6_K" and kinds["blk.0.ssm_alpha.weight"] == "Q8_0"
    assert kinds["token_embd.weight"] == kinds["blk.3.attn_q.weight"] == "IQ4_XS"


def test_27b_has_the_real_shapes():
    pair = synthetic.SHAPES["27b"]
    target, draft = pair.target(synthetic.Rigged), pair.draft(synthetic.Rigged)
    sizes = [sum(rows.nbytes for _, rows in model.tensors.values()) for model in (target, draft)]
    assert 14.5e9 < sizes[0] < 15e9 and 2.0e9 < sizes[1] < 2.1e9
    shapes = {name: (kind, rows.shape) for name, (kind, rows) in (target.tensors | draft.tensors).items()}
    assert shapes["output.weight"] == ("Q6_K", (248320, 5120 // 256 * 210))
    assert shapes["blk.0.ssm_out.weight"] == ("IQ4_XS", (5120, 6144 // 256 * 136))
    assert shapes["fc.weight"] == ("Q8_0", (5120, 5 * 5120 // 32 * 34))
    assert len(target.kv["tokenizer.ggml.tokens"][1]) == len(set(target.kv["tokenizer.ggml.tokens"][1])) == 248320
    assert np.isclose(synthetic.unit("Q8_0", 7) * 256, 74, rtol=0.05)
