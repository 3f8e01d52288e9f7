"""The extension itself: one binary for all CPythons, own library names, declarations that the compiler checked."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pyllama_dflash import _native
from pyllama_dflash._native import LIB_DIR, ffi, lib

CDEF = Path(__file__).resolve().parent.parent / "pyllama_dflash" / "_native" / "cdef"


def test_stable_abi() -> None:
    assert Path(_native._dflash.__file__).name == "_dflash.abi3.so"


def test_libraries_have_our_names_only() -> None:
    names = {path.name for path in LIB_DIR.iterdir()}
    assert {"libdflash-base.so", "libdflash-ggml.so", "libdflash-llama.so", "libdflash-cpu.so"} <= names
    assert [name for name in names if not name.startswith(("libdflash-", "LICENSE"))] == []


def test_no_path_of_the_build_machine_is_needed() -> None:
    """Every library finds its neighbours relative to itself, and none asks for a ggml or llama by a stock name."""
    for path in [*LIB_DIR.glob("*.so"), Path(_native._dflash.__file__)]:
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        runpath = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic)
        assert runpath == ["$ORIGIN/../lib" if path.parent != LIB_DIR else "$ORIGIN"]
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        assert [name for name in needed if re.match(r"lib(ggml|llama)", name)] == []


def test_no_process_wide_symbols() -> None:
    """STB_GNU_UNIQUE symbols would be shared with another ggml even across RTLD_DEEPBIND."""
    for path in LIB_DIR.glob("*.so"):
        command = ["readelf", "-Ws", "--dyn-syms", str(path)]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert " GLOBAL " in symbols and " UNIQUE " not in symbols, path.name


def declared() -> list[str]:
    names = []
    for path in sorted(CDEF.glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("typedef"))
        names += re.findall(r"\b(\w+)\((?!\*)[^()]*\);", text)
    return names


def test_every_declared_function_is_there() -> None:
    names = declared()
    assert len(names) > 200 and "ggml_init" in names and "llama_tokenize" in names
    assert [name for name in names if not hasattr(lib, name)] == []


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("int32_t * ggml_nelements(const struct ggml_tensor * tensor);", "ggml_nelements"),
        ("int64_t ggml_nelements(const struct ggml_context * tensor);", "ggml_nelements"),
        ("int64_t ggml_nelements(const struct ggml_tensor * tensor, int extra);", "ggml_nelements"),
        ("int64_t ggml_no_such_function(const struct ggml_tensor * tensor);", "ggml_no_such_function"),
        ("enum ggml_op { GGML_OP_NO_SUCH_OP, ... };", "GGML_OP_NO_SUCH_OP"),
        ("struct gguf_init_params { bool no_such_member; ...; };", "no_such_member"),
    ],
)
def test_wrong_declaration_is_a_compile_error(wrong: str, error: str, tmp_path: Path) -> None:
    """What the build does with a cdef that does not match: the C compiler refuses it and names it."""
    cffi = pytest.importorskip("cffi")
    wrong_ffi = cffi.FFI()
    types = "struct ggml_tensor; struct ggml_context;" if "struct gguf_init" not in wrong else ""
    wrong_ffi.cdef(types + wrong)
    wrong_ffi.set_source("wrong", '#include "helpers.h"')
    source = tmp_path / "wrong.c"
    wrong_ffi.emit_c_code(str(source))
    done = compile_extension(source)
    assert done.returncode != 0
    assert error in done.stderr


def test_right_declaration_compiles(tmp_path: Path) -> None:
    """The control of the test above."""
    cffi = pytest.importorskip("cffi")
    right = cffi.FFI()
    right.cdef("struct ggml_tensor; int64_t ggml_nelements(const struct ggml_tensor * tensor);")
    right.set_source("right", '#include "helpers.h"')
    source = tmp_path / "right.c"
    right.emit_c_code(str(source))
    done = compile_extension(source)
    assert done.returncode == 0, done.stderr


def compile_extension(source: Path) -> subprocess.CompletedProcess[str]:
    """Compile only, with the flags of pyllama_dflash/_native/CMakeLists.txt that turn a mismatch into an error."""
    import sysconfig

    root = CDEF.parent.parent.parent
    cmake = (CDEF.parent / "CMakeLists.txt").read_text()
    flags = re.findall(r"-Werror=[\w-]+", cmake)
    assert len(flags) == 4
    folders = [sysconfig.get_paths()["include"], CDEF.parent]
    folders += [root / "vendor/llama.cpp" / name for name in ("ggml/include", "include")]
    command = ["cc", "-fsyntax-only", *flags, *(f"-I{folder}" for folder in folders), str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def test_missing_extension_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "pyllama_dflash"
    (package / "_native").mkdir(parents=True)
    source = Path(_native.__spec__.origin or "")
    (package / "__init__.py").write_text("")
    (package / "_native" / "__init__.py").write_text(source.read_text())
    command = [sys.executable, "-S", "-c", "import sys; sys.path.insert(0, '.'); import pyllama_dflash._native"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "the native extension of pyllama_dflash cannot be loaded" in done.stderr
    assert "pip install ." in done.stderr


def test_import_restores_the_loader_flags(tmp_path: Path) -> None:
    program = "import sys; f = sys.getdlopenflags(); import pyllama_dflash._native; assert sys.getdlopenflags() == f"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_native_logs_go_to_logging_and_nowhere_else(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from pyllama_dflash.ggml import logs

    with caplog.at_level(logging.DEBUG, logger=logs.logger.name):
        assert lib.ggml_backend_load(b"/no/such/module.so") == ffi.NULL
    assert ["/no/such/module.so" in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.ERROR
    assert capfd.readouterr() == ("", "")
    assert "/no/such/module.so" in logs.native_log_tail()


def test_to_float() -> None:
    """Against the definition of Q8_0: 32 values are a half-precision scale and 32 signed bytes."""
    import numpy as np

    block = np.zeros(34, dtype=np.uint8)
    block[:2] = np.frombuffer(np.float16(0.25).tobytes(), dtype=np.uint8)
    block[2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    out = np.empty(32, dtype=np.float32)
    src, dst = ffi.from_buffer(block), ffi.cast("float *", ffi.from_buffer(out))
    assert lib.dflash_to_float(lib.GGML_TYPE_Q8_0, src, dst, 32)
    assert np.array_equal(out, np.arange(-16, 16, dtype=np.float32) * 0.25)
    assert not lib.dflash_to_float(lib.GGML_TYPE_Q8_0, src, dst, 31)  # not a whole block
    assert not lib.dflash_to_float(lib.GGML_TYPE_I32, src, dst, 1)  # ggml converts no integers


class Product:
    """A large matrix product on the CPU backend, for tests that need a computation that takes a while."""

    def __init__(self, size: int) -> None:
        assert lib.ggml_backend_load(str(LIB_DIR / "libdflash-cpu.so").encode()) != ffi.NULL
        device = lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU)
        self.backend = lib.ggml_backend_dev_init(device, ffi.NULL)
        assert lib.dflash_backend_set_n_threads(self.backend, 1)
        assert lib.dflash_backend_cpu_set_use_ref(self.backend, True)
        self.context = lib.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
        self.a = lib.ggml_new_tensor_2d(self.context, lib.GGML_TYPE_F32, size, size)
        self.out = lib.ggml_mul_mat(self.context, self.a, self.a)
        self.graph = lib.ggml_new_graph_custom(self.context, 16, False)
        lib.ggml_build_forward_expand(self.graph, self.out)
        self.buffer = lib.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        lib.ggml_backend_buffer_clear(self.buffer, 0)

    def compute(self) -> None:
        assert lib.ggml_backend_graph_compute(self.backend, self.graph) == lib.GGML_STATUS_SUCCESS

    def close(self) -> None:
        lib.ggml_backend_buffer_free(self.buffer)
        lib.ggml_free(self.context)
        lib.ggml_backend_free(self.backend)


def test_the_gil_is_free_while_computing() -> None:
    """Python goes on in one thread while another sits inside a single native call.

    Were the interpreter lock held, no more than a tick or two could fall between the worker's two clock readings.
    """
    product = Product(1024)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        for _ in range(5):
            start = time.perf_counter()
            product.compute()
            spans.append((start, time.perf_counter()))

    worker = threading.Thread(target=work)
    ticks: list[float] = []
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.002)
    worker.join()
    product.close()
    assert max(sum(start < tick < end for tick in ticks) for start, end in spans) >= 5
