"""The command line: arguments and errors in this process, whole runs as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from refusing import FAMILY, refused
from tiny_pair import TinyPair

from pyllama_dflash import cli, pair_files
from pyllama_dflash.errors import FileError

COMMAND = [sys.executable, "-m", "pyllama_dflash"]
PROMPT = "the quick brown"


def run(folder, *arguments, stdin=None, **environment):
    """A finished process; text output is UTF-8 or the test fails."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, timeout=300, cwd=folder,
        env={**os.environ, **environment}, stdin=None if stdin is not None else subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def fails(capsys, *arguments):
    """The error line of a run in this process that must end with code 2 and print nothing else."""
    assert cli.main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pyllama-dflash: error: ") and err.count("\n") == 1, err
    return err.removeprefix("pyllama-dflash: error: ").rstrip("\n")


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
                       "--device", "--no-draft", "--stop", "--ignore-eos", "--stats", "--json"):  # fmt: skip
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
# Whole runs on a tiny pair, against the engine in this process
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def options(tiny_pair):
    """Options that every run shares, so that texts are comparable."""
    return ["-m", tiny_pair.target, "-md", tiny_pair.draft, "-t", "1", "-c", "512", "-n", "40", "--ignore-eos"]


@pytest.fixture(scope="module")
def results(tiny_pair):
    """The engine's own results by (temperature, seed)."""
    from pyllama_dflash import Engine

    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=512, threads=1) as engine:
        return {
            (t, s): engine.generate(PROMPT, temperature=t, seed=s, max_tokens=40, ignore_eos=True)
            for t, s in ((0.0, 0), (0.8, 3))
        }


def test_generate_prints_prompt_and_text(tmp_path, options, results):
    expected = PROMPT + results[0.0, 0].text + "\n"
    assert run(tmp_path, "generate", PROMPT, *options) == (0, expected, "")
    assert run(tmp_path, "generate", PROMPT, *options, "--no-draft")[0] == 2  # -md is in the options
    without = [o for o in options if o != "-md" and not str(o).endswith("draft.gguf")]
    assert run(tmp_path, "generate", PROMPT, *without) == (0, expected, "")
    assert run(tmp_path, "generate", PROMPT, *without, "--no-draft") == (0, expected, "")
    hidden = run(tmp_path, "generate", PROMPT, *options, "--no-display-prompt")
    assert hidden == (0, results[0.0, 0].text + "\n", "")


