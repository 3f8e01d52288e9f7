"""docs/backends.md is what its generator writes."""

from __future__ import annotations

from pathlib import Path

from backend_nodes import BACKENDS, MAKE, supported
from backends_table import PARAMETERS, document, numbers

from pyllama_dflash._native import ffi, lib

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "backends.md"


def test_document_is_generated() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == document(), "docs/backends.md is old: python tests/backends_table.py > docs/backends.md"


def test_every_sub_op_has_its_row() -> None:
    declared = {getattr(lib, name) for name in dir(lib) if name.startswith("GGML_DFLASH_OP_")}
    names = {ffi.string(lib.ggml_dflash_op_name(number)).decode() for number in declared}
    assert names == set(PARAMETERS) == set(MAKE)


def test_the_nodes_asked_about_are_valid() -> None:
    """Else a table of refusals would be one of mistakes in the nodes."""
    assert all(supported(op, BACKENDS["CPU"]) for op in MAKE)


def test_numbers_are_found() -> None:
    assert numbers(lambda n: n in {16, 32, 64, 128}) == "16, 32, 64, 128"
    assert numbers(lambda n: 1 <= n <= 8 or n in {12, 16}) == "1..8, 12, 16"
    assert numbers(lambda n: 1 <= n <= 4095) == "1..4095"
    assert numbers(lambda n: 1 <= n <= 4096) == "1..4096"
    assert numbers(lambda n: n >= 0) == "0..2147483647"
    assert numbers(lambda n: n % 256 == 0 and 0 < n <= 1 << 20, 32) == "multiples of 256 from 256 to 1048576"
    assert numbers(lambda n: False) == "none"
