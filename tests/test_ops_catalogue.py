"""The op table in ggml_patches/README.md says what the header and the limits say."""

from __future__ import annotations

import re
from pathlib import Path

from pyllama_dflash._native import ffi, lib

PATCHES = Path(__file__).resolve().parent.parent / "ggml_patches"
README = (PATCHES / "README.md").read_text(encoding="utf-8")
HEADER = (PATCHES / "src/include/ggml-dflash.h").read_text(encoding="utf-8")
LIMITS = (PATCHES / "src/src/ggml-dflash-limits.h").read_text(encoding="utf-8")
KERNELS = (PATCHES / "src/src/ggml-dflash-kernels.h").read_text(encoding="utf-8")


def header_constructors() -> dict[str, list[str]]:
    """Name of every constructor -> names of its arguments after the context."""
    found = re.findall(r"GGML_API struct ggml_tensor \* ggml_dflash_(\w+)\(([^)]*)\);", HEADER)
    return {name: re.findall(r"(\w+)(?:,|$)", arguments)[1:] for name, arguments in found}


def table() -> dict[str, dict[str, list[str]]]:
    """Rows of the catalogue: sub-op -> names in its sources, and the three backend columns."""
    rows = {}
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"`\w+`", cells[0]):
            rows[cells[0].strip("`")] = {"names": re.findall(r"`(\w+)`", cells[1]), "backends": cells[3:]}
    return rows


def test_every_sub_op_has_its_row_and_no_other() -> None:
    declared = {name: getattr(lib, name) for name in dir(lib) if name.startswith("GGML_DFLASH_OP_")}
    assert len(set(declared.values())) == len(declared) >= 8
    names = {ffi.string(lib.ggml_dflash_op_name(value)).decode() for value in declared.values()}
    assert names == {name.removeprefix("GGML_DFLASH_OP_").lower() for name in declared}
    assert names == set(table()) == set(header_constructors())
    assert ffi.string(lib.ggml_dflash_op_name(0)) == b"unknown"


def test_sources_are_those_of_the_constructors() -> None:
    rows, constructors = table(), header_constructors()
    for name, arguments in constructors.items():
        listed = rows[name]["names"]
        if name.endswith("_advance"):  # "the same with ..., and n_rows"
            listed = [*rows[name.replace("advance", "verify")]["names"], "n_rows"]
        assert listed == arguments, name


def kernels(backend: str) -> set[str]:
    """The sub-ops that a backend's list names."""
    listed = re.search(rf"#define GGML_DFLASH_{backend}_KERNELS\(X\)(.*?)\n\n", KERNELS + "\n\n", re.DOTALL)
    assert listed
    return {name.lower() for name in re.findall(r"X\((\w+), \w+\)", listed[1])}


def test_backends_are_named_by_what_they_do() -> None:
    columns = kernels("CPU"), kernels("CUDA"), kernels("SYCL")  # HIP's are CUDA's
    for name, row in table().items():
        assert row["backends"] == ["kernel" if name in listed else "composed" for listed in columns], name


def test_limits() -> None:
    def expanded(macro: str) -> str:
        return ", ".join(re.findall(r"X\((\d+)\)", re.search(rf"{macro}\(X\)(.*)", LIMITS)[1]))  # type: ignore[index]

    def number(macro: str) -> int:
        value = re.search(rf"#define {macro} (.*)", LIMITS)[1]  # type: ignore[index]
        base, _, shift = value.strip("()").partition(" << ")
        return int(base) << int(shift or 0)

    assert f"| state width S | {expanded('GGML_DFLASH_STATE_WIDTHS')} |" in README
    assert f"| head width D | {expanded('GGML_DFLASH_HEAD_DIMS')} (" in README
    assert expanded("GGML_DFLASH_GQA_RATIOS") == "1, 2, 3, 4, 5, 6, 7, 8, 16" and "| Hq / Hkv | 1..8, 16 |" in README
    assert f"T <= B, B 1..{number('GGML_DFLASH_MAX_BLOCK')} |" in README
    assert f"| lanes L | 1..{number('GGML_DFLASH_MAX_LANES')} |" in README
    assert f"| slots N | 1..{number('GGML_DFLASH_MAX_SLOTS')} |" in README
    assert f"Hkv | 1..{number('GGML_DFLASH_MAX_HEADS')}, Hv" in README
    assert number("GGML_DFLASH_MAX_ROWS") == number("GGML_DFLASH_MAX_CHANNELS") == 2**20
    assert number("GGML_DFLASH_MAX_PAGES") == 2**24
    assert f"K = {number('GGML_DFLASH_CONV_TAPS')} taps" in README
    assert f"pages of\n{number('GGML_DFLASH_PAGE_ROWS')} positions" in README

    assert expanded("GGML_DFLASH_TOP_KS") == "1, 2, 3, 4, 5, 6, 7, 8, 12, 16" and number("GGML_DFLASH_MAX_TOP_K") == 16
    assert "| top_k of select | 1..8, 12, 16, at most V |" in README
    block = number("GGML_DFLASH_MAX_BLOCK")
    assert f"| rows T of dynamic_conv, sample, penalise, accept; P of select | 1..{block}; 1..{block - 1} |" in README
    assert f"groups G | 1..{number('GGML_DFLASH_MAX_DYNAMIC_TAPS')}, a divisor of E; E 1..2^20 |" in README
    assert f"| rank R | 1..{number('GGML_DFLASH_MAX_RANK')} (Q8_0 codebooks" in README
    assert number("GGML_DFLASH_MAX_VOCABULARY") == 2**20 and "| vocabulary V | 1..2^20 |" in README
    assert number("GGML_DFLASH_MAX_POSITIONS") == 2**24 and "| positions C of a history | 1..2^24 |" in README
    assert f"| biases NB of a slot | 1..{number('GGML_DFLASH_MAX_BIASES')} |" in README


def test_codebook_types() -> None:
    listed = re.search(r"GGML_DFLASH_CODEBOOK_TYPES\(X\)(.*)", LIMITS)
    assert listed and re.findall(r"TYPE_(\w+)", listed[1]) == ["F32", "F16", "BF16", "Q8_0"]
    assert "(F32, F16, BF16 or Q8_0), the last three together or not at all" in README


def test_a_column_of_sampling() -> None:
    words = {name: getattr(lib, f"GGML_DFLASH_SAMPLING_{name}") for name in ("SEED_LOW", "TEMPERATURE", "TOP_K")}
    words |= {name: getattr(lib, f"GGML_DFLASH_SAMPLING_{name}") for name in ("TOP_P_LOW", "LOG_MIN_P", "WORDS")}
    assert words == {"SEED_LOW": 0, "TEMPERATURE": 2, "TOP_K": 3, "TOP_P_LOW": 4, "LOG_MIN_P": 6, "WORDS": 8}
    assert f"`sampling` I32 [{words['WORDS']},L]" in README