def test_sampled_text_is_the_engine_s_in_any_locale(tmp_path, options, results):
    sampled = ["generate", PROMPT, *options, "--temp", "0.8", "--seed", "3"]
    text = PROMPT + results[0.8, 3].text + "\n"
    assert "\ufffd" in text  # bytes drawn at random are seldom UTF-8
    assert run(tmp_path, *sampled) == (0, text, "")
    assert run(tmp_path, *sampled, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0") == (0, text, "")


def test_the_prompt_may_come_from_a_file_or_stdin(tmp_path, options, results):
    expected = (0, PROMPT + results[0.0, 0].text + "\n", "")
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    assert run(tmp_path, "generate", *options, "-f", "prompt.txt") == expected
    assert run(tmp_path, "generate", *options, "-f", "-", stdin=PROMPT.encode()) == expected
    assert run(tmp_path, "generate", "-", *options, stdin=PROMPT.encode() + b"\r\n") == expected
    assert run(tmp_path, "generate", *options, stdin=PROMPT.encode() + b"\n") == expected
    code, out, err = run(tmp_path, "generate", *options, stdin=b"\xff\xfe")
    assert (code, out, err) == (2, "", "pyllama-dflash: error: stdin: not UTF-8 at byte 0\n")


def test_json_is_the_result(tmp_path, tiny_pair, options, results):
    code, out, err = run(tmp_path, "generate", PROMPT, *options, "--json")
    assert (code, err) == (0, "") and out.count("\n") == 1
    report, expected = json.loads(out), results[0.0, 0].to_dict()
    assert report["prompt"] == PROMPT and report["model"] == str(tiny_pair.target) and report["n_ctx"] == 512
    assert report["draft"] == str(tiny_pair.draft) and report["timings"]["decode_s"] > 0
    for key in ("text", "tokens", "finish_reason", "prompt_tokens", "rounds", "proposed", "accepted_per_position"):
        assert report[key] == expected[key], key
    assert report["paths"]["attention"] == {"kernel": 5}  # 2 draft layers; 1 of the target in 3 graphs


def test_stop_strings_end_the_text(tmp_path, options, results):
    whole = results[0.0, 0].text
    stop = whole[len(whole) // 2 :][:2]
    cut = whole[: whole.index(stop)]
    code, out, err = run(tmp_path, "generate", PROMPT, *options, "--stop", "never there", "--stop", stop, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["text"] == cut and json.loads(out)["finish_reason"] == "stop"


def test_stats_go_to_stderr(tmp_path, options, results):
    code, out, err = run(tmp_path, "generate", PROMPT, *options, "--stats")
    assert (code, out) == (0, PROMPT + results[0.0, 0].text + "\n")
    lines = {line.split()[0]: line for line in err.splitlines()}
    assert set(lines) == {"device", "prompt", "text", "phases", "rounds", "accepted", "ops"}
    assert "40 tokens in" in lines["text"] and "(ended by: length)" in lines["text"]
    assert f"{results[0.0, 0].proposed} proposed" in lines["accepted"]
    assert "nodes by kernels, mul_mat " in lines["ops"]  # the F32 matrices go to ggml's own product


def test_native_lines_only_when_asked_for(tmp_path, options):
    _, out, err = run(tmp_path, "generate", PROMPT, *options, "-vv")
    assert "pyllama_dflash.native: " in err and out.startswith(PROMPT)


def test_engine_errors_are_one_line(tmp_path, options):
    cases = [
        (["a" * 2000], "prompt: "),
        ([PROMPT, "--device", "nonesuch"], "device: nonesuch given; expected one of auto"),
        ([PROMPT, "-c", "1"], "n_ctx: 1 given"),
        ([PROMPT, "-t", "0"], "threads: 0 given"),
        ([b"half \xff".decode("utf-8", "surrogateescape")], "text: U+DCFF at 5 given"),
    ]
    for arguments, message in cases:
        code, out, err = run(tmp_path, "generate", *options, *arguments)
        assert (code, out) == (2, "") and err.startswith(f"pyllama-dflash: error: {message}"), err
        assert err.count("\n") == 1


def test_a_pair_that_does_not_fit_is_refused(tmp_path, tiny_pair, options):
    other = tiny_pair_of(tmp_path, n_vocab=600)
    code, out, err = run(tmp_path, "generate", PROMPT, "-m", tiny_pair.target, "-md", other[1])
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"pyllama-dflash: error: {other[1]}: ") and "does not fit the target" in err


def tiny_pair_of(folder, **changes):
    """Paths of a pair made with other parameters."""
    return TinyPair(**changes).write(folder, "other")


# ---------------------------------------------------------------------------------------------------------------------
# Ends that come from outside
# ---------------------------------------------------------------------------------------------------------------------
def hear_ctrl_c() -> None:
    """A test run that was started in the background ignores SIGINT, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def endless(tmp_path, tiny_pair):
    """A process that would print for a long time; it has printed its first bytes."""
    options = ["-m", tiny_pair.target, "-md", tiny_pair.draft, "-t", "1", "-c", "8192", "-n", "8000", "--ignore-eos"]
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, *map(str, options)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    with process:
        assert process.stdout.read(len(PROMPT) + 8).startswith(PROMPT.encode())
        yield process
        process.kill()


def test_ctrl_c_ends_cleanly(endless):
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=60)
    assert endless.returncode == 130
    assert err == b"" and out.endswith(b"\n")


def test_a_closed_pipe_ends_cleanly(endless):
    endless.stdout.close()
    assert endless.wait(timeout=60) == 141
    assert endless.stderr.read() == b""


def test_ctrl_c_while_loading(tmp_path, options):
    for delay in (0.2, 0.6):
        process = subprocess.Popen(
            [*COMMAND, "generate", "-", *map(str, options)], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            stdout=subprocess.PIPE, cwd=tmp_path, preexec_fn=hear_ctrl_c,
        )  # fmt: skip
        with process:
            time.sleep(delay)  # while it starts, or while it waits for stdin
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        # Before main() Python itself reports the interrupt and dies of the signal.
        assert process.returncode in (130, -signal.SIGINT)


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
    from pyllama_dflash.cli_info import cache_bytes
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
    _, draft = tiny_pair_of(tmp_path, n_vocab=600, n_embd=512)
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
    on_host = {"sample": "host (the device has no kernel)", "accept": "host (the tokens are drawn on the host)"}
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
