"""GGUF files cut short and with bytes changed: refused, or the same file to ggml's reader too."""

from __future__ import annotations

import struct

import pytest
from fuzz.cases import Cases
from gguf_bytes import BOOL, F64, STR, U32, array, raw_file, scalar, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_dflash._native import ffi, lib
from pyllama_dflash.errors import DflashError, FileError
from pyllama_dflash.gguf_file import TOKENS, GGUFFile

pytestmark = pytest.mark.usefixtures("no_open_descriptors")

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
        with pytest.raises(FileError):
            GGUFFile(save(SAMPLE[:length]))


def same_to_ggml(file: GGUFFile) -> None:
    params = ffi.new("struct gguf_init_params *", {"no_alloc": True, "ctx": ffi.NULL})
    context = lib.gguf_init_from_buffer(file.mapping(), file.size, params[0])
    assert context != ffi.NULL
    try:
        keys = [ffi.string(lib.gguf_get_key(context, i)).decode() for i in range(lib.gguf_get_n_kv(context))]
        assert tuple(keys) == file.keys
        assert lib.gguf_get_n_tensors(context) == len(file.tensors)
        for i, info in enumerate(file.tensors.values()):
            assert ffi.string(lib.gguf_get_tensor_name(context, i)).decode() == info.name
            assert lib.gguf_get_data_offset(context) + lib.gguf_get_tensor_offset(context, i) == info.offset
            assert (lib.gguf_get_tensor_size(context, i), lib.gguf_get_tensor_type(context, i)) == (
                info.nbytes,
                info.type,
            )
    finally:
        lib.gguf_free(context)


def read_everything(path) -> None:
    """Open and read all that is in the file; only the package's own errors may come out.

    What opens must be the same file to ggml's reader, which libllama uses.
    """
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
            same_to_ggml(file)
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


def test_damaged_pairs_are_the_same_to_ggml(save, tmp_path_factory):
    cases = Cases(5, tmp_path_factory.mktemp("bases"))
    try:
        for i in range(500):
            read_everything(save(cases.content(i)))
    finally:
        cases.close()
