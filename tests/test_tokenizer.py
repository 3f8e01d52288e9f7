"""The vocabulary: against a slow BPE of our own, round trips, streaming, chat templates."""

from __future__ import annotations

import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import write_vocabulary

from pyllama_dflash.errors import EngineClosed, FileError, RequestError
from pyllama_dflash.gguf_file import TOKENS, GGUFFile
from pyllama_dflash.tokenizer import MAX_TEXT_BYTES, StreamDecoder, Tokenizer

VOCABULARY = Path(__file__).resolve().parent.parent / "vendor/llama.cpp/models/ggml-vocab-qwen35.gguf"


@pytest.fixture(scope="module")
def qwen():
    with Tokenizer(VOCABULARY) as tokenizer:
        yield tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Tokens, against byte-pair encoding written down from its definition
# ---------------------------------------------------------------------------------------------------------------------
class SlowBPE:
    """Splits by the published expression, then merges the best-ranked neighbours, leftmost first, until none is left.

    Python's `re` has no classes for letters and numbers of all scripts: `[^\\W\\d_]` stands for letters, so texts with
    combining marks or numbers beyond the digits are outside of it.
    """

    SPLIT = re.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\w]?[^\W\d_]+|_?[^\W\d_]+|\d"
        r"| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def __init__(self, path: Path) -> None:
        with GGUFFile(path) as file:
            self.ids = {token.decode(): i for i, token in enumerate(file.string_array(TOKENS))}
            merges = [tuple(m.decode().split(" ", 1)) for m in file.string_array("tokenizer.ggml.merges")]
        self.ranks = {merge: rank for rank, merge in enumerate(merges)}
        self.letters = byte_letters()

    def encode(self, text: str) -> list[int]:
        return [i for word in self.SPLIT.findall(text) for i in self.word(word)]

    def word(self, word: str) -> list[int]:
        parts = [self.letters[b] for b in word.encode()]
        while len(parts) > 1:
            ranks = [self.ranks.get(pair, 1 << 30) for pair in pairwise(parts)]
            if min(ranks) == 1 << 30:
                break
            i = ranks.index(min(ranks))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[p] for p in parts]


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


@pytest.fixture(scope="module")
def slow():
    return SlowBPE(VOCABULARY)


def test_well_known_tokens(qwen):
    assert qwen.encode("Hello world") == [9707, 1879]
    assert qwen.encode("") == []
    assert (qwen.n_vocab, qwen.bos_id, qwen.eot_id, qwen.mask_id) == (151936, 151643, 151645, None)
    assert qwen.piece(9707) == b"Hello" and qwen.piece(1879) == b" world"


@pytest.mark.parametrize(
    "text",
    [
        "def fibonacci(n):\n    if n < 2:\n        return n\n\n\n    return fibonacci(n - 1)  # they'LL see\r\n",
        "   leading, trailing   ",
        "tabs\t\tand\n\n \n mixed \t whitespace\n",
        "snake_case __dunder__ CamelCase 1234567 3.14e-10 0xFF",
        "é ñ ü Привет мир 你好世界 🦙🚀 ¿qué?",
        "'s't're've'm'll'd I'M YOU'RE",
        "!!!???...---===>>> $#@% ```python\n```",
        "a" * 200 + " " * 77 + "\n" * 33,
    ],
)
def test_encode_equals_the_slow_bpe(qwen, slow, text):
    assert qwen.encode(text) == slow.encode(text)


@given(text=st.text("abcXY _'.,;()=0129\n\r\t éПр你🦙", max_size=60))
@settings(max_examples=300, deadline=None)
def test_encode_equals_the_slow_bpe_on_random_text(qwen, slow, text):
    assert qwen.encode(text) == slow.encode(text)


@given(text=st.text(max_size=80))
@settings(max_examples=300, deadline=None)
def test_every_text_comes_back(qwen, text):
    tokens = qwen.encode(text)
    assert qwen.decode(tokens) == text
    assert len(tokens) <= len(text.encode())


def test_nul_is_text(qwen):
    tokens = qwen.encode("a\0b\0")
    assert qwen.decode(tokens) == "a\0b\0" and len(tokens) == 4


def test_control_tokens_only_on_request(qwen):
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed, plain = qwen.encode(text, parse_special=True), qwen.encode(text)
    assert parsed[-1] == qwen.eot_id and qwen.eot_id not in plain
    assert qwen.decode(plain) == text == qwen.decode(parsed, special=True)
    assert qwen.decode(parsed) == "user\nhi"
    assert qwen.is_eog(qwen.eot_id) and qwen.is_control(qwen.eot_id) and not qwen.is_eog(parsed[1])


def test_long_words_neither_crash_nor_crawl(qwen):
    for unit in ("a", " ", "\n", "1", "é", "!"):
        text = unit * 150_000
        start = time.monotonic()
        assert qwen.decode(qwen.encode(text)) == text
        assert time.monotonic() - start < 60


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff", b"bytes", None, 3])
def test_bad_texts_are_refused(qwen, text):
    with pytest.raises(RequestError, match=r"^text: "):
        qwen.encode(text)


