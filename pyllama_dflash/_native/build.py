"""Writes the C source of the extension: python build.py OUTPUT.c"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
PARTS = ("ggml", "backend", "gguf", "llama", "dflash")  # in the order in which they need each other


def builder() -> cffi.FFI:
    """The declarations of cdef/*.h, to be compiled against the headers that helpers.h includes."""
    ffi = cffi.FFI()
    for part in PARTS:
        ffi.cdef((HERE / "cdef" / f"{part}.h").read_text(encoding="utf-8"))
    ffi.set_source("pyllama_dflash._native._dflash", '#include "helpers.h"')
    return ffi


if __name__ == "__main__":
    builder().emit_c_code(sys.argv[1])
