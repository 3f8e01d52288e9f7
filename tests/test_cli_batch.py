"""`generate` with several requests: files of JSON lines, order, failures, output files and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time

import pytest
from cli_process import COMMAND, PROMPT, fails, hear_ctrl_c, options_of, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllama_dflash import FileError, SamplingParams
from pyllama_dflash.cli.main import _parser
from pyllama_dflash.cli.requests import Request, read

TEXTS = (PROMPT, "jumps over", "the lazy dog")


@pytest.fixture(scope="module")
def options(tiny_pair):
    return options_of(tiny_pair)


@pytest.fixture(scope="module")
def texts(tiny_pair):
    """The engine's continuations of TEXTS, one after the other."""
    from pyllama_dflash import Engine

    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=512, threads=1) as engine:
        return [engine.generate(text, max_tokens=40, ignore_eos=True).text for text in TEXTS]


# ---------------------------------------------------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12 of the line"),
        (b"[" * 100000, "nested too deeply"),
        (b"[]", "a JSON object expected"),
        (b"{}", "prompt: nothing given; expected text or a list of token ids, not empty"),
        (b'{"prompt": ""}', "prompt: an empty text given"),
        (b'{"prompt": []}', "prompt: [] given"),
        (b'{"prompt": null}', "prompt: None given"),
        (b'{"prompt": [1, true]}', "prompt: [1, True] given"),
        (b'{"prompt": [1, -1]}', "prompt: [1, -1] given"),
        (b'{"prompt": "\\ud800"}', "prompt: '\\ud800' given"),
        (b'{"prompt": "x", "prompt": "y"}', "prompt: given twice"),
        (b'{"prompt": "x", "n_predict": 3}', "n_predict: 3 given; expected one of id, prompt, temperature, top_k"),
        (b'{"prompt": "x", "self": 3}', "self: 3 given; expected one of id, prompt"),
        (b'{"prompt": "x", "id": 1.5}', "id: 1.5 given; expected text or a whole number"),
        (b'{"prompt": "x", "id": "\\udfff"}', "id: '\\udfff' given"),
        (b'{"prompt": "x", "max_tokens": 2.0}', "max_tokens: 2.0 given; expected a whole number in 1.."),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature: hot given"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature: nan given"),
        (b'{"prompt": "x", "stop": 5}', "stop: 5 given"),
        (b'{"prompt": "x", "width": 0}', "width: 0 given"),
        (b'{"prompt": "x", "logit_bias": [1]}', "logit_bias: [1] given; expected a mapping"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias: 'a' given; expected token ids as names"),
        (b'{"prompt": "x", "logit_bias": {"07": 1}}', "logit_bias: '07' given"),
        (b'{"prompt": "x", "logit_bias": {"7": null}}', "logit_bias: {7: None} given"),
    ],
    ids=lambda value: value[:60].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_a_bad_line_is_named_before_anything_runs(capsys, tmp_path, line, message):
    requests, results = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b'{"prompt": "x"}\n\n' + line + b'\n{"prompt": 5}')
    error = fails(capsys, "generate", "--jsonl", requests, "-o", results, "-m", tmp_path / "absent.gguf")
    assert error.startswith(f"{requests}: line 3: {message}"), error
    assert list(tmp_path.iterdir()) == [requests]


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud800", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["id", "prompt", "stop", "logit_bias", "seed", "temperature", "width", "ignore_eos", "x"])
any_line = (
    st.binary(max_size=40)
    | st.dictionaries(fields, any_json, max_size=4).map(lambda line: json.dumps(line).encode())
    | st.sampled_from([b"9" * 5000, b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", b'{"a":' * 5000])
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_line, max_size=3))
def test_any_lines_are_requests_or_an_error_that_names_one(tmp_path, lines):
    (tmp_path / "r").write_bytes(b"\n".join(lines))
    args = _parser().parse_args(["generate", "--jsonl", str(tmp_path / "r")])
    try:
        requests = read(args)
    except FileError as error:
        assert str(error).startswith(f"{tmp_path}/r: ") and str(error).isprintable()
    else:
        assert all(request.prompt and isinstance(request.params, SamplingParams) for request in requests)


def test_no_request_is_an_error(capsys, tmp_path):
    (tmp_path / "r").write_bytes(b"\n \n")
    assert "r: no request in it; expected a JSON object a line" in fails(capsys, "generate", "--jsonl", tmp_path / "r")


def test_parameters_become_those_of_the_sampler(tmp_path):
    def requests(*arguments):
        return read(_parser().parse_args(["generate", *arguments]))

    options = ["--temp", "0.5", "--repeat-penalty", "1.2", "--presence-penalty", "-0.5", "--width", "4", "-n", "9",
               "--logit-bias", "5+1.5", "--logit-bias", "7-inf", "--top-k", "3", "--seed", "8"]  # fmt: skip
    given = SamplingParams(
        temperature=0.5, repetition_penalty=1.2, presence_penalty=-0.5, width=4, max_tokens=9, top_k=3, seed=8,
        logit_bias={5: 1.5, 7: -float("inf")},
    )  # fmt: skip
    assert requests("a", "b", *options) == [Request(1, "a", given), Request(2, "b", given)]
    (tmp_path / "r").write_text(
        '{"prompt": [1, 2], "id": "first", "logit_bias": {"3": -Infinity, "10": 2}, "stop": "x", "width": null}\r\n'
        '{"prompt": "\u2028 é", "ignore_eos": true, "max_tokens": 1}\n'
    )
    first = given.replaced(logit_bias={3: -float("inf"), 10: 2}, stop=("x",), width=None)
    second = Request(2, "\u2028 é", given.replaced(ignore_eos=True, max_tokens=1))
    assert requests("--jsonl", str(tmp_path / "r"), *options) == [Request("first", [1, 2], first), second]


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------
def test_several_prompts_are_printed_in_order(tmp_path, options, texts):
    blocks = [f"### prompt {k}\n{p}{t}\n" for k, (p, t) in enumerate(zip(TEXTS, texts, strict=True), 1)]
    assert run(tmp_path, "generate", *TEXTS, *options) == (0, "\n".join(blocks), "")
    (tmp_path / "a").write_text(TEXTS[0] + "\n")
    (tmp_path / "c").write_text(TEXTS[2])
    files = ["-f", "a", "-f", "-", "-f", "c", "--no-display-prompt", "-np", "2", "--pool", "512"]
    blocks = [f"### prompt {k}\n{t}\n" for k, t in enumerate(texts, 1)]
    assert run(tmp_path, "generate", *options, *files, stdin=TEXTS[1].encode()) == (0, "\n".join(blocks), "")


def test_json_of_several_prompts_is_an_object_a_line(tmp_path, tiny_pair, options, texts):
    code, out, err = run(tmp_path, "generate", *TEXTS, *options, "--json", "-np", "64")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and out.endswith("\n")
    assert [(line["id"], line["prompt"], line["text"]) for line in lines] == list(
        zip((1, 2, 3), TEXTS, texts, strict=True)
    )
    assert {line["model"] for line in lines} == {str(tiny_pair.target)}


def test_json_lines_in_json_lines_out(tmp_path, tiny_pair, options):
    from pyllama_dflash import Engine, SamplingParams

    asked = [
        ({"id": "né", "prompt": PROMPT, "temperature": 0.8, "seed": 3, "max_tokens": 9}, {}),
        ({"prompt": [5, 6, 7], "repetition_penalty": 1.3, "presence_penalty": 0.2}, {"id": 2}),
        ({"id": "far", "prompt": [5, 100000]}, {}),
        ({"id": 0, "prompt": TEXTS[1], "logit_bias": {"7": 90}, "max_tokens": 3, "width": 1}, {}),
        ({"id": "bias", "prompt": TEXTS[1], "logit_bias": {"512": 1}}, {}),
        ({"id": "long", "prompt": "a" * 2000}, {}),
    ]
    lines = "\n".join(json.dumps(line) for line, _ in asked)
    (tmp_path / "out.jsonl").write_text("old")
    code, out, err = run(tmp_path, "generate", "--jsonl", "-", "-o", "out.jsonl", *options, stdin=lines.encode())
    assert (code, out, err) == (1, "", "pyllama-dflash: error: 3 of 6 requests failed\n")
    assert os.listdir(tmp_path) == ["out.jsonl"]
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in written.splitlines()]
    assert written.endswith("}\n") and '"né"' in written
    assert [line["id"] for line in found] == ["né", 2, "far", 0, "bias", "long"]
    for index, message in (
        (2, "prompt[1]: 100000 given; expected 0..511"),
        (4, "logit_bias: 512 given"),
        (5, "prompt: "),
    ):
        assert set(found[index]) == {"id", "error"} and found[index]["error"]["type"] == "RequestError"
        assert found[index]["error"]["message"].startswith(message)
    assert found[3]["tokens"] == [7, 7, 7] and found[3]["proposed"] == 0 and found[3]["rounds"] == 3
    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=512, threads=1) as engine:
        defaults = SamplingParams(max_tokens=40, ignore_eos=True)
        for index in (0, 1):
            line = {name: value for name, value in asked[index][0].items() if name not in ("id", "prompt")}
            expected = engine.generate(asked[index][0]["prompt"], defaults, **line).to_dict()
            assert set(found[index]) == {"id", *expected}
            for key in ("text", "tokens", "finish_reason", "prompt_tokens"):
                assert found[index][key] == expected[key], key


