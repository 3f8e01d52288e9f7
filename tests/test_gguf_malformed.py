"""Malformed GGUF files: each class is refused with an error that says what is wrong and where, and nothing stays open.

The classes are those that upstream and advisories about GGUF readers name, and ours. Classes about what keys mean are
in `test_vocabulary` (tokens), `test_models_load` and `test_models_load_draft` (hyper-parameters, tensors), `test_pair`.
"""

from __future__ import annotations

import os
import struct
import tracemalloc

import pytest
from gguf_bytes import ARR, BOOL, STR, U16, U32, U64, array, raw_file, scalar, string, tensor

from pyllama_dflash.errors import FileError
from pyllama_dflash.gguf_file import GGUFFile

pytestmark = pytest.mark.usefixtures("no_open_descriptors")


def refusal(path) -> str:
    """What is said about the file behind its name. Whatever the file claims, next to no memory is taken for it."""
    tracemalloc.start()
    with pytest.raises(FileError) as caught:
        GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18
    assert type(caught.value) is FileError
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.isprintable()
    return message.removeprefix(f"{path}: ")


def test_paths_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    cases = {"absent": "No such file", ".": "not a regular file", "pipe": "not a regular file"}
    for name, reason in cases.items():
        assert reason in refusal(tmp_path / name)
    with pytest.raises(FileError, match="null byte"):
        GGUFFile("a\0b")


