"""The GGUF reader: values and tensors of good files, and a clean refusal of every malformed one."""

from __future__ import annotations

import os
import pickle
import re
import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pair import TinyPair

from pyllama_dflash._native import ffi
from pyllama_dflash.errors import DeviceError, DflashError, EngineClosed, FileError, RequestError
from pyllama_dflash.gguf_file import TOKENS, GGUFFile

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
PACKED = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "b", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(key: str, kind: int, value) -> bytes:
    body = string(value) if kind == STR else struct.pack("<" + PACKED[kind], value)
    return string(key) + struct.pack("<i", kind) + body


def array(key: str, kind: int, values, count: int | None = None) -> bytes:
    body = b"".join(string(v) if kind == STR else struct.pack("<" + PACKED[kind], v) for v in values)
    return string(key) + struct.pack("<iiQ", ARR, kind, len(values) if count is None else count) + body


def tensor(name: str = "t", dims=(32,), kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}qiQ", count, *dims, kind, offset)


def raw_file(keys=(), tensors=(), data: bytes = b"", *, magic=b"GGUF", version=3, n_keys=None, n_tensors=None) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<Iqq", version, *counts) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32) + data if tensors else head + data


@pytest.fixture
def save(tmp_path):
    def write(content: bytes):
        path = tmp_path / "file.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(autouse=True)
def no_open_descriptors():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def refusal(path) -> FileError:
    with pytest.raises(FileError) as caught:
        GGUFFile(path)
    assert type(caught.value) is FileError
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return caught.value


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


# -- bad files -----------------------------------------------------------------------------------------------------


def test_paths_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    cases = {"absent": "No such file", ".": "not a regular file", "pipe": "not a regular file"}
    for name, reason in cases.items():
        assert reason in str(refusal(tmp_path / name))
    with pytest.raises(FileError, match="null byte"):
        GGUFFile("a\0b")


