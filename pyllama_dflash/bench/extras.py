"""Packages of the extra [bench], needed only where they are asked for."""

from __future__ import annotations

import importlib
from typing import Any


def package(name: str, why: str) -> Any:
    """The module; ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{why} needs {name}: pip install 'pyllama_dflash[bench]'") from None
