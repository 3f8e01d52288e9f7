"""The GGUF reader: values and tensors of good files; `test_gguf_malformed` has the bad ones."""

from __future__ import annotations

import pickle
import re
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf_bytes import BOOL, F32, F64, I32, PACKED, STR, U8, U32, U64, array, raw_file, scalar, tensor
from tiny_pair import TinyPair

from pyllama_dflash._native import ffi
from pyllama_dflash.errors import DeviceError, EngineClosed, FileError, RequestError
from pyllama_dflash.gguf_file import TOKENS, GGUFFile

pytestmark = pytest.mark.usefixtures("no_open_descriptors")

# -- good files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(PACKED.keys() - {F32, F64, BOOL}))
def test_integers_of_every_width(save, kind):
    with GGUFFile(save(raw_file([scalar("a", kind, 7), array("b", kind, [1, 0, 3])]))) as file:
        assert file.integer("a") == 7 and file.number("a") == 7.0
        assert file.integers("b") == (1, 0, 3)
        assert file.per_layer("a", 2) == (7, 7) and file.per_layer("b", 3) == (1, 0, 3)
        assert file.keys == ("a", "b") and "a" in file and "c" not in file


def test_other_values(save):
    keys = [
        scalar("f", F32, 0.5), scalar("d", F64, 0.25), scalar("yes", BOOL, 1), scalar("one", U8, 1),
        array("pattern", BOOL, [1, 0, 1]), array("numbers", I32, [0, 1]), scalar("text", STR, "é"),
        scalar("bytes", STR, b"\xff!"), array("words", STR, ["x", "", "é"]), array("none", I32, []),
    ]  # fmt: skip
    with GGUFFile(save(raw_file(keys))) as file:
        assert file.number("f") == 0.5 and file.number("d") == 0.25
        assert file.flag("yes") is True and file.flag("one") is True
        assert file.flags("pattern") == (True, False, True) and file.flags("numbers") == (False, True)
        assert file.text("text") == "é" and file.text("bytes") == "�!"
        assert file.string_array("words") == [b"x", b"", "é".encode()]
        assert file.length("words") == 3 and file.integers("none") == () and file.length("f") == 0
        kinds = {key: file.kind(key) for key in ("f", "yes", "text", "words", "pattern", "absent")}
        assert kinds == {
            "f": "f32", "yes": "bool", "text": "str", "words": "[str]", "pattern": "[bool]", "absent": "nothing"
        }  # fmt: skip


def test_defaults_stand_for_missing_keys_only(save):
    with GGUFFile(save(raw_file([scalar("zero", U32, 0), scalar("off", BOOL, 0)]))) as file:
        assert file.integer("a", 5) == 5 and file.integer("zero", 5) == 0
        assert file.flag("a", True) is True and file.flag("off", True) is False
        assert file.number("a", 2.0) == 2.0 and file.text("a", "x") == "x"
        assert file.per_layer("a", 2, 9) == (9, 9)


@pytest.mark.parametrize(
    ("read", "key", "found", "expected"),
    [
        (lambda f: f.integer("text"), "text", "str", "an integer"),
        (lambda f: f.integer("half"), "half", "f32", "an integer"),
        (lambda f: f.integer("array"), "array", "[u32]", "an integer"),
        (lambda f: f.integer("absent"), "absent", "nothing", "an integer"),
        (lambda f: f.integer("minus"), "minus", "-1", "0..2147483647"),
        (lambda f: f.integer("huge"), "huge", str(2**64 - 1), "0..2147483647"),
        (lambda f: f.integer("one", low=2, high=16), "one", "1", "2..16"),
        (lambda f: f.integers("one"), "one", "u32", "an array of integers"),
        (lambda f: f.integers("words"), "words", "[str]", "an array of integers"),
        (lambda f: f.integers("array", high=8), "array", "9", "0..8"),
        (lambda f: f.per_layer("array", 3), "array", "2 values", "3 values"),
        (lambda f: f.flag("two"), "two", "2", "0..1"),
        (lambda f: f.flags("array"), "array", "9", "0..1"),
        (lambda f: f.flags("absent"), "absent", "nothing", "an array of booleans"),
        (lambda f: f.number("nan"), "nan", "nan", "a finite number"),
        (lambda f: f.number("text"), "text", "str", "a number"),
        (lambda f: f.text("one"), "one", "u32", "a string"),
        (lambda f: f.text("words"), "words", "[str]", "a string"),
        (lambda f: f.string_array("array"), "array", "[u32]", "an array of strings"),
        (lambda f: f.string_array("text"), "text", "str", "an array of strings"),
    ],
)
def test_wrong_values_are_refused(save, read, key, found, expected):
    keys = [
        scalar("text", STR, "x"), scalar("half", F32, 0.5), array("array", U32, [0, 9]), scalar("minus", I32, -1),
        scalar("huge", U64, 2**64 - 1), scalar("one", U32, 1), scalar("two", U8, 2), scalar("nan", F64, float("nan")),
        array("words", STR, ["a"]),
    ]  # fmt: skip
    path = save(raw_file(keys))
    with GGUFFile(path) as file, pytest.raises(FileError) as caught:
        read(file)
    error = caught.value
    assert (error.file, error.key, str(error.found), str(error.expected)) == (str(path), key, found, expected)
    for part in (str(path), key, found, expected):
        assert part in str(error)


