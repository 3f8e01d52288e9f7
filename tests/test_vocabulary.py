"""Vocabularies that libllama would not survive, or would bend into others: each is refused before it sees them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tiny_pair
from model_checks import write_vocabulary

from pyllama_dflash import tokenizer
from pyllama_dflash.errors import FileError
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.tokenizer import Tokenizer
from pyllama_dflash.vocabulary import token_count

N = 512
TOKENS, MERGES, TYPES = tiny_pair.vocabulary(N)
TEXT = "1..4096 bytes of text without NUL"


def tokens(at: int, text: str | bytes) -> tuple[str, list[Any]]:
    return "[str]", [*TOKENS[:at], text, *TOKENS[at + 1 :]]


def types(at: int, kind: int) -> tuple[str, list[int]]:
    return "[i32]", [*TYPES[:at], kind, *TYPES[at + 1 :]]


def merges(text: str) -> tuple[str, list[str]]:
    return "[str]", [MERGES[0], text]


IDS = [
    "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "fim_pre", "fim_suf", "fim_mid",
    "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle",
]  # fmt: skip
CASES: list[tuple[str, tuple[str, Any] | None, str]] = [
    ("ggml.model", ("str", "llama"), "not a vocabulary this engine uses; found llama; expected one of gpt2"),
    ("ggml.model", None, "required key is missing; found nothing; expected a string"),
    ("ggml.model", ("u32", 3), "wrong type; found u32; expected a string"),
    ("ggml.pre", ("str", "default"),
     "not a vocabulary this engine uses; found default; expected one of qwen35, qwen2, gpt-2, llama-bpe"),
    ("ggml.pre", None, "required key is missing; found nothing; expected a string"),
    ("ggml.tokens", None, "required key is missing; found nothing; expected an array of strings"),
    ("ggml.tokens", ("[i32]", [1, 2]), "no token list; found [i32]; expected an array of strings"),
    ("ggml.tokens", ("str", "a"), "no token list; found str; expected an array of strings"),
    ("ggml.tokens", tokens(511, "!"), "two tokens are the same; found '!' at 0 and 511; expected distinct tokens"),
    ("ggml.tokens", tokens(1, ""), f"[1]: an empty token; found ''; expected {TEXT}"),
    ("ggml.tokens", tokens(9, "a\0b"), f"[9]: a token with a NUL; found 'a\\x00b'; expected {TEXT}"),
    ("ggml.tokens", tokens(9, b"\xff"), f"[9]: a token that is not UTF-8; found '\N{REPLACEMENT CHARACTER}'; "
     f"expected {TEXT}"),
    ("ggml.tokens", tokens(9, "x" * 4097), f"[9]: too long a token; found '{'x' * 156}...; expected {TEXT}"),
    ("ggml.token_type", types(7, 6), "[7]: a byte token in a byte-level BPE; found 6; expected another type"),
    ("ggml.token_type", types(7, 7), "out of range; found 7; expected 0..6"),
    ("ggml.token_type", types(7, -1), "out of range; found -1; expected 0..6"),
    ("ggml.token_type", ("[i32]", TYPES[:-1]), "does not cover the tokens; found 511 of [i32]; expected 512 of [i32]"),
    ("ggml.token_type", ("[i32]", [*TYPES, 1]), "does not cover the tokens; found 513 of [i32]; expected 512 of [i32]"),
    ("ggml.token_type", ("[u8]", TYPES), "does not cover the tokens; found 512 of [u8]; expected 512 of [i32]"),
    ("ggml.token_type", ("i32", 1), "does not cover the tokens; found 0 of i32; expected 512 of [i32]"),
    ("ggml.scores", ("[f32]", [0.0]), "does not cover the tokens; found 1 of [f32]; expected 512 of [f32] or [i32]"),
    ("ggml.scores", ("[f64]", [0.0] * N),
     "does not cover the tokens; found 512 of [f64]; expected 512 of [f32] or [i32]"),
    ("ggml.merges", None, "required key is missing; found nothing; expected an array of strings"),
    ("ggml.merges", ("[i32]", [1]), "wrong type; found [i32]; expected an array of strings"),
    ("ggml.merges", merges("ab"), "[1]: not two parts; found 'ab'; expected two texts with a space between"),
    ("ggml.merges", merges("ab "), "[1]: not two parts; found 'ab '; expected two texts with a space between"),
    ("ggml.merges", merges(" ab"), "[1]: not two parts; found ' ab'; expected two texts with a space between"),
    ("ggml.merges", merges("a\0 b"), "[1]: not two parts; found 'a\\x00 b'; expected two texts with a space between"),
    *((f"ggml.{name}_token_id", ("u32", N), "out of range; found 512; expected 0..511") for name in IDS),
    ("ggml.eos_token_id", ("u32", 2**32 - 1), "out of range; found 4294967295; expected 0..511"),
    ("ggml.bos_token_id", ("i32", -1), "out of range; found -1; expected 0..511"),
    ("ggml.eos_token_id", ("u64", 2**64 - 1), "out of range; found 18446744073709551615; expected 0..511"),
    ("ggml.eos_token_id", ("str", "x"), "wrong type; found str; expected an integer"),
    ("ggml.eos_token_id", ("u64", 1), "wrong type; found u64; expected u32"),
    ("ggml.add_bos_token", ("u8", 1), "wrong type; found u8; expected bool"),
    ("ggml.suppress_tokens", ("[u32]", [1]), "wrong type; found [u32]; expected [i32]"),
    ("ggml.normalizer.lowercase", ("str", "x"), "wrong type; found str; expected bool"),
    ("chat_template", ("[str]", ["x"]), "wrong type; found [str]; expected str"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "message"), CASES, ids=lambda value: str(value)[:40])
def test_vocabularies_libllama_cannot_take_are_refused(tmp_path, key, value, message):
    path = write_vocabulary(tmp_path, **{key: value})
    with mock.patch.object(tokenizer, "_load", side_effect=AssertionError("libllama saw it")):
        with pytest.raises(FileError) as caught:
            Tokenizer(path)
    element = message.startswith("[")
    assert str(caught.value) == f"{path}: tokenizer.{key}{'' if element else ': '}{message}"


def test_architectures_whose_vocabulary_may_be_special_are_refused(tmp_path):
    model = tiny_pair.Model("clip", tiny_pair.TinyPair().target().kv)
    path = model.write(tmp_path / "other.gguf")
    with pytest.raises(FileError) as caught:
        Tokenizer(path)
    assert caught.value.key == "general.architecture"
    assert (caught.value.found, caught.value.expected) == ("clip", "one of qwen35, qwen2, dflash")


@pytest.mark.parametrize("kind", ["u8", "u16", "u64", "i64"])
def test_a_model_may_write_ids_in_any_width_where_libllama_does_not_read_them(tmp_path, kind):
    with GGUFFile(write_vocabulary(tmp_path, ggml__eos_token_id=(kind, 7))) as file:
        assert token_count(file) == N


def test_no_tokens_are_none(tmp_path):
    with GGUFFile(write_vocabulary(tmp_path, ggml__tokens=None)) as file:
        assert token_count(file) == 0
