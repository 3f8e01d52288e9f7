"""`generate` where there is no room for what it writes: one line that says where, and what was there before stays."""

from __future__ import annotations

import json
import os
import resource
import subprocess

import pytest
from cli_process import COMMAND, PROMPT, options_of

FULL = "No space left on device"
ROOM = 3000
"""Bytes that a file may have."""


def little_room() -> None:
    """As on a disk that is nearly full: the write that does not fit any more is an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))


def run(folder, stdout, *arguments, **options):
    """Exit code and stderr."""
    done = subprocess.run(
        [*COMMAND, "generate", *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
        cwd=folder, timeout=120, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, **options,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture
def requests(tmp_path):
    """Lines that make more than there is room for."""
    lines = [json.dumps({"prompt": PROMPT, "id": f"{i} {'w' * 500}", "max_tokens": 3}) + "\n" for i in range(20)]
    (tmp_path / "requests").write_text("".join(lines))
    return ["--jsonl", "requests"]


@pytest.mark.parametrize("arguments", [[PROMPT], [PROMPT, "--json"], [PROMPT, "more"], [PROMPT, "more", "--json"]])
def test_stdout(tmp_path, tiny_pair, arguments):
    with open("/dev/full", "w") as full:
        code, err = run(tmp_path, full, *arguments, *options_of(tiny_pair))
    assert (code, err) == (2, f"pyllama-dflash: error: <stdout>: cannot be written: {FULL}\n")


def test_a_device(tmp_path, tiny_pair, requests):
    code, err = run(tmp_path, subprocess.DEVNULL, *requests, *options_of(tiny_pair), "-o", "/dev/full")
    assert (code, err) == (2, f"pyllama-dflash: error: /dev/full: cannot be written: {FULL}\n")


@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_stays_what_it_was(tmp_path, tiny_pair, requests, old):
    if old is not None:
        (tmp_path / "out").write_text(old)
    arguments = [*requests, *options_of(tiny_pair), "-o", "out"]
    code, err = run(tmp_path, subprocess.DEVNULL, *arguments, preexec_fn=little_room)
    assert (code, err) == (2, "pyllama-dflash: error: out: cannot be written: File too large\n")
    assert set(os.listdir(tmp_path)) == {"requests"} | ({"out"} if old else set())
    assert old is None or (tmp_path / "out").read_text() == old


def test_a_file_behind_the_shell(tmp_path, tiny_pair, requests):
    """The lines that fit are whole."""
    with open(tmp_path / "out", "w") as out:
        code, err = run(tmp_path, out, *requests, *options_of(tiny_pair), preexec_fn=little_room)
    assert (code, err) == (2, "pyllama-dflash: error: <stdout>: cannot be written: File too large\n")
    *whole, cut = (tmp_path / "out").read_text().split("\n")
    assert len(whole) >= 2 and [json.loads(line)["id"].split()[0] for line in whole] == [*map(str, range(len(whole)))]
    assert not cut.endswith("}")