GOOD_KEY, GOOD_TENSOR = scalar("a", U32, 1), tensor()
EXABYTES = [tensor("0", (2**60,)), tensor("1", (2**60,), 0, 2**62)]
OVERFLOWING = [tensor("0", (2**59, 7)), tensor("1", (2**59, 7), 0, 7 * 2**61)]
MALFORMED = {
    "empty": (b"", "truncated header"),
    "header cut": (raw_file()[:23], "truncated header"),
    "bad magic": (raw_file(magic=b"GGML"), "magic: not a GGUF file; found b'GGML'; expected b'GGUF'"),
    "version 0": (raw_file(version=0), "other byte order"),
    "version 1": (raw_file(version=1), "version: unsupported GGUF version; found 1; expected 2 or 3"),
    "future version": (raw_file(version=4), "unsupported GGUF version; found 4"),
    "big endian": (raw_file(version=3 << 24), "other byte order"),
    "negative tensor count": (raw_file(n_tensors=-1), "tensor count: impossible count"),
    "negative key count": (raw_file(n_keys=-1), "key count: impossible count"),
    "huge tensor count": (raw_file([GOOD_KEY], n_tensors=2**60), "tensor count: impossible count"),
    "huge key count": (raw_file([GOOD_KEY], n_keys=2**60), "key count: impossible count"),
    "more keys than there are": (raw_file([GOOD_KEY, bytes(64)], n_keys=3), "malformed or truncated"),
    "key length -1": (raw_file([struct.pack("<q", -1) + bytes(32)]), "malformed or truncated"),
    "key longer than the file": (raw_file([struct.pack("<Q", 1000) + bytes(32)]), "malformed or truncated"),
    "empty key": (raw_file([scalar("", U32, 1)]), "malformed or truncated"),
    "unknown value type": (raw_file([string("a") + struct.pack("<iI", 77, 1)]), "malformed or truncated"),
    "array of arrays": (raw_file([string("a") + struct.pack("<iiQ", ARR, ARR, 1) + bytes(16)]), "malformed"),
    "unknown element type": (raw_file([string("a") + struct.pack("<iiQ", ARR, 13, 1) + bytes(16)]), "malformed"),
    "duplicate key": (raw_file([GOOD_KEY, GOOD_KEY]), "malformed or truncated"),
    "array longer than the file": (raw_file([array("a", U32, [1], count=2**40)]), "malformed or truncated"),
    "array length overflow": (raw_file([array("a", U64, [1], count=2**61)]), "malformed or truncated"),
    "array length -1": (raw_file([array("a", STR, ["x"], count=2**64 - 1)]), "malformed or truncated"),
    "string longer than the file": (raw_file([string("a") + struct.pack("<iQ", STR, 2**40)]), "malformed"),
    "alignment 0": (raw_file([scalar("general.alignment", U32, 0)]), "malformed or truncated"),
    "alignment 13": (raw_file([scalar("general.alignment", U32, 13)]), "malformed or truncated"),
    "alignment of another type": (raw_file([scalar("general.alignment", U64, 32)]), "malformed or truncated"),
    "alignment below 8": (
        raw_file([scalar("general.alignment", U32, 4)], [GOOD_TENSOR], bytes(256)),
        "general.alignment: tensors would not be aligned; found 4; expected 8 or more",
    ),
    "alignment of gigabytes": (
        raw_file([scalar("general.alignment", U32, 2**31)], [GOOD_TENSOR], bytes(256)), "malformed or truncated"
    ),
    "tensor name too long": (raw_file([], [tensor("n" * 64)], bytes(128)), "malformed or truncated"),
    "five dimensions": (raw_file([], [tensor(dims=(1, 1, 1, 1, 32))], bytes(128)), "malformed or truncated"),
    "dimension 0": (raw_file([], [tensor(dims=(32, 0))], bytes(128)), "t: dimension below one; found [32, 0, 1, 1]"),
    "negative dimension": (raw_file([], [tensor(dims=(-32,))], bytes(128)), "malformed or truncated"),
    "element count overflow": (raw_file([], [tensor(dims=(2**32, 2**32))], bytes(128)), "malformed or truncated"),
    "byte count overflow": (raw_file([], [tensor(dims=(2**61, 2))], bytes(128)), "malformed or truncated"),
    "exabytes": (raw_file([], [tensor(dims=(2**60,))], bytes(128)), "tensor ends past the end of the file"),
    "unknown tensor type": (raw_file([], [tensor(kind=999)], bytes(128)), "malformed or truncated"),
    "removed tensor type": (raw_file([], [tensor(kind=4)], bytes(128)), "malformed or truncated"),
    "rows that are no whole blocks": (raw_file([], [tensor(dims=(33,), kind=8)], bytes(128)), "malformed"),
    "wrong offset": (raw_file([], [tensor(offset=64)], bytes(256)), "malformed or truncated"),
    "misaligned offset": (raw_file([], [tensor(), tensor("u", offset=129)], bytes(512)), "malformed or truncated"),
    "overlapping tensors": (raw_file([], [tensor(), tensor("u", offset=0)], bytes(512)), "malformed or truncated"),
    "duplicate tensor": (raw_file([], [tensor(), tensor(offset=128)], bytes(512)), "malformed or truncated"),
    "tensor info cut": (raw_file(n_tensors=1) + tensor()[:-6], "malformed or truncated"),
    "data cut": (
        raw_file([], [GOOD_TENSOR], bytes(127)),
        "t: truncated: tensor ends past the end of the file; found 192; expected at most 191",
    ),
    "no data": (raw_file([], [GOOD_TENSOR]), "tensor ends past the end of the file"),
    "summed size overflow": (raw_file([], OVERFLOWING, bytes(64)), "malformed or truncated"),
    "exabytes together": (raw_file([], EXABYTES, bytes(64)), "tensor ends past the end of the file"),
    "part of a split file": (raw_file([scalar("split.count", U16, 3)]), "split.count: one part of a split file; "),
    "split count of another type": (raw_file([scalar("split.count", STR, "3")]), "split.count: wrong type; found str"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_refused(save, content, reason):
    assert reason in str(refusal(save(content)))


def test_native_reason_is_told(save):
    assert "duplicate key 'a'" in str(refusal(save(raw_file([GOOD_KEY, GOOD_KEY]))))


SAMPLE = raw_file(
    [
        scalar("general.architecture", STR, "qwen35"), array(TOKENS, STR, ["a", "bc"]), array("x", U32, [1, 2]),
        scalar("f", F64, 1.5), array("p", BOOL, [1, 0]),
    ],
    [tensor("one", (32, 2)), tensor("two", (32,), 8, 256)],
    bytes(256 + 34),
)  # fmt: skip


def test_every_truncation_is_refused(save):
    GGUFFile(save(SAMPLE)).close()
    for length in range(len(SAMPLE)):
        refusal(save(SAMPLE[:length]))


def read_everything(path) -> None:
    """Open and read all that is in the file; only the package's own errors may come out."""
    try:
        with GGUFFile(path) as file:
            end = len(file.mapping())
            for key in file.keys:
                for read in (file.integer, file.number, file.flag, file.text, file.integers, file.flags, file.digest):
                    try:
                        read(key)
                    except DflashError as error:
                        assert "\n" not in str(error)
            for info in file.tensors.values():
                assert 0 < info.offset < info.offset + info.nbytes <= end
    except FileError as error:
        assert str(path) in str(error)


@settings(max_examples=400, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_bytes_never_get_through(tmp_path_factory, edits):
    content = bytearray(SAMPLE)
    for place, value in edits:
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content)
    read_everything(path)


def test_every_word_replaced_by_extreme_values(save):
    for place in range(0, len(SAMPLE) - 8, 4):
        for value in (0, 2**32 - 1, 2**63, 2**64 - 1, 2**31, 1 << 40):
            path = save(SAMPLE[:place] + struct.pack("<Q", value) + SAMPLE[place + 8 :])
            read_everything(path)


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
