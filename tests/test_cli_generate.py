"""`generate` with one prompt: whole runs on a tiny pair, against the engine in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from cli_process import COMMAND, PROMPT, hear_ctrl_c, options_of, run
from tiny_pair import TinyPair


@pytest.fixture(scope="module")
def options(tiny_pair):
    return options_of(tiny_pair)


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
    assert set(report["paths"]["attention"]) == {"kernel"}


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
    assert "queued " in lines["phases"] and "of it host " in lines["phases"]
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
    other = TinyPair(n_vocab=600).write(tmp_path, "other")
    code, out, err = run(tmp_path, "generate", PROMPT, "-m", tiny_pair.target, "-md", other[1])
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"pyllama-dflash: error: {other[1]}: ") and "does not fit the target" in err


# ---------------------------------------------------------------------------------------------------------------------
# Ends that come from outside
# ---------------------------------------------------------------------------------------------------------------------
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
