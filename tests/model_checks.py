"""What the tests of loading share: load a model from memory, and check how a bad one is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import Model, TinyPair

from pyllama_dflash.errors import FileError
from pyllama_dflash.gguf_file import GGUFFile, TensorInfo
from pyllama_dflash.models import dflash, qwen35

Load = Callable[[Model, Path], Any]


def load_target(model: Model, folder: Path) -> tuple[qwen35.Qwen35Params, qwen35.Qwen35Weights[TensorInfo]]:
    """Write, open and check a target."""
    with GGUFFile(model.write(folder / "target.gguf")) as file:
        params = qwen35.Qwen35Params.from_file(file)
        return params, qwen35.check(file, params)


def load_draft(model: Model, folder: Path) -> tuple[dflash.DFlashParams, dflash.DFlashWeights[TensorInfo]]:
    """Write, open and check a draft."""
    with GGUFFile(model.write(folder / "draft.gguf")) as file:
        params = dflash.DFlashParams.from_file(file)
        return params, dflash.check(file, params)


def write_vocabulary(folder: Path, **changes: tuple[str, Any] | None) -> Path:
    """A small vocabulary, with keys set or (None) taken away; __ stands for a dot, `tokenizer.` for itself."""
    model = Model("qwen35", dict(TinyPair().target().kv))
    for key, value in changes.items():
        name = "tokenizer." + key.replace("__", ".")
        if value is None:
            del model.kv[name]
        else:
            model.kv[name] = value
    return model.write(folder / "vocabulary.gguf")


def bound_names(weights: Any) -> set[str]:
    """Names of all tensors anywhere in a weights object."""
    if isinstance(weights, TensorInfo):
        return {weights.name}
    if dataclasses.is_dataclass(weights):
        weights = [getattr(weights, f.name) for f in dataclasses.fields(weights)]
    return set().union(*map(bound_names, weights)) if isinstance(weights, (list, tuple)) else set()


def refusal(load: Load, model: Model, folder: Path, key: str, found: str, expected: str) -> FileError:
    """The error of loading `model`: a FileError about `key`; `found` and `expected` are patterns."""
    with pytest.raises(FileError) as caught:
        load(model, folder)
    error = caught.value
    assert type(error) is FileError
    assert (error.key, Path(error.file).parent) == (key, folder)
    assert re.search(found, str(error.found)), error
    assert re.search(expected, str(error.expected)), error
    for part in (error.file, key, str(error.found), str(error.expected)):
        assert part in str(error)
    return error


def key_cases(arch: str, cases: dict[str, tuple[str, object, str, str]]) -> Iterator[Any]:
    """Cases (key without architecture -> type, value, found, expected); the type `-` deletes the key."""
    for key, (kind, value, found, expected) in cases.items():
        full = key.split("#")[0]
        full = full if full.startswith(("tokenizer.", "general.")) else f"{arch}.{full}"
        yield pytest.param(full, kind, value, found, expected, id=key)
