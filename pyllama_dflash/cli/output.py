"""Where `generate` writes: stdout, or a file that is there as a whole or not at all; and lines that are never cut."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..errors import FileError


@contextlib.contextmanager
def opened(name: str | None) -> Iterator[TextIO]:
    """The stream to write results to; '-' or None is stdout.

    A file is written beside the one it will replace when the block ends well; else the old file, or none, stays. A
    device or a pipe is written to as it is. FileError when it cannot be opened.
    """
    if name is None or name == "-":
        yield sys.stdout
        return
    if os.path.exists(name) and not os.path.isfile(name):
        with _writing(name), _created(Path(name), name) as stream:
            yield stream
        return
    path = Path(os.path.realpath(name))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _writing(name):
            with _created(part, name) as stream:
                yield stream
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    """A write that fails, or the close behind it, which tries once more, is a FileError that says where."""
    try:
        yield
    except BrokenPipeError:  # whoever read has heard enough, which is no error
        raise
    except OSError as error:
        raise FileError(name, f"cannot be written: {error.strerror}") from error


def _created(path: Path, name: str) -> TextIO:
    with _writing(name):
        return path.open("w", encoding="utf-8", newline="\n")


def put(stream: TextIO, text: str) -> None:
    """Write `text` at once. Python's own text layer would drop the rest when an unbuffered stdout takes a part only.
    FileError when there is no room for it."""
    rest = memoryview(text.encode(stream.encoding, stream.errors or "strict"))
    with _writing(str(getattr(stream, "name", "<stdout>"))):  # a replaced stdout may have no name
        stream.flush()
        while rest:
            rest = rest[stream.buffer.write(rest) :]
        stream.buffer.flush()


def put_whole(stream: TextIO, text: str) -> None:
    """Write all of `text`, and only then heed a Ctrl-C."""
    with _ctrl_c_later():
        put(stream, text)


@contextlib.contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """A write that a signal interrupts goes on unless the signal's handler raises: inside the block it does not."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
