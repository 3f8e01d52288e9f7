"""The parts of the bench: waves, figures, prompts, copies, and what talks to stock servers."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest

from pyllama_dflash import Engine
from pyllama_dflash.bench import copying, figures, ours, stock, traffic, waves
from pyllama_dflash.bench.prompts import RandomPrompts, read
from pyllama_dflash.bench.waves import Wave
from pyllama_dflash.errors import DeviceError, FileError
from pyllama_dflash.ggml import Backend, choose_device
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent / "bench"))
import stock_stand_in


def made(streams, tokens=None):
    """A wave of which only the streams matter."""
    n = len(streams)
    return Wave(streams, tokens or [[1]] * n, [4] * n, [2] * n, [2] * n, [0.1] * n, [1.0] * n)


def test_rates_leave_the_tail_out():
    found = waves.rates([[(1.0, 1), (2.0, 2)], [(1.5, 1), (2.5, 1), (4.0, 8)]])
    assert found["window_s"] == 2.0 and found["tail_s"] == 2.0
    assert found["goodput"] == pytest.approx((3 + 1.5) / 2)
    assert found["decode"] == pytest.approx((3 + 1.5 - (2 + 1)) / 0.5)
    assert waves.rates([[(1.0, 1)], [(2.0, 1), (3.0, 1)]])["decode"] is None


def test_a_gain_counts_above_twice_the_drift():
    def wave(seconds):
        return made([[(seconds / 2, 1), (seconds, 1)]])

    for other, verdict in ((2.0, "better"), (1.15, "within twice the drift"), (0.5, "worse")):
        x = figures.bracket({"a1": [wave(1.0)], "a2": [wave(1.1)]}, [wave(other)])["goodput"]
        assert x["verdict"] == verdict and x["drift"] == pytest.approx(1 / 10.5, rel=0.01)
    assert figures.equal_texts([made([[(1.0, 2)]], [[1, 2]])], [made([[(1.0, 2)]], [[1, 3]])]) == {
        "equal": 0, "of": 1, "first_difference": 1,
    }  # fmt: skip


def test_a_wave_is_what_the_engine_did(tiny_pair):
    prompts = [[5, 6, 7], [5, 6, 7], [9, 10]]
    with Engine.load(tiny_pair.target, tiny_pair.draft, lanes=3, device="cpu", n_ctx=256, threads=1) as engine:
        wave = ours.wave(engine, 8, prompts, 20)
        assert [sum(count for _, count in stream) for stream in wave.streams] == [20] * 3
        assert all(a[0] < b[0] for stream in wave.streams for a, b in itertools.pairwise(stream))
        assert wave.tokens == [list(r.tokens) for r in engine.generate(prompts, max_tokens=20, ignore_eos=True)]
        assert sum(step.lanes for step in wave.steps if step.kind == "round") == sum(wave.rounds)
        assert [step.rows for step in wave.steps if step.kind == "piece"] == [2, 2, 1]
        assert all(step.wall_s is None or step.wall_s >= step.device_s > 0 for step in wave.steps)
        assert engine._worker.observer is None
        assert traffic.of_round(engine, 2, 5, 1.0, 10.0, feeds=True) is None


def test_weights_of_a_round_are_the_files(tiny_pair):
    """A plain step reads every matrix of the target's layers and the head once."""
    with Engine.load(tiny_pair.target, device="cpu", n_ctx=256, threads=1) as engine, GGUFFile(tiny_pair.target) as f:
        ours.wave(engine, 1, [[5, 6, 7]], 4)
        found = traffic.of_round(engine, 1, 1, 1.0, 5.0, feeds=False)
        size = sum(tensor.nbytes for tensor in f.tensors.values()) - f.tensors["token_embd.weight"].nbytes
        assert found.bytes["weights"] == pytest.approx(size, rel=0.01)


def test_copy_bandwidth():
    backend = Backend(choose_device("cpu")[0], threads=1)
    try:
        found = copying.bandwidth(backend, 1 << 20, runs=3)
    finally:
        backend.close()
    assert 1e8 < found["bytes_per_s"] <= found["best_bytes_per_s"] < 1e13 and found["tensor_bytes"] == 1 << 20


def test_prompts(tiny_pair, tmp_path):
    with Tokenizer(tiny_pair.target) as tokenizer:
        source = RandomPrompts(tokenizer, 16, 1)
        assert source.wave(0, 3)[:2] == source.wave(0, 2) and source.wave(0, 1) != source.wave(1, 1)
        assert not any(tokenizer.is_control(token) for prompt in source.wave(0, 8) for token in prompt)
    lines = [json.dumps({"task_id": i, "prompt": f"def f{i}():"}) for i in range(3)]
    for name, data in (
        ("p.jsonl", "\n".join(lines).encode()),
        ("p.jsonl.gz", gzip.compress("\n".join(lines).encode())),
    ):
        (tmp_path / name).write_bytes(data)
        assert read(str(tmp_path / name)) == ["def f0():", "def f1():", "def f2():"]
    for text, message in (("", "no prompt in it"), ("{", "line 1: not JSON"), ('{"prompt": ""}', "line 1: no prompt")):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(FileError, match=message):
            read(str(tmp_path / "bad"))


def test_client_reads_a_stream():
    prompts = [[1, 2, 3], [4, 5]]
    with stock_stand_in.running() as url:
        wave = stock.Client(url + "/").wave(prompts, 9)
    assert wave.tokens == [stock_stand_in.continuation(prompt, 9) for prompt in prompts]
    assert [sum(count for _, count in stream) for stream in wave.streams] == [9, 9]
    assert wave.rounds == [4, 4] and wave.decoded == [8, 8] and wave.prompt_tokens == [3, 2]
    assert statistics.median(count for stream in wave.streams for _, count in stream) == 2
    assert figures.of_wave(wave)["round_p50_ms"] >= 2


def test_a_stream_that_breaks_off_is_one_line():
    with stock_stand_in.running(broken=True) as url:
        with pytest.raises(DeviceError, match="the stock server's stream broke off") as caught:
            stock.Client(url).wave([[1, 2]], 8)
    assert "\n" not in str(caught.value)