def test_too_long_a_text_is_refused(qwen):
    with pytest.raises(RequestError, match=rf"^text: {MAX_TEXT_BYTES + 1} bytes given; expected at most"):
        qwen.encode("x" * (MAX_TEXT_BYTES + 1))


@pytest.mark.parametrize("token", [-1, 151936, 2**31, -(2**40), "7", None, 1.0])
def test_bad_tokens_are_refused(qwen, token):
    for call in (qwen.piece, qwen.is_eog, qwen.is_control, lambda t: qwen.decode([5, t])):
        with pytest.raises(RequestError, match=r"^token: .* expected 0\.\.151935$"):
            call(token)


def test_threads_share_a_vocabulary(qwen):
    text = "def f(x):\n    return x\n" * 200
    expected, results = qwen.encode(text), []
    threads = [threading.Thread(target=lambda: results.append(qwen.encode(text))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# ---------------------------------------------------------------------------------------------------------------------
# Streaming
# ---------------------------------------------------------------------------------------------------------------------
def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.feed((t,)) for t in tokens), decoder.flush()]


@given(tokens=st.lists(st.integers(0, 151935) | st.integers(0, 255), max_size=40))
@settings(max_examples=300, deadline=None)
def test_streamed_parts_join_to_the_whole(qwen, tokens):
    assert "".join(streamed(qwen, tokens)) == qwen.decode(tokens)


def test_a_character_appears_with_its_last_byte(qwen):
    by_byte = {qwen.piece(t): t for t in range(256)}
    llama = [by_byte[bytes([b])] for b in "🦙é".encode()]
    assert streamed(qwen, llama) == ["", "", "", "🦙", "", "é", ""]
    assert streamed(qwen, llama[:3]) == ["", "", "", "\ufffd"]
    broken = [llama[0], llama[1], by_byte[b"x"], by_byte[b"\xff"], *llama[4:]]
    assert streamed(qwen, broken) == ["", "", "\ufffdx", "\ufffd", "", "é", ""]


def test_a_flushed_decoder_starts_anew(qwen):
    decoder = StreamDecoder(qwen)
    first = next(t for t in range(256) if qwen.piece(t) == b"\xf0")
    assert (decoder.feed((first,)), decoder.flush(), decoder.flush()) == ("", "\ufffd", "")
    assert decoder.feed((9707,)) == "Hello"


# ---------------------------------------------------------------------------------------------------------------------
# Opening
# ---------------------------------------------------------------------------------------------------------------------
def test_the_pair_s_vocabulary_opens(tmp_path):
    path = write_vocabulary(tmp_path)
    with Tokenizer(path) as small:
        assert small.n_vocab == 512
        assert (small.eos_id, small.pad_id, small.bos_id) == (509, 510, 510)
        assert small.is_eog(small.eos_id)
        assert small.decode(small.encode("any bytes \x00\x7f é 🦙")) == "any bytes \x00\x7f é 🦙"
    with GGUFFile(path) as file:
        Tokenizer(file).close()
        assert not file.closed


def test_bos_is_added_where_the_model_wants_it(tmp_path):
    with Tokenizer(write_vocabulary(tmp_path, ggml__add_bos_token=("bool", True))) as small:
        assert small.encode("a")[0] == small.bos_id and len(small.encode("a", add_special=False)) == 1
        assert small.encode("") == [small.bos_id]


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileError, match=r"absent.gguf: cannot be opened"):
        Tokenizer(tmp_path / "absent.gguf")
    (tmp_path / "bad.gguf").write_bytes(VOCABULARY.read_bytes()[:1_000_000])
    with pytest.raises(FileError, match=r"bad.gguf: tokenizer.ggml.tokens: array longer than the file has room for"):
        Tokenizer(tmp_path / "bad.gguf")


def test_a_closed_tokenizer_says_so():
    tokenizer = Tokenizer(VOCABULARY)
    assert not tokenizer.closed
    tokenizer.close()
    tokenizer.close()
    assert tokenizer.closed
    for use in (
        lambda: tokenizer.encode("a"), lambda: tokenizer.piece(1), lambda: tokenizer.is_eog(1),
        lambda: tokenizer.chat_template,
    ):  # fmt: skip
        with pytest.raises(EngineClosed, match="is closed"):
            use()


def test_opening_is_quick():
    start = time.monotonic()
    Tokenizer(VOCABULARY).close()
    assert time.monotonic() - start < 10  # about half a second on an idle machine


# ---------------------------------------------------------------------------------------------------------------------
# Chat templates
# ---------------------------------------------------------------------------------------------------------------------
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def test_the_file_s_template_is_used(tmp_path, qwen):
    with Tokenizer(write_vocabulary(tmp_path)) as small:
        text = small.apply_chat_template(MESSAGES)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n"
        assert small.apply_chat_template(MESSAGES[:1], add_generation_prompt=False).endswith("hi<|im_end|>\n")
    with Tokenizer(write_vocabulary(tmp_path, chat_template=("str", "{{ eos_token }}|{{ x }}"))) as small:
        assert small.apply_chat_template([], x=3) == tiny_pair.EOS_TEXT + "|3"
    with (
        Tokenizer(write_vocabulary(tmp_path, chat_template=None)) as small,
        pytest.raises(RequestError, match="has none"),
    ):
        small.apply_chat_template(MESSAGES)