GOOD_KEY, GOOD_TENSOR = scalar("a", U32, 1), tensor()
LONG = 2**40
MALFORMED = {
    # Header.
    "empty": (b"", "truncated header; found 0 bytes; expected a GGUF file"),
    "header cut": (raw_file()[:23], "truncated header; found 23 bytes; expected at least 24 bytes"),
    "bad magic": (raw_file(magic=b"GGML"), "magic: not a GGUF file; found b'GGML'; expected b'GGUF'"),
    "version 0": (raw_file(version=0), "version: unsupported GGUF version; found 0; expected 2 or 3"),
    "version 1": (raw_file(version=1), "version: unsupported GGUF version; found 1; expected 2 or 3"),
    "future version": (raw_file(version=4), "version: unsupported GGUF version; found 4; expected 2 or 3"),
    "big endian": (
        raw_file(version=3 << 24),
        "version: written for the other byte order; found 50331648; expected 2 or 3",
    ),
    "negative tensor count": (
        raw_file(n_tensors=-1),
        "tensor count: impossible count for a file of this size; found -1; expected 0..0",
    ),
    "negative key count": (
        raw_file(n_keys=-1),
        "key count: impossible count for a file of this size; found -1; expected 0..0",
    ),
    "huge tensor count": (
        raw_file([GOOD_KEY], n_tensors=2**60),
        "tensor count: impossible count for a file of this size; found 1152921504606846976; expected 0..0",
    ),
    "huge key count": (
        raw_file([GOOD_KEY], n_keys=2**60),
        "key count: impossible count for a file of this size; found 1152921504606846976; expected 0..1",
    ),
    "tensors over the cap": (
        raw_file([bytes(1 << 22)], n_tensors=1 << 16 | 1, n_keys=0),
        "tensor count: impossible count for a file of this size; found 65537; expected 0..65536",
    ),
    "keys over the cap": (
        raw_file([bytes(1 << 20)], n_keys=1 << 16 | 1),
        "key count: impossible count for a file of this size; found 65537; expected 0..65536",
    ),
    "more keys than there are": (
        raw_file([GOOD_KEY, bytes(64)], n_keys=3),
        "key 1: length of a name; found 0 bytes at 41; expected 1..4096 bytes",
    ),
    # Keys.
    "key length -1": (
        raw_file([struct.pack("<q", -1) + bytes(32)]),
        "key 0: length of a name; found 18446744073709551615 bytes at 24; expected 1..4096 bytes",
    ),
    "key longer than the file": (
        raw_file([struct.pack("<Q", 1000) + bytes(32)]),
        "key 0: truncated; found 32 bytes at 32; expected 1000 bytes",
    ),
    "key over the cap": (
        raw_file([scalar("k" * 4097, U32, 1)]),
        "key 0: length of a name; found 4097 bytes at 24; expected 1..4096 bytes",
    ),
    "empty key": (
        raw_file([scalar("", U32, 1)]),
        "key 0: length of a name; found 0 bytes at 24; expected 1..4096 bytes",
    ),
    "key with a NUL": (
        raw_file([scalar("a\0b", U32, 1)]),
        "key 0: not a name; found b'a\\x00b'; expected UTF-8 without NUL",
    ),
    "key that is no text": (
        raw_file([scalar(b"\xff", U32, 1)]),
        "key 0: not a name; found b'\\xff'; expected UTF-8 without NUL",
    ),
    "duplicate key": (raw_file([GOOD_KEY, GOOD_KEY]), "a: duplicate key; found key 1; expected a key that occurs once"),
    # Values.
    "unknown value type": (
        raw_file([string("a") + struct.pack("<iI", 77, 1)]),
        "a: unknown value type; found 77; expected one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12",
    ),
    "negative value type": (
        raw_file([string("a") + struct.pack("<iI", -1, 1)]),
        "a: unknown value type; found 4294967295; expected one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12",
    ),
    "array of arrays": (
        raw_file([string("a") + struct.pack("<iiQ", ARR, ARR, 1) + bytes(16)]),
        "a: unknown element type; found 9; expected one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12",
    ),
    "unknown element type": (
        raw_file([string("a") + struct.pack("<iiQ", ARR, 13, 1) + bytes(16)]),
        "a: unknown element type; found 13; expected one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12",
    ),
    "value cut": (raw_file([scalar("a", U64, 1)])[:-1], "a: truncated; found 7 bytes at 37; expected 8 bytes"),
    "array longer than the file": (
        raw_file([array("a", U32, [1], count=LONG)]),
        "a: array longer than the file has room for; found 1099511627776; expected at most 1",
    ),
    "array length overflow": (
        raw_file([array("a", U64, [1], count=2**61)]),
        "a: array longer than the file has room for; found 2305843009213693952; expected at most 1",
    ),
    "array length -1": (
        raw_file([array("a", STR, ["x"], count=2**64 - 1)]),
        "a: array longer than the file has room for; found 18446744073709551615; expected at most 1",
    ),
    "array over the cap": (
        raw_file([array("a", BOOL, [], count=1 << 22 | 1), bytes(1 << 23)], n_keys=1),
        "a: array longer than the file has room for; found 4194305; expected at most 4194304",
    ),
    "string longer than the file": (
        raw_file([string("a") + struct.pack("<iQ", STR, LONG)]),
        "a: string longer than the file has room for; found 1099511627776 bytes at 45; expected at most 0 bytes",
    ),
    "string over the cap": (
        raw_file([scalar("a", STR, bytes(1 << 24 | 1))]),
        "a: string longer than the file has room for; found 16777217 bytes at 45; expected at most 16777216 bytes",
    ),
    "string length -1": (
        raw_file([string("a") + struct.pack("<iq", STR, -1)]),
        "a: string longer than the file has room for; found 18446744073709551615 bytes at 45; expected at most 0 bytes",
    ),
    "string in an array too long": (
        raw_file([array("a", STR, ["x", "y"])])[:-1],
        "a: string longer than the file has room for; found 1 bytes at 66; expected at most 0 bytes",
    ),
    "length in an array cut": (
        raw_file([array("a", STR, ["xxxxxxxx"], 2)]),
        "a: truncated; found 0 bytes at 65; expected 8 bytes",
    ),
    # Alignment.
    "alignment 0": (
        raw_file([scalar("general.alignment", U32, 0)]),
        "general.alignment: tensors would not be aligned; found 0; expected a power of two in 8..65536",
    ),
    "alignment 4": (
        raw_file([scalar("general.alignment", U32, 4)], [GOOD_TENSOR], bytes(256)),
        "general.alignment: tensors would not be aligned; found 4; expected a power of two in 8..65536",
    ),
    "alignment 13": (
        raw_file([scalar("general.alignment", U32, 13)]),
        "general.alignment: tensors would not be aligned; found 13; expected a power of two in 8..65536",
    ),
    "alignment of gigabytes": (
        raw_file([scalar("general.alignment", U32, 2**31)], [GOOD_TENSOR], bytes(256)),
        "general.alignment: tensors would not be aligned; found 2147483648; expected a power of two in 8..65536",
    ),
    "alignment of another type": (
        raw_file([scalar("general.alignment", U64, 32)]),
        "general.alignment: wrong type; found u64; expected u32",
    ),
    "alignment is a list": (
        raw_file([array("general.alignment", U32, [32])]),
        "general.alignment: wrong type; found [u32]; expected u32",
    ),
    "another alignment than the file's": (
        raw_file([scalar("general.alignment", U32, 64)], [GOOD_TENSOR, tensor("u", offset=160)], bytes(512)),
        "u: wrong tensor offset; found 160; expected 128",
    ),
    # Tensors.
    "tensor name too long": (
        raw_file([], [tensor("n" * 64)], bytes(128)),
        "tensor 0: length of a name; found 64 bytes at 24; expected 1..63 bytes",
    ),
    "empty tensor name": (
        raw_file([], [tensor("")], bytes(128)),
        "tensor 0: length of a name; found 0 bytes at 24; expected 1..63 bytes",
    ),
    "tensor name with a NUL": (
        raw_file([], [tensor("t\0")], bytes(128)),
        "tensor 0: not a name; found b't\\x00'; expected UTF-8 without NUL",
    ),
    "duplicate tensor": (
        raw_file([], [tensor(), tensor(offset=128)], bytes(512)),
        "t: duplicate tensor; found tensor 1; expected a name that occurs once",
    ),
    "no dimensions": (raw_file([], [tensor(dims=())], bytes(128)), "t: number of dimensions; found 0; expected 1..4"),
    "five dimensions": (
        raw_file([], [tensor(dims=(1, 1, 1, 1, 32))], bytes(128)),
        "t: number of dimensions; found 5; expected 1..4",
    ),
    "2^32 - 1 dimensions": (
        raw_file([], [tensor(n_dims=2**32 - 1)], bytes(128)),
        "t: number of dimensions; found 4294967295; expected 1..4",
    ),
    "dimension 0": (
        raw_file([], [tensor(dims=(32, 0))], bytes(128)),
        "t: dimension below one; found [32, 0]; expected positive dimensions",
    ),
    "negative dimension": (
        raw_file([], [tensor(dims=(-32,))], bytes(128)),
        "t: dimension below one; found [-32]; expected positive dimensions",
    ),
    "two negative dimensions": (
        raw_file([], [tensor(dims=(-4, -8))], bytes(128)),
        "t: dimension below one; found [-4, -8]; expected positive dimensions",
    ),
    "element count overflow": (
        raw_file([], [tensor(dims=(2**32, 2**32))], bytes(128)),
        "t: truncated: tensor ends past the end of the file; found 73786976294838206560; expected at most 224",
    ),
    "byte count overflow": (
        raw_file([], [tensor(dims=(2**61, 2))], bytes(128)),
        "t: truncated: tensor ends past the end of the file; found 18446744073709551712; expected at most 224",
    ),
    "byte count that overflows to its data": (
        raw_file([], [tensor(dims=(32, 2**59 + 1, 2, 2))], bytes(1024)),
        "t: truncated: tensor ends past the end of the file; found 295147905179352826464; expected at most 1120",
    ),
    "exabytes": (
        raw_file([], [tensor(dims=(2**60,))], bytes(128)),
        "t: truncated: tensor ends past the end of the file; found 4611686018427387968; expected at most 192",
    ),
    "unknown tensor type": (
        raw_file([], [tensor(kind=999)], bytes(128)),
        "t: unknown tensor type; found 999; expected a type of 0..42 in use",
    ),
    "negative tensor type": (
        raw_file([], [tensor(kind=-1)], bytes(128)),
        "t: unknown tensor type; found 4294967295; expected a type of 0..42 in use",
    ),
    "removed tensor type": (
        raw_file([], [tensor(kind=4)], bytes(128)),
        "t: unknown tensor type; found 4; expected a type of 0..42 in use",
    ),
    "rows that are no whole blocks": (
        raw_file([], [tensor(dims=(33,), kind=8)], bytes(128)),
        "t: rows are no whole blocks; found 33; expected a multiple of 32 for Q8_0",
    ),
    "wrong offset": (raw_file([], [tensor(offset=64)], bytes(256)), "t: wrong tensor offset; found 64; expected 0"),
    "misaligned offset": (
        raw_file([], [tensor(), tensor("u", offset=129)], bytes(512)),
        "u: wrong tensor offset; found 129; expected 128",
    ),
    "overlapping tensors": (
        raw_file([], [tensor(), tensor("u", offset=0)], bytes(512)),
        "u: wrong tensor offset; found 0; expected 128",
    ),
    "tensor info cut": (raw_file(n_tensors=1) + tensor()[:-1], "t: truncated; found 7 bytes at 49; expected 8 bytes"),
    "data cut": (
        raw_file([], [GOOD_TENSOR], bytes(127)),
        "t: truncated: tensor ends past the end of the file; found 192; expected at most 191",
    ),
    "no data": (
        raw_file([], [GOOD_TENSOR]),
        "t: truncated: tensor ends past the end of the file; found 192; expected at most 64",
    ),
    "summed size overflow": (
        raw_file([], [tensor("0", (2**59, 7)), tensor("1", (2**59, 7), 0, 7 * 2**61)], bytes(64)),
        "0: truncated: tensor ends past the end of the file; found 16140901064495857792; expected at most 192",
    ),
    "exabytes together": (
        raw_file([], [tensor("0", (2**60,)), tensor("1", (2**60,), 0, 2**62)], bytes(64)),
        "0: truncated: tensor ends past the end of the file; found 4611686018427388000; expected at most 160",
    ),
    # What is not read.
    "part of a split file": (
        raw_file([scalar("split.count", U16, 3)]),
        "split.count: one part of a split file; join the parts first; found 3; expected 1",
    ),
    "split count of another type": (
        raw_file([scalar("split.count", STR, "3")]),
        "split.count: wrong type; found str; expected an integer",
    ),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_refused(save, content, message):
    assert refusal(save(content)) == message
