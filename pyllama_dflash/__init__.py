"""DFlash2 speculative decoding of GGUF models, with exactly the text that plain decoding would have given."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine
    from .errors import DeviceError, DeviceLost, DflashError, EngineClosed, FileError, PairError, RequestError
    from .result import Chunk, Result, Timings
    from .sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "DeviceError",
    "DeviceLost",
    "DflashError",
    "Engine",
    "EngineClosed",
    "FileError",
    "PairError",
    "RequestError",
    "Result",
    "SamplingParams",
    "Timings",
]

_HOMES = {
    "engine": ("Engine",),
    "errors": ("DeviceError", "DeviceLost", "DflashError", "EngineClosed", "FileError", "PairError", "RequestError"),
    "result": ("Chunk", "Result", "Timings"),
    "sampling": ("SamplingParams",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import on first use: asking for the version or the command's help loads no native library."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
