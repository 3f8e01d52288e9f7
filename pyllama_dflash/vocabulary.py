"""The vocabulary that a file carries, checked before anybody believes it.

libllama ends the process on some vocabularies that a file can hold: it asserts, or overflows the stack when a long text
meets a pre-tokenizer made of std::regex. Others it bends into something else without a word: it drops special ids past
the end, and cuts tokens at a NUL. Both kinds are refused here, before it sees them, so only byte-level BPE with one of
the pre-tokenizers that libllama wrote out by hand is taken.
"""

from __future__ import annotations

from .gguf_file import TOKENS, GGUFFile

MAX_TOKEN_BYTES = 1 << 12
"""Longest text of a token: real ones have a few hundred bytes at most."""

MERGES, TYPES = "tokenizer.ggml.merges", "tokenizer.ggml.token_type"
_ARCHS = ("qwen35", "qwen2", "dflash")  # known to libllama, their vocabulary being all that it reads
_TAKEN = {
    "general.architecture": _ARCHS,
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("qwen35", "qwen2", "gpt-2", "llama-bpe"),
}
_ARRAYS = {TYPES: ("[i32]",), "tokenizer.ggml.scores": ("[f32]", "[i32]")}  # one element a token
_BYTE_TYPE, _LAST_TYPE = 6, 6
_PREFIX, _ID = "tokenizer.ggml.", "_token_id"
# What libllama reads beside arrays and ids, by the one type that it takes.
_KINDS = {
    "general.name": "str",
    "general.file_type": "u32",
    "tokenizer.chat_template": "str",
    **{f"{_PREFIX}add_{name}": "bool" for name in ("bos_token", "eos_token", "sep_token", "space_prefix")},
    f"{_PREFIX}remove_extra_whitespaces": "bool",
    f"{_PREFIX}normalizer.lowercase": "bool",
    f"{_PREFIX}normalizer.strip_accents": "bool",
    f"{_PREFIX}suppress_tokens": "[i32]",
    f"{_PREFIX}token_type_count": "u32",
}


def token_count(file: GGUFFile) -> int:
    """Tokens of the file, 0 if it has none. FileError unless arrays that belong to them cover them and special ids are
    among them."""
    if TOKENS not in file:
        return 0
    if file.kind(TOKENS) != "[str]" or not file.n_tokens:
        raise file.error("no token list", TOKENS, file.kind(TOKENS), "an array of strings")
    for key, kinds in _ARRAYS.items():
        if key in file and (file.kind(key) not in kinds or file.length(key) != file.n_tokens):
            found = f"{file.length(key)} of {file.kind(key)}"
            raise file.error("does not cover the tokens", key, found, f"{file.n_tokens} of {' or '.join(kinds)}")
    for key in _id_keys(file):
        file.integer(key, high=file.n_tokens - 1)
    return file.n_tokens


def check_loadable(file: GGUFFile) -> None:
    """FileError about the first thing that libllama would not survive, or would read as something else."""
    for key, taken in _TAKEN.items():
        name = file.text(key)
        if name not in taken:
            raise file.error("not a vocabulary this engine uses", key, name, f"one of {', '.join(taken)}")
    if not token_count(file):
        raise file.error("required key is missing", TOKENS, "nothing", "an array of strings")
    for key, kind in {**_KINDS, **dict.fromkeys(_id_keys(file), "u32")}.items():
        if key in file and file.kind(key) != kind:
            raise file.error("wrong type", key, file.kind(key), kind)
    _check_types(file)
    _check_tokens(file)
    _check_merges(file)


def _id_keys(file: GGUFFile) -> list[str]:
    return [key for key in file.keys if key.startswith(_PREFIX) and key.endswith(_ID)]


def _check_types(file: GGUFFile) -> None:
    if TYPES not in file:
        return
    types = file.integers(TYPES, high=_LAST_TYPE)
    if _BYTE_TYPE in types:
        at = types.index(_BYTE_TYPE)
        raise file.error("a byte token in a byte-level BPE", f"{TYPES}[{at}]", _BYTE_TYPE, "another type")


def _check_tokens(file: GGUFFile) -> None:
    """Each token is text of its own. What is empty libllama renames, and the new name may exist."""
    tokens = file.string_array(TOKENS)
    if len(set(tokens)) == len(tokens) and not any(_unfit(token) for token in tokens):
        return
    first: dict[bytes, int] = {}
    for i, token in enumerate(tokens):
        if reason := _unfit(token):
            raise file.error(reason, f"{TOKENS}[{i}]", _shown(token), f"1..{MAX_TOKEN_BYTES} bytes of text without NUL")
        other = first.setdefault(token, i)
        if other != i:
            found = f"{_shown(token)} at {other} and {i}"
            raise file.error("two tokens are the same", TOKENS, found, "distinct tokens")


def _unfit(token: bytes) -> str:
    """Why a token is refused; empty if it is not."""
    if not token:
        return "an empty token"
    if len(token) > MAX_TOKEN_BYTES:
        return "too long a token"
    if b"\0" in token:
        return "a token with a NUL"
    try:
        token.decode()
    except UnicodeDecodeError:
        return "a token that is not UTF-8"
    return ""


def _check_merges(file: GGUFFile) -> None:
    """Pairs of texts with a space between; the first may begin with one."""
    for i, merge in enumerate(file.string_array(MERGES)):
        if not 0 < merge.find(b" ", 1) < len(merge) - 1 or b"\0" in merge:
            raise file.error("not two parts", f"{MERGES}[{i}]", _shown(merge), "two texts with a space between")


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