def test_more_requests_than_the_engine_is_given_at_a_time(tmp_path, options):
    from pyllama_dflash.cli.generate import AHEAD

    n = AHEAD + 40
    lines = "".join(json.dumps({"prompt": [k % 500 + 1, 9], "max_tokens": 1 + 30 * (k == 0)}) + "\n" for k in range(n))
    (tmp_path / "r").write_text(lines)
    code, out, err = run(tmp_path, "generate", "--jsonl", "r", *options, "-np", "16")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [(line["id"], len(line["tokens"])) for line in found] == [(k, 31 if k == 1 else 1) for k in range(1, n + 1)]


def test_a_failed_prompt_does_not_stop_the_others(tmp_path, options, texts):
    code, out, err = run(tmp_path, "generate", TEXTS[0], "a" * 2000, TEXTS[2], *options, "--stats")
    assert code == 1
    assert out == f"### prompt 1\n{TEXTS[0]}{texts[0]}\n\n### prompt 3\n{TEXTS[2]}{texts[2]}\n"
    first, *stats, last = err.splitlines()
    assert first.startswith("pyllama-dflash: error: prompt 2: prompt: ")
    assert last == "pyllama-dflash: error: 1 of 3 requests failed"
    lines = {line.split()[0]: line for line in stats}
    assert list(lines) == ["device", "prompt", "text", "phases", "rounds", "accepted", "ops", "total"]
    assert "40 tokens in" in lines["text"] and "(ended by: 2 length)" in lines["text"]
    assert "total       2 requests done, 1 failed: 80 tokens in " in lines["total"]
    assert " tokens/s, " in lines["total"] and "tokens a round, host " in lines["total"]