def test_tensors_agree_with_the_reference_reader(tmp_path):
    path, _ = TinyPair(matrices="Q4_K").write(tmp_path)
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert len(file.tensors) == len(reader.tensors) > 50
        memory = np.memmap(path, np.uint8, "r")
        for other in reader.tensors:
            mine = file.tensors[other.name]
            assert mine.shape == tuple(int(n) for n in other.shape)
            assert (mine.type, mine.type_name) == (int(other.tensor_type), other.tensor_type.name)
            assert (mine.offset, mine.nbytes) == (other.data_offset, other.n_bytes)
            data = memory[mine.offset : mine.offset + mine.nbytes]
            assert data.tobytes() == np.ascontiguousarray(other.data).tobytes()


def test_trailing_ones_are_no_dimensions(save):
    content = raw_file(
        [], [tensor("a", (4, 3, 1, 1)), tensor("b", (1,), 0, 64), tensor("c", (8, 1, 2), 0, 96)], bytes(160)
    )
    with GGUFFile(save(content)) as file:
        assert [file.tensors[n].shape for n in "abc"] == [(4, 3), (1,), (8, 1, 2)]


def test_a_full_vocabulary_opens_in_no_time(save):
    n = 248_320
    keys = [
        array(TOKENS, STR, [f"token{i}" for i in range(n)]), array("tokenizer.ggml.token_type", I32, [1] * n),
        array("tokenizer.ggml.merges", STR, [f"a{i} b" for i in range(n)]),
    ]  # fmt: skip
    path = save(raw_file(keys, [tensor()], bytes(128)))
    start = time.perf_counter()
    with GGUFFile(path) as file:
        took = time.perf_counter() - start
        assert file.n_tokens == file.length("tokenizer.ggml.merges") == n
        assert file.digest(TOKENS) != file.digest("tokenizer.ggml.merges")
    assert took < 1.0


def test_closing(save):
    path = save(raw_file([scalar("a", U32, 1)], [tensor()], b"\1" * 128))
    with GGUFFile(path) as file:
        memory = file.mapping()
        offset = file.tensors["t"].offset
    assert file.closed
    file.close()
    assert ffi.buffer(memory)[offset : offset + 4] == b"\1\1\1\1", "a mapping outlives close()"
    del memory
    for use in (lambda: file.integer("a"), file.mapping, lambda: file.kind("a"), lambda: file.length("a")):
        with pytest.raises(EngineClosed, match=re.escape(str(path))):
            use()


def test_errors_are_one_printable_line_and_travel_between_processes():
    error = FileError("a.gguf", "bad", "k\ney", "\x1b[31mred\r\n" + "x" * 500, [1])
    text = str(error)
    assert (
        text.isprintable() and text.startswith("a.gguf: k ey: bad; found ?[31mred x") and text.endswith("expected [1]")
    )
    assert len(text) < 250
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is FileError and again.__dict__ == error.__dict__ and str(again) == text
    assert str(FileError("a.gguf", "cannot be opened")) == "a.gguf: cannot be opened"
    request = RequestError("temperature", -1, "0..10")
    assert str(request) == "temperature: -1 given; expected 0..10" and isinstance(request, ValueError)
    assert str(DeviceError("two\nlines")) == "two lines" and isinstance(DeviceError(""), RuntimeError)


def test_a_refusal_of_a_huge_value_is_no_huge_text():
    found = list(range(1_000_000))
    tracemalloc.start()
    text = str(FileError("a.gguf", "tapped layers", "k", found))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text == f"a.gguf: k: tapped layers; found {str(found[:60])[:157]}..."
    assert peak < 3 * len(str(found))
