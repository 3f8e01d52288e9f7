"""Does a draft fit a target: what must agree, and what the refusal says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tiny_pair import Model, TinyPair

from pyllama_dflash.errors import FileError, PairError
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.models.dflash import DFlashParams
from pyllama_dflash.models.pair import check_pair, pair_report
from pyllama_dflash.models.qwen35 import Qwen35Params

SMALL = TinyPair(n_vocab=320, n_ff=256)
TARGET, DRAFT = SMALL.target(), SMALL.draft()
WHAT = ["hidden size", "vocabulary size", "mask token", "tapped layers", "tokenizer"]


def judge(target: Model, draft: Model, folder: Path) -> list[tuple[str, bool, str]]:
    """The report on a pair; check_pair must agree with it, and its error is raised."""
    with (
        GGUFFile(target.write(folder / "target.gguf")) as target_file,
        GGUFFile(draft.write(folder / "draft.gguf")) as draft_file,
    ):
        pair = Qwen35Params.from_file(target_file), target_file, DFlashParams.from_file(draft_file), draft_file
        report = pair_report(*pair)
        failed = [line for line in report if not line[1]]
        try:
            check_pair(*pair)
        except PairError as error:
            assert failed and failed[0][0] in error.reason
            assert error.key in failed[0][2] and str(error.found) in failed[0][2]
            raise
        assert not failed
        return report


@pytest.mark.parametrize(
    "options", [{}, {"dflash2": False}, {"other_spelling": True}, {"taps": (1, 4)}, {"taps": (4,)}], ids=str
)
def test_good_pairs(tmp_path, options):
    c = dataclasses.replace(SMALL, **options)
    report = judge(c.target(), c.draft(), tmp_path)
    assert [what for what, _, _ in report] == WHAT and all(ok for _, ok, _ in report)


def without_tokens(model: Model) -> Model:
    changed = model.copy()
    for key in [k for k in model.kv if k.startswith("tokenizer.") and "mask" not in k]:
        del changed.kv[key]
    return changed


def test_a_draft_without_tokens_fits(tmp_path):
    assert judge(TARGET, without_tokens(DRAFT), tmp_path)[-1] == ("tokenizer", True, "none in the draft")


def test_the_mask_token_may_be_spelled_differently(tmp_path):
    draft = DRAFT.copy()
    tokens = list(draft.kv["tokenizer.ggml.tokens"][1])
    tokens[SMALL.mask] = "[PAD319]"
    draft.kv["tokenizer.ggml.tokens"] = ("[str]", tokens)
    assert judge(TARGET, draft, tmp_path)[-1] == ("tokenizer", True, "320 equal tokens")


def other_token(draft: Model) -> Model:
    tokens = list(draft.kv["tokenizer.ggml.tokens"][1])
    tokens[300] = "different"
    draft.kv["tokenizer.ggml.tokens"] = ("[str]", tokens)
    return draft


def high_mask() -> Model:
    """No vocabulary in the file says that this mask token is too high."""
    draft = without_tokens(dataclasses.replace(SMALL, dflash2=False).draft())
    draft.kv["tokenizer.ggml.mask_token_id"] = ("u32", 320)
    return draft


BAD_PAIRS = {
    "hidden size": (
        dataclasses.replace(SMALL, n_embd=512).draft(), "dflash.embedding_length", "^512$", "^256$"
    ),
    "vocabulary": (
        dataclasses.replace(SMALL, n_vocab=321).draft(), "tokenizer.ggml.tokens", "^321$", "^320$"
    ),
    "codebook rows": (
        without_tokens(dataclasses.replace(SMALL, n_vocab=319).draft()), "selector_predecessor.weight", "^319$", "^320$"
    ),
    "mask token": (high_mask(), "tokenizer.ggml.mask_token_id", "^320$", "^below 320$"),
    "taps": (
        dataclasses.replace(SMALL, taps=(1, 3, 5)).draft(), "dflash.target_layers", r"^\[1, 3, 5\]$", r"^1\.\.4$"
    ),
    "token": (other_token(DRAFT.copy()), "tokenizer.ggml.tokens", "^token 300 is 'different'$", "^'(?!different)"),
}  # fmt: skip


@pytest.mark.parametrize(("draft", "key", "found", "expected"), BAD_PAIRS.values(), ids=BAD_PAIRS.keys())
def test_bad_pairs(tmp_path, draft, key, found, expected):
    with pytest.raises(PairError) as caught:
        judge(TARGET, draft, tmp_path)
    error = caught.value
    assert isinstance(error, FileError)
    assert (error.file, error.key) == (str(tmp_path / "draft.gguf"), key)
    assert re.search(found, str(error.found)) and re.search(expected, str(error.expected)), error
    for part in (error.file, str(tmp_path / "target.gguf"), key, str(error.found), str(error.expected)):
        assert part in str(error)


def test_the_generator_is_deterministic(tmp_path):
    first, second, other = (
        [path.read_bytes() for path in TinyPair(seed=seed, rigged=True).write(tmp_path, name)]
        for seed, name in ((7, "a"), (7, "b"), (8, "c"))
    )
    assert first == second
    assert first[0] != other[0] and first[1] != other[1]
