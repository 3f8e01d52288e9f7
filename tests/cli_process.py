"""Runs of the command line: in this process, and as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from pyllama_dflash import cli

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


def options_of(pair):
    """Options that every run shares, so that texts are comparable."""
    return ["-m", pair.target, "-md", pair.draft, "-t", "1", "-c", "512", "-n", "40", "--ignore-eos"]


def hear_ctrl_c() -> None:
    """A test run that was started in the background ignores SIGINT, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
