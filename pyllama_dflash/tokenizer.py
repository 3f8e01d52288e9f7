"""Text to tokens and back, by libllama's vocabulary of the same file; the weights are not touched.

:mod:`.vocabulary` says which files libllama gets to see. Everything is safe to use from several threads.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ._native import ffi, lib
from .chat_template import ChatTemplate
from .errors import EngineClosed, FileError, RequestError
from .ggml.logs import native_log_tail
from .gguf_file import GGUFFile
from .vocabulary import check_loadable

MAX_TEXT_BYTES = 1 << 24
"""Longest text that is encoded: many times the longest context, and far from libllama's 32-bit lengths."""

_PIECE_BYTES = 128  # enough for nearly every token; longer ones are asked for again
_new_ids = ffi.new_allocator(should_clear_after_alloc=False)


class Tokenizer:
    """The vocabulary of a GGUF file; close it or use it in a `with` block.

    `bos_id`, `eos_id`, `eot_id`, `pad_id`, `mask_id` are None where the file has no such token.

    Raises:
        FileError: not a GGUF file, or a vocabulary that cannot be used.
    """

    def __init__(self, source: str | os.PathLike[str] | GGUFFile) -> None:
        self._model: Any = None
        self._pieces: dict[tuple[int, bool], bytes] = {}
        with source_file(source) as file:
            check_loadable(file)
            self.path = file.path
            self._model = _load(file.path)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        self.bos_id = _optional(lib.llama_vocab_bos(self._vocab))
        self.eos_id = _optional(lib.llama_vocab_eos(self._vocab))
        self.eot_id = _optional(lib.llama_vocab_eot(self._vocab))
        self.pad_id = _optional(lib.llama_vocab_pad(self._vocab))
        self.mask_id = _optional(lib.llama_vocab_mask(self._vocab))
        for name, token in (("bos", self.bos_id), ("eos", self.eos_id)):
            if getattr(lib, f"llama_vocab_get_add_{name}")(self._vocab) and token is None:
                self.close()
                key = f"tokenizer.ggml.add_{name}_token"
                raise FileError(self.path, f"asks for a {name} token but has none", key, True, False)

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the vocabulary. Idempotent."""
        if self._model is not None:
            self._vocab = None
            ffi.release(self._model)
            self._model = None

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._model is None

    # -- tokens --------------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of `text`.

        `add_special` adds what the model wants around a text (Qwen: nothing).  `parse_special` reads control tokens
        that are spelled out; right for text from a chat template, wrong for text from users, who could inject them.

        Raises:
            RequestError: no text, more than MAX_TEXT_BYTES, or half of a surrogate pair in it.
        """
        data = _utf8("text", text)
        if len(data) > MAX_TEXT_BYTES:
            raise RequestError("text", f"{len(data)} bytes", f"at most {MAX_TEXT_BYTES} bytes")
        vocab = self._open()
        capacity = len(data) + 2  # a token has at least one byte; one more at each end
        ids = _new_ids("llama_token[]", capacity)
        count = int(lib.llama_tokenize(vocab, data, len(data), ids, capacity, bool(add_special), bool(parse_special)))
        if not 0 <= count <= capacity:
            raise RequestError("text", f"{len(data)} bytes", "a text that libllama can tokenize")
        return list(ffi.unpack(ids, count))

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token, perhaps a part of a character; control tokens are empty unless `special`."""
        vocab, key = self._open(), (self._checked(token), special)
        if key not in self._pieces:
            self._pieces[key] = _piece(vocab, *key)
        return self._pieces[key]

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special) for token in tokens).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether a text ends with this token: end of text, end of turn and the like."""
        return bool(lib.llama_vocab_is_eog(self._open(), self._checked(token)))

    def is_control(self, token: int) -> bool:
        """Whether the token stands for no text."""
        return bool(lib.llama_vocab_is_control(self._open(), self._checked(token)))

    # -- chat ----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, None if it has none. Not compiled before its first use."""
        self._open()
        source = lib.llama_model_chat_template(self._model, ffi.NULL)
        if source == ffi.NULL:
            return None
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        texts = {
            name: "" if token is None else self.piece(token, special=True).decode("utf-8", "replace")
            for name, token in named.items()
        }
        return ChatTemplate(ffi.string(source).decode("utf-8", "replace"), texts)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation by the file's own template; encode it with `parse_special=True`.

        `variables` reach the template as they are: `tools`, `enable_thinking`, ...  RequestError if the file has no
        template or it fails.
        """
        template = self.chat_template
        if template is None:
            raise RequestError("messages", "a conversation", f"a model with a chat template; {self.path} has none")
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)

    # ------------------------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        vocab = self._vocab
        if vocab is None:
            raise EngineClosed(f"the tokenizer of {self.path} is closed")
        return vocab

    def _checked(self, token: int) -> int:
        try:
            index = int(token.__index__())
        except AttributeError:
            index = -1
        if not 0 <= index < self.n_vocab:
            raise RequestError("token", token, f"0..{self.n_vocab - 1}")
        return index


class StreamDecoder:
    """Text of tokens that come one by one: a character appears when its last byte is there.

    What :meth:`feed` and at the end :meth:`flush` return, joined, is what :meth:`Tokenizer.decode` makes of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """The characters that are complete now."""
        return self._decoder.decode(b"".join(self._tokenizer.piece(token, self._special) for token in tokens))

    def flush(self) -> str:
        """U+FFFD for a character that stays incomplete, else nothing; afterwards a new text may start."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def source_file(source: str | os.PathLike[str] | GGUFFile) -> contextlib.AbstractContextManager[GGUFFile]:
    """An open file stays its owner's; a path is opened for as long as the block lasts."""
    return contextlib.nullcontext(source) if isinstance(source, GGUFFile) else GGUFFile(source)


def _utf8(name: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise RequestError(name, type(text).__name__, "a string")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at {error.start}"
        raise RequestError(name, found, "Unicode without surrogates") from None


@functools.cache
def _start_libllama() -> None:
    lib.llama_backend_init()


def _load(path: str) -> Any:
    """libllama's model of the file with the vocabulary alone; freed with its handle."""
    _start_libllama()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    devices = ffi.new("ggml_backend_dev_t[1]")  # ends at once: no device is looked at
    params.devices = devices
    native_log_tail()  # drop what others left
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if model == ffi.NULL:
        raise FileError(path, f"the vocabulary cannot be used: {native_log_tail() or 'no reason given'}")
    return ffi.gc(model, lib.llama_model_free)


def _piece(vocab: Any, token: int, special: bool) -> bytes:
    room = _PIECE_BYTES
    buffer = ffi.new("char[]", room)
    size = int(lib.llama_token_to_piece(vocab, token, buffer, room, 0, special))
    if size < 0:
        room = -size
        buffer = ffi.new("char[]", room)
        size = int(lib.llama_token_to_piece(vocab, token, buffer, room, 0, special))
    return bytes(ffi.unpack(buffer, size))


def _optional(token: int) -> int | None:
    return None if token < 0 else int(token)
