"""The command line: `pyllama-dflash generate | bench | info | doctor`."""

from .main import main

__all__ = ["main"]
