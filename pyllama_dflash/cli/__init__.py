"""The command line: `pyllama-dflash generate | info | doctor`."""

from .main import main

__all__ = ["main"]
