"""Chat templates: Jinja source that comes with a model file, and is therefore run like code from a stranger.

What bounds what: the sandbox of :mod:`.chat_sandbox` keeps a template from everything but its variables; the system
keeps the process that it runs in from more than MAX_MEMORY bytes; from here that process is ended after MAX_SECONDS.
So nothing that a single step does inside Jinja or Python, and no other process, is at a template's mercy. The process
starts with the first rendering, which takes a tenth of a second longer, and stays for the next ones, which take less
than a millisecond longer than in this process; one that was ended is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import RequestError

MAX_SOURCE = 1 << 20
MAX_OUTPUT = 1 << 24
MAX_MEMORY = 1 << 29
MAX_SECONDS = 5.0
_START_SECONDS = 60.0

# The sandbox runs without the user's environment (but what a Python needs to start and to know the time) and start-up
# files, and finds Jinja where this process finds it.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")
_START = """import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_path(sys.argv[1], run_name="__main__")"""


class ChatTemplate:
    """One template. `variables` are there in every rendering (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})

    def render(self, **variables: Any) -> str:
        """The prompt text. `variables` reach the template as JSON would bring them.

        Raises:
            RequestError: the template is not Jinja, fails, complains about its input, or passes a limit; or a variable
                is nothing that JSON knows.
        """
        if len(self.source) > MAX_SOURCE:
            raise _failure(f"{len(self.source)} characters, at most {MAX_SOURCE} are taken")
        try:
            request = json.dumps([self.source, {**self._variables, **variables}], default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("chat template's variables", error, "values that JSON knows") from None
        answer: dict[str, str] = json.loads(_SANDBOX.answer(request + b"\n").decode("utf-8", "surrogatepass"))
        if "error" in answer:
            raise _failure(answer["error"])
        return answer["text"]


def _plain(value: object) -> object:
    """What stands for a mapping or a sequence of another kind in JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__}")


class _Sandbox:
    """The process, when there is one; one rendering at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, request: bytes) -> bytes:
        """What the process says to a line. RequestError when it does not in time, or ends instead."""
        with self._lock:
            process = self._process or self._started()
            try:
                return self._asked(process, request)
            except BaseException:  # whatever it is, the process is not where the next request expects it
                self.close()
                raise

    def _started(self) -> subprocess.Popen[bytes]:
        child = Path(__file__).with_name("chat_sandbox.py")
        limits = map(str, (MAX_MEMORY, MAX_OUTPUT, MAX_SECONDS))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, json.dumps([*map(str, sys.path)]), str(child), *limits],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C is for this process, not for that one
            )  # fmt: skip
        except OSError as error:
            raise _failure(f"its process cannot start: {error}") from error
        try:
            self._asked(self._process, b'["", {}]\n', _START_SECONDS)
        except BaseException:
            self.close()
            raise
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], request: bytes, seconds: float | None = None) -> bytes:
        seconds = MAX_SECONDS if seconds is None else seconds
        assert process.stdin is not None and process.stdout is not None
        end, answer = time.monotonic() + seconds, bytearray()
        with contextlib.suppress(BrokenPipeError):  # it has ended: that is what reading says too
            rest = memoryview(request)
            while rest:
                rest = rest[process.stdin.write(rest) :]
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not ready.poll(max(0.0, 1000 * (end - time.monotonic()))):
                raise _failure(f"it did not end within {seconds:g} s")
            part = process.stdout.read(1 << 20)
            if not part:
                raise _failure(_end_of(process.wait()))
            answer += part
        return bytes(answer)

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forked(self) -> None:
        """The process is the parent's, and whoever held the lock is no more."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # not for us to wait for
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _end_of(code: int) -> str:
    return f"it needs more than {MAX_MEMORY >> 20} MiB" if code == errno.ENOMEM else f"its process ended with {code}"


def _failure(reason: str) -> RequestError:
    return RequestError("chat template", reason, "a template that renders these messages")


_SANDBOX = _Sandbox()
atexit.register(_SANDBOX.close)
os.register_at_fork(after_in_child=_SANDBOX.forked)
