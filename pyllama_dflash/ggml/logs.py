"""Native log lines go to :mod:`logging` (``pyllama_dflash.native``); the last few are kept for error messages."""

from __future__ import annotations

import logging
from collections import deque

from .._native import ffi, lib

logger = logging.getLogger("pyllama_dflash.native")
logger.addHandler(logging.NullHandler())

# ggml's levels: 0 none, 1 debug, 2 info, 3 warn, 4 error, 5 continuation of the line before.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUATION = 5


class _Router:
    """Joins partial lines and forwards whole ones."""

    def __init__(self) -> None:
        self.partial = ""
        self.level = logging.INFO
        self.tail: deque[str] = deque(maxlen=32)

    def feed(self, level: int, text: str) -> None:
        if level != _CONTINUATION:
            self.level = _LEVELS.get(level, logging.INFO)
        *lines, self.partial = (self.partial + text).split("\n")
        for line in lines:
            if not line.strip():
                continue
            if self.level >= logging.WARNING:
                self.tail.append(line.strip())
            logger.log(self.level, "%s", line)


_router = _Router()


@ffi.def_extern(name="dflash_log_callback")  # type: ignore[untyped-decorator]
def _on_log(level: int, text: object, _user_data: object) -> None:
    _router.feed(level, ffi.string(text).decode("utf-8", "replace"))


def native_log_tail(clear: bool = True) -> str:
    """Warnings and errors native code logged since the last call, joined by '; '."""
    text = "; ".join(_router.tail)
    if clear:
        _router.tail.clear()
    return text


lib.ggml_log_set(lib.dflash_log_callback, ffi.NULL)
lib.llama_log_set(lib.dflash_log_callback, ffi.NULL)
