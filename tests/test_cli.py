"""The command line: arguments and errors, `info` and `doctor`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli_process import fails, run
from refusing import FAMILY, refused
from tiny_pair import TinyPair

from pyllama_dflash import cli, pair_files
from pyllama_dflash.errors import FileError


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["write"], "invalid choice: 'write'"),
        (["generate", "x", "--nonesuch"], "unrecognized arguments: --nonesuch"),
        (["generate", "x", "-n", "many"], "generate: argument -n/--n-predict: invalid int value: 'many'"),
        (["generate", "x", "--temp"], "generate: argument --temp: expected one argument"),
        (["generate", "x", "-n", "0"], "max_tokens: 0 given; expected a whole number in 1.."),
        (["generate", "x", "-n", "-1"], "max_tokens: -1 given"),
        (["generate", "x", "--temp", "-0.5"], "temperature: -0.5 given; expected 0 (greedy) or"),
        (["generate", "x", "--temp", "nan"], "temperature: nan given"),
        (["generate", "x", "--top-k", "-3"], "top_k: -3 given"),
        (["generate", "x", "--top-p", "1.5"], "top_p: 1.5 given"),
        (["generate", "x", "--min-p", "2"], "min_p: 2.0 given"),
        (["generate", "x", "-s", "-1"], "seed: -1 given"),
        (["generate", "x", "--stop", ""], "stop: given; expected at most 16 non-empty strings"),
        (["generate", "x", "--no-draft", "-md", "d.gguf"], "generate: --no-draft and -md exclude each other"),
        (["generate", "x", "-f", "p.txt"], "generate: a prompt and -f exclude each other"),
        (["generate", "x", "--jsonl", "r"], "generate: --jsonl and a prompt or -f exclude each other"),
        (["generate", "-f", "p", "--jsonl", "r"], "generate: --jsonl and a prompt or -f exclude each other"),
        (["generate", "-", "x", "-"], "generate: stdin ('-') can be read once only"),
        (["generate", "-f", "-", "-f", "-"], "generate: stdin ('-') can be read once only"),
        (["generate", "x", "--repeat-penalty", "0"], "repetition_penalty: 0.0 given"),
        (["generate", "x", "--presence-penalty", "inf"], "presence_penalty: inf given"),
        (["generate", "x", "--width", "17"], "width: 17 given; expected None or a whole number in 1..16"),
        (
            ["generate", "x", "--logit-bias", "15043"],
            "argument --logit-bias: not TOKEN_ID+BIAS or TOKEN_ID-BIAS: '15043'",
        ),
        (["generate", "x", "--logit-bias", "3+-"], "argument --logit-bias: not TOKEN_ID+BIAS or TOKEN_ID-BIAS: '3+-'"),
        (["generate", "x", "--logit-bias", "3+nan"], "logit_bias: {3: nan} given"),
        (["generate", "x", "--logit-bias", "9999999999+1"], "logit_bias: {9999999999: 1.0} given"),
        (["generate", "x", "", "-m", "m"], "prompt: an empty text given"),
        (["generate", "--jsonl", "/nonesuch/r", "-m", "m"], "/nonesuch/r: the requests cannot be read: No such file"),
        (["generate", "x", "-o", "/nonesuch/r", "-m", "m"], "/nonesuch/r: cannot be written: No such file"),
        (["generate", "x", "-o", "/", "-m", "m"], "/: cannot be written: Is a directory"),
        (["generate", "-f", "/nonesuch/p.txt", "-m", "m"], "/nonesuch/p.txt: the prompt cannot be read: No such file"),
        (["generate", "", "-m", "m"], "prompt: an empty text given"),
        (["info"], "info: the following arguments are required: FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments_are_one_line(capsys, arguments, message):
    assert message in fails(capsys, *arguments)


@pytest.mark.parametrize("command", [[], ["generate"], ["info"], ["doctor"]], ids=str)
def test_help_is_short(capsys, command):
    assert cli.main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: pyllama-dflash") and err == "" and out.count("\n") < 60
    if command == ["generate"]:
        for option in ("-m FILE", "-md FILE", "-n N", "-c N", "-t N", "--temp", "--top-k", "--top-p", "--min-p", "-s N",
                       "--device", "--no-draft", "--stop", "--ignore-eos", "--stats", "--json", "--jsonl FILE",
                       "-o FILE", "-np N", "--pool N", "--repeat-penalty X", "--presence-penalty X", "--logit-bias",
                       "--width N", "--progress"):  # fmt: skip
            assert option in out


def test_help_loads_nothing_heavy(tmp_path):
    code = (
        "import sys; from pyllama_dflash import cli; cli.main(['generate', '--help']); "
        "sys.exit(' '.join({'numpy', 'jinja2', 'cffi', 'tqdm', 'pyllama_dflash._native'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pyllama-dflash 0.")


def test_files_that_are_no_models(capsys, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model, but long enough for a header")
    assert "absent.gguf: cannot be opened: No such file" in fails(
        capsys, "generate", "x", "-m", tmp_path / "absent.gguf"
    )
    for command in (["generate", "x", "-m", bad], ["info", bad]):
        assert "bad.gguf: magic: not a GGUF file" in fails(capsys, *command)
    prompt = tmp_path / "prompt"
    prompt.write_bytes(b"ok \xff")
    assert "prompt: not UTF-8 at byte 3" in fails(capsys, "generate", "-f", prompt, "-m", bad)


def test_debug_shows_where(tmp_path):
    code, out, err = run(tmp_path, "generate", "x", "-m", "absent.gguf", "--debug")
    assert code == 1 and out == ""
    assert err.startswith("Traceback") and "FileError: absent.gguf: cannot be opened" in err


def test_shipped_pair_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(pair_files, "FOLDERS", (tmp_path / "pair", tmp_path / "models"))
    with pytest.raises(FileError, match="the shipped pair: is not installed; name a model with -m"):
        pair_files.shipped()
    (tmp_path / "models").mkdir()
    for name in ("a-target.gguf", "a-draft.gguf", "README.md"):
        (tmp_path / "models" / name).touch()
    assert pair_files.shipped() == (tmp_path / "models/a-target.gguf", tmp_path / "models/a-draft.gguf")
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair/x.gguf").touch()
    (tmp_path / "pair/x-dflash2.gguf").touch()
    assert pair_files.shipped() == (tmp_path / "pair/x.gguf", tmp_path / "pair/x-dflash2.gguf")


# ---------------------------------------------------------------------------------------------------------------------
# info and doctor
# ---------------------------------------------------------------------------------------------------------------------
def test_info_of_a_pair(capsys, tiny_pair):
    assert cli.main(["info", str(tiny_pair.target), str(tiny_pair.draft), "-c", "1024"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (
        "architecture  qwen35", "architecture  dflash", "Q8_0", "3 gated delta net, 1 full",
        "vocabulary    512 tokens", "DFlash2, blocks of 8", "memory for 1024 positions", "the pair fits",
    ):  # fmt: skip
        assert line.lower() in out.lower(), line
    assert "NOT" not in out


def test_info_counts_types_and_bytes(capsys, tiny_pair):
    from pyllama_dflash.gguf_file import GGUFFile

    assert cli.main(["info", str(tiny_pair.target)]) == 0
    out = capsys.readouterr().out
    with GGUFFile(tiny_pair.target) as file:
        kinds = [t.type_name for t in file.tensors.values()]
        for kind in set(kinds):
            assert f"{kind:<12}  {kinds.count(kind)} tensors, " in out
        assert f"{len(kinds)} tensors, " in out


def test_info_plans_what_the_engine_takes(tiny_pair):
    from pyllama_dflash import Engine
    from pyllama_dflash.cli.info import cache_bytes
    from pyllama_dflash.gguf_file import GGUFFile
    from pyllama_dflash.models.dflash import DFlashParams
    from pyllama_dflash.models.qwen35 import Qwen35Params

    with GGUFFile(tiny_pair.target) as file, GGUFFile(tiny_pair.draft) as draft_file:
        target, draft = Qwen35Params.from_file(file), DFlashParams.from_file(draft_file)
    for path, params in ((tiny_pair.draft, draft), (None, None)):
        for n_ctx in (64, 500, 4096):
            with Engine.load(tiny_pair.target, path, device="cpu", n_ctx=n_ctx) as engine:
                planned, taken = sum(cache_bytes(target, params, n_ctx).values()), engine.memory["cache"]
            assert planned <= taken <= planned + 64 * 128  # each tensor is aligned


def test_info_says_why_a_pair_does_not_fit(capsys, tmp_path, tiny_pair):
    _, draft = TinyPair(n_vocab=600, n_embd=512).write(tmp_path, "other")
    assert cli.main(["info", str(tiny_pair.target), str(draft)]) == 1
    out = capsys.readouterr().out
    assert "the pair does not fit" in out
    assert "NOT hidden size: dflash.embedding_length: found 512, expected 256" in out
    assert "NOT vocabulary size: " in out and "ok  tapped layers" in out


def test_info_refuses_what_makes_no_pair(capsys, tiny_pair):
    assert "at most one target" in fails(capsys, "info", tiny_pair.target, tiny_pair.target)
    assert "at most one draft" in fails(capsys, "info", tiny_pair.draft, tiny_pair.draft)
    assert "-c: 99999999 given; expected 2.." in fails(capsys, "info", tiny_pair.target, "-c", "99999999")


def test_doctor_says_how_each_op_is_computed(capsys, shipped):
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[1]: line[2] for line in lines if line[0] == "op"} == dict.fromkeys(FAMILY, "kernel")
    with refused():
        assert cli.main(["doctor"]) == 0
    ops = [line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("op ")]
    on_host = {
        "place": "host (the device has no kernel)",
        "penalise": "host (the device has no kernel)",
        "sample": "host (the device has no kernel)",
        "accept": "host (the tokens are drawn on the host)",
    }
    assert dict(ops) == dict.fromkeys(FAMILY, "composed (the device has no kernel)") | on_host


def test_doctor_names_backends_device_and_reason(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "cpu" in lines["backends"] and "(cpu, " in out
    assert "auto: " in lines["chosen"]
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    assert "(asked for: cpu)" in capsys.readouterr().out
    assert "device: nonesuch given" in fails(capsys, "doctor", "--device", "nonesuch")


# ---------------------------------------------------------------------------------------------------------------------
# The pair that ships
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def shipped():
    try:
        return pair_files.shipped()
    except FileError as error:
        pytest.skip(str(error))


def test_the_first_command_of_the_readme(tmp_path, shipped):
    code, text, err = run(tmp_path, "generate", "def fibonacci(n):")
    assert (code, err) == (0, "") and text.startswith("def fibonacci(n):") and len(text) > 60
    assert run(tmp_path, "generate", "def fibonacci(n):", "--no-draft") == (0, text, "")
    code, out, _ = run(tmp_path, "generate", "def fibonacci(n):", "--json")
    report = json.loads(out)
    assert (code, report["prompt"] + report["text"] + "\n") == (0, text)
    assert report["mean_accepted_length"] > 1.5


def test_the_shipped_pair_fits(capsys, shipped):
    assert cli.main(["info", *map(str, shipped)]) == 0
    assert "the pair fits" in capsys.readouterr().out
