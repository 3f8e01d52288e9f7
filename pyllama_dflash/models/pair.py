"""Whether a draft fits a target: both are valid files, and what they must agree on is compared here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import PairError
from ..gguf_file import TOKENS, GGUFFile
from .dflash import MASK_KEY, DFlashParams
from .qwen35 import Qwen35Params


@dataclass(frozen=True)
class Check:
    """One thing compared: the draft's `key`, what it holds and what the target asks for."""

    what: str
    key: str
    ok: bool
    found: object
    expected: object


def check_pair(target: Qwen35Params, target_file: GGUFFile, draft: DFlashParams, draft_file: GGUFFile) -> None:
    """PairError about the draft for the first thing that does not fit the target."""
    for item in _checks(target, target_file, draft, draft_file):
        if not item.ok:
            reason = f"does not fit the target {target_file.path}: {item.what}"
            raise PairError(draft_file.path, reason, item.key, item.found, item.expected)


def pair_report(
    target: Qwen35Params, target_file: GGUFFile, draft: DFlashParams, draft_file: GGUFFile
) -> list[tuple[str, bool, str]]:
    """Every comparison as (what, fits, detail), for people."""
    return [
        (c.what, c.ok, str(c.found) if c.ok else f"{c.key}: found {c.found}, expected {c.expected}")
        for c in _checks(target, target_file, draft, draft_file)
    ]


def _checks(target: Qwen35Params, target_file: GGUFFile, draft: DFlashParams, draft_file: GGUFFile) -> Iterator[Check]:
    width, vocab = target.n_embd, target.n_vocab
    yield Check("hidden size", f"{draft.arch}.embedding_length", draft.n_embd == width, draft.n_embd, width)
    yield Check(
        "vocabulary size", _vocabulary_key(draft, draft_file), draft.n_vocab in (0, vocab),
        draft.n_vocab or "not stated", vocab,
    )  # fmt: skip
    mask = draft.mask_token
    yield Check("mask token", MASK_KEY, mask < vocab, mask, f"below {vocab}")
    taps = draft.target_layers
    yield Check(
        "tapped layers", f"{draft.arch}.target_layers", max(taps) <= target.n_layer, list(taps), f"1..{target.n_layer}"
    )
    yield _same_tokens(target_file, draft_file, mask)


def _vocabulary_key(draft: DFlashParams, file: GGUFFile) -> str:
    """Where the draft's vocabulary size comes from."""
    if file.n_tokens:
        return TOKENS
    return "selector_predecessor.weight" if draft.is_dflash2 else f"{draft.arch}.vocab_size"


def _same_tokens(target_file: GGUFFile, draft_file: GGUFFile, mask: int) -> Check:
    """Equal token lists; the text of the mask token is free, since converters name that row as they like."""
    what, count = "tokenizer", draft_file.n_tokens
    if not count:
        return Check(what, TOKENS, True, "none in the draft", None)
    if count != target_file.n_tokens:
        return Check(what, TOKENS, False, f"{count} tokens", f"{target_file.n_tokens} tokens")
    if draft_file.digest(TOKENS) != target_file.digest(TOKENS):
        pairs = zip(draft_file.string_array(TOKENS), target_file.string_array(TOKENS), strict=True)
        for i, (found, expected) in enumerate(pairs):
            if found != expected and i != mask:
                return Check(what, TOKENS, False, f"token {i} is {_shown(found)}", _shown(expected))
    return Check(what, TOKENS, True, f"{count} equal tokens", None)


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
