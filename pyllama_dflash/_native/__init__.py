"""The native layer: ``ffi`` and ``lib`` of the cffi extension, and where its libraries lie.

The extension and the libraries it needs are opened so that their symbols bind among themselves first. Another ggml or
llama.cpp in the process, even one loaded for everybody, neither replaces a function of ours nor sees one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0))
try:
    from ._dflash import ffi, lib
except ImportError as error:
    raise ImportError(
        f"the native extension of pyllama_dflash cannot be loaded ({error}); "
        "build and install the package with `pip install .` in its source folder"
    ) from error
finally:
    sys.setdlopenflags(_flags)

_binary = sys.modules[f"{__name__}._dflash"].__file__

#: Folder of the shared libraries and backend modules of this build.
LIB_DIR: Path = Path(str(_binary)).resolve().parent.parent / "lib"
#: Folder of the model pair that ships with the package.
PAIR_DIR: Path = LIB_DIR.parent / "pair"

__all__ = ["LIB_DIR", "PAIR_DIR", "ffi", "lib"]