def test_progress_is_shown_when_asked_for(tmp_path, options):
    code, out, err = run(tmp_path, "generate", "a", "b", *options, "-n", "4", "--progress", "-o", "-")
    assert code == 0 and [json.loads(line)["id"] for line in out.splitlines()] == [1, 2]
    assert "2/2 [" in err and " tokens/s, " in err and " tokens a round]" in err


def test_a_run_that_fails_leaves_the_old_file(tmp_path, options):
    (tmp_path / "out").write_text("old")
    for arguments, message in (
        (["--device", "nonesuch"], "device: nonesuch given"),
        (["-np", "0"], "lanes: 0 given; expected 1..64"),
        (["--pool", "1"], "pool: 1 given; expected 16..512"),
        (["--logit-bias", "512+1"], "logit_bias: 512 given"),
    ):
        code, out, err = run(tmp_path, "generate", PROMPT, "-o", "out", *options, *arguments)
        assert (code, out) == (2, "") and err.startswith(f"pyllama-dflash: error: {message}"), err
        assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out").read_text() == "old"


def test_output_to_a_pipe_or_through_a_link(tmp_path, options):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "real")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", closefd=True) as reader:
        assert run(tmp_path, "generate", PROMPT, *options, "-o", pipe) == (0, "", "")
        record = json.loads(reader.read())
    assert run(tmp_path, "generate", PROMPT, *options, "-o", link) == (0, "", "")
    assert json.loads((tmp_path / "real").read_text())["text"] == record["text"]
    assert pipe.is_fifo() and link.is_symlink()


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C
# ---------------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def interruptible(tmp_path, options, requests, *arguments, **environment):
    """A process that makes what lines of JSON ask for, the last of them without end."""
    endless = {"prompt": PROMPT, "max_tokens": 100_000, "id": "endless"}
    (tmp_path / "requests").write_text("".join(json.dumps(line) + "\n" for line in (*requests, endless)))
    process = subprocess.Popen(
        [*COMMAND, "generate", "--jsonl", "requests", *map(str, options), "-c", "8192", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        preexec_fn=hear_ctrl_c, env={**os.environ, **environment},
    )  # fmt: skip
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("old", [None, "old"])
def test_ctrl_c_leaves_the_old_file_or_none(tmp_path, options, old):
    if old is not None:
        (tmp_path / "out").write_text(old)
    with interruptible(tmp_path, options, [{"prompt": "x", "max_tokens": 3}], "-o", "out") as process:
        deadline = time.monotonic() + 60
        while not any(part.stat().st_size for part in tmp_path.glob(".out.*.part")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sorted(path.suffix for path in tmp_path.glob(".out.*")) == [".part"]
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=60), process.returncode) == ((b"", b""), 130)
    assert set(os.listdir(tmp_path)) == {"requests"} | ({"out"} if old else set())
    assert old is None or (tmp_path / "out").read_text() == old


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_ctrl_c_cuts_no_line(tmp_path, options, unbuffered):
    wide = {"prompt": "x", "max_tokens": 3, "id": "w" * 1_000_000}  # no pipe holds it
    with interruptible(tmp_path, options, [wide], PYTHONUNBUFFERED=unbuffered) as process:
        start = os.read(process.stdout.fileno(), 1000)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # it is heard while the line is being written
        rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    (line,) = (start + rest).splitlines(keepends=True)
    assert line.endswith(b"}\n") and json.loads(line)["id"] == wide["id"]
