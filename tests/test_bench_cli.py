"""`pyllama-dflash bench`: stock servers as programs, and wrong use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli_process import fails

sys.path.insert(0, str(Path(__file__).parent / "bench"))
import stock_stand_in
from bench_run import TOKENS, arguments, run


@pytest.fixture
def program(tmp_path):
    """The stand-in as a program."""
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {stock_stand_in.__file__} "$@"\n')
    path.chmod(0o755)
    return path


def test_a_program_is_started_and_stopped(tiny_pair, program, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert run(*arguments(tiny_pair, "--lanes", "2", "--waves", "1", "--stock", program, "--json", out)) == 0
    found = json.loads(out.read_text())["lanes"]["2"]
    assert list(found["stock"]) == ["stock, with the draft", "stock, plain"]
    for name, about in found["stock"].items():
        assert "-np 2" in about["command"] and ("-md" in about["command"]) == (name != "stock, plain")
        assert about["load_s"] > 0 and found["sides"][name]["all"]["tokens"] == 2 * TOKENS
    assert found["texts"]["stock: with the draft = plain"]["equal"] == 2


def test_a_program_that_ends_is_one_line(tiny_pair, tmp_path, capsys):
    path = tmp_path / "llama-server"
    path.write_text("#!/bin/sh\necho cannot load >&2\nexit 3\n")
    path.chmod(0o755)
    assert run(*arguments(tiny_pair, "--lanes", "1", "--waves", "1", "--stock", path)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "pyllama-dflash: error: llama-server ended with 3: cannot load"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-m", "/nonesuch.gguf"], "/nonesuch.gguf: no such file"),
        (["-md", "/nonesuch.gguf"], "/nonesuch.gguf: no such file"),
        (["--lanes", "1,65"], "--lanes: 65 given; expected 1..64"),
        (["--lanes", "0"], "--lanes: 0 given; expected 1..64"),
        (["--lanes", ""], "bench: argument --lanes: not numbers with commas between them: ''"),
        (["--waves", "0"], "--waves: 0 given; expected 1.."),
        (["-n", "1"], "-n: 1 given; expected 2.."),
        (["-n", "9000"], "n_ctx: 9216 given; expected at most 8192, the target's context_length"),
        (["--prompt-tokens", "0"], "--prompt-tokens: 0 given; expected 2.."),
        (["--width", "17"], "--width: 17 given; expected 1..16"),
        (["--width", "9"], "--width: 9 given; expected at most 8, the draft's block"),
        (["--width", "wide"], "bench: argument --width: neither a whole number nor adaptive: 'wide'"),
        (["--device", "nonesuch"], "device: nonesuch given; expected one of auto, "),
        (["--kv-type", "q5"], "kv_type: q5 given; expected one of f16, f32, q8_0"),
        (["--prompts", "/nonesuch.jsonl"], "/nonesuch.jsonl: the prompts cannot be read: No such file"),
        (["--stock", "/nonesuch"], "--stock: /nonesuch given; expected http://HOST:PORT of a server, or a"),
        (["--stock", "http://127.0.0.1:9"], "no llama-server answers at http://127.0.0.1:9/props"),
        (["--json", "/nonesuch/r.json"], "/nonesuch/r.json: cannot be written: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_is_one_line(capsys, tiny_pair, more, message):
    assert message in fails_at_last(capsys, *arguments(tiny_pair, *more))


def fails_at_last(capsys, *given):
    """The error of a run that ends with code 2 and prints no result; progress may stand before it."""
    assert run(*given) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[-1].startswith("pyllama-dflash: error: ") and "Traceback" not in err
    return lines[-1]


def test_no_target_and_no_prompts(capsys, tiny_pair, tmp_path):
    assert "bench: the following arguments are required: -m/--model" in fails(capsys, "bench")
    (tmp_path / "none.jsonl").write_text("\n")
    message = fails(capsys, *arguments(tiny_pair, "--prompts", tmp_path / "none.jsonl"))
    assert "none.jsonl: no prompt in it; expected a JSON object with a prompt a line" in message


def test_a_server_with_too_few_slots(capsys, tiny_pair):
    with stock_stand_in.running(slots=2) as url:
        message = fails(capsys, *arguments(tiny_pair, "--lanes", "2,3", "--stock", url))
    assert f"--lanes: 3 given; expected at most 2, the slots of {url}" in message


@pytest.mark.parametrize(("name", "more"), [("matplotlib", ["--png", "r.png"]), ("requests", ["--stock", "http://x"])])
def test_a_missing_package_is_one_line(capsys, tiny_pair, monkeypatch, name, more):
    monkeypatch.setitem(sys.modules, name, None)
    message = fails(capsys, *arguments(tiny_pair, *more))
    assert f"needs {name}: pip install 'pyllama_dflash[bench]'" in message


def test_a_run_that_fails_leaves_no_file(capsys, tiny_pair, tmp_path):
    fails_at_last(capsys, *arguments(tiny_pair, "--width", "9", "--json", tmp_path / "r.json"))
    assert list(tmp_path.iterdir()) == []
