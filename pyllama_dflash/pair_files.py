"""Where the model pair lies that ships with the package."""

from __future__ import annotations

from pathlib import Path

from .errors import FileError

_PACKAGE = Path(__file__).resolve().parent
#: Searched in this order: the installed package, then the source folder's models/.
FOLDERS = (_PACKAGE / "pair", _PACKAGE.parent / "models")


def shipped() -> tuple[Path, Path]:
    """The target and the draft that ship with the package.

    A folder counts if it holds one GGUF file with "draft" or "dflash" in its name and one without. FileError if none.
    """
    for folder in FOLDERS:
        files = sorted(folder.glob("*.gguf"))
        drafts = [f for f in files if "draft" in f.name.lower() or "dflash" in f.name.lower()]
        targets = [f for f in files if f not in drafts]
        if len(drafts) == len(targets) == 1:
            return targets[0], drafts[0]
    expected = f"a target and a draft in {' or '.join(map(str, FOLDERS))}"
    raise FileError("the shipped pair", "is not installed; name a model with -m", expected=expected)
