"""Two ggml in one process: ours, and a stock build under its stock names that everybody can see.

The stock build is made of the same sdist, unpatched, once, into build/stock-ggml. Each case is a process of its own in
which both compute the same small matrix product; the dynamic linker's own log (glibc's LD_DEBUG=bindings) then says
which library each symbol of each library was bound to.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STOCK = ROOT / "build" / "stock-ggml"
TREE = STOCK / "llama.cpp"

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the linker log is glibc's")

CMAKE = """cmake_minimum_required(VERSION 3.22)
project(stock C CXX)
set(BUILD_SHARED_LIBS ON)
foreach(option GGML_NATIVE GGML_OPENMP GGML_LLAMAFILE GGML_CPU_REPACK GGML_CCACHE GGML_ALL_WARNINGS)
  set(${option} OFF)
endforeach()
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
add_subdirectory(llama.cpp/ggml ggml EXCLUDE_FROM_ALL)
"""

# Run in the process under test: `stock` and `ours` load one ggml each and compute A (2x3) times B (2x3) transposed.
PROGRAM = """
import ctypes, json, sys
A = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
B = [0.5, -1.0, 2.0, 1.5, 0.0, -2.0]

def stock(folder):
    libs = [ctypes.CDLL(f"{folder}/lib{n}.so", mode=ctypes.RTLD_GLOBAL) for n in ("ggml-base", "ggml-cpu", "ggml")]
    base, cpu = libs[0], libs[1]
    class Params(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]
    pointer = ctypes.c_void_p
    def call(lib, name, result, *args):
        function = getattr(lib, name)
        function.restype = result
        return function(*args)
    context = pointer(call(base, "ggml_init", pointer, Params(1 << 20, None, False)))
    def matrix(values):
        tensor = pointer(call(base, "ggml_new_tensor_2d", pointer, context, 0, ctypes.c_int64(3), ctypes.c_int64(2)))
        ctypes.memmove(call(base, "ggml_get_data", pointer, tensor), (ctypes.c_float * 6)(*values), 24)
        return tensor
    product = pointer(call(base, "ggml_mul_mat", pointer, context, matrix(A), matrix(B)))
    graph = pointer(call(base, "ggml_new_graph", pointer, context))
    call(base, "ggml_build_forward_expand", None, graph, product)
    assert call(cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, context, graph, 1) == 0
    found = (ctypes.c_float * 4).from_address(call(base, "ggml_get_data", pointer, product))
    return list(found)

def ours():
    from pyllama_dflash._native import LIB_DIR, ffi, lib
    assert lib.ggml_backend_load(str(LIB_DIR / "libdflash-cpu.so").encode()) != ffi.NULL
    backend = lib.ggml_backend_dev_init(lib.ggml_backend_dev_by_type(lib.GGML_BACKEND_DEVICE_TYPE_CPU), ffi.NULL)
    context = lib.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    a, b = (lib.ggml_new_tensor_2d(context, lib.GGML_TYPE_F32, 3, 2) for _ in range(2))
    product = lib.ggml_mul_mat(context, a, b)
    graph = lib.ggml_new_graph_custom(context, 16, False)
    lib.ggml_build_forward_expand(graph, product)
    buffer = lib.ggml_backend_alloc_ctx_tensors(context, backend)
    for tensor, values in ((a, A), (b, B)):
        lib.ggml_backend_tensor_set(tensor, ffi.new("float[]", values), 0, 24)
    assert lib.ggml_backend_graph_compute(backend, graph) == lib.GGML_STATUS_SUCCESS
    found = ffi.new("float[4]")
    lib.ggml_backend_tensor_get(product, found, 0, 16)
    lib.ggml_backend_buffer_free(buffer), lib.ggml_free(context), lib.ggml_backend_free(backend)
    return list(found)

results = {}
for step in sys.argv[2].split(","):
    results[step] = stock(sys.argv[1]) if step.startswith("stock") else ours()
print(json.dumps(results))
"""
PRODUCT = [4.5, 9.0, -4.5, -6.0]  # row i of B times row j of A, j fastest
BINDING = re.compile(r"binding file (\S+) \[\d+\] to (\S+) \[\d+\]: \w+ symbol `(\w+)'")


@pytest.fixture(scope="session")
def stock_libraries() -> Path:
    """Folder of the stock libraries, built on first use (about a minute of one core), unoptimised."""
    empty = STOCK / "no-patches"
    empty.mkdir(parents=True, exist_ok=True)
    (empty / "series").write_text("")
    materialise = [sys.executable, str(ROOT / "vendor/materialise.py"), "--patches", str(empty), "--dest", str(TREE)]
    (STOCK / "CMakeLists.txt").write_text(CMAKE)
    build = STOCK / "build"
    configure = ["cmake", "-G", "Ninja", "-S", str(STOCK), "-B", str(build), "-DCMAKE_BUILD_TYPE=None"]
    for command in (materialise, configure, ["cmake", "--build", str(build), "--target", "ggml", "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return build / "lib"


def run(
    stock: Path, program: str, steps: str, log: Path
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, str, str]]]:
    """Run a program in a process of its own; what came out, and every (library, bound to, symbol) of the process."""
    env = os.environ | {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(log)}
    command = [sys.executable, "-c", program, str(stock), steps]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, cwd=log.parent)
    text = "".join(p.read_text(errors="replace") for p in log.parent.glob(log.name + ".*"))
    return done, [(m[1], m[2], m[3]) for m in BINDING.finditer(text)]


def is_ours(path: str) -> bool:
    return Path(path).name.startswith(("libdflash-", "_dflash."))


def crossings(bindings: list[tuple[str, str, str]], stock: Path) -> set[tuple[str, str, str]]:
    """Bindings from one ggml into the other, whatever the symbol."""
    folder = str(stock)
    return {
        (Path(a).name, Path(b).name, symbol)
        for a, b, symbol in bindings
        if (is_ours(a) and b.startswith(folder)) or (a.startswith(folder) and is_ours(b))
    }


@pytest.mark.parametrize("order", ["stock,ours", "ours,stock", "stock,ours,stock-again,ours-again"])
def test_each_computes_with_its_own(stock_libraries: Path, order: str, tmp_path: Path) -> None:
    done, bindings = run(stock_libraries, PROGRAM, order, tmp_path / "log")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {step: PRODUCT for step in order.split(",")}
    assert crossings(bindings, stock_libraries) == set()
    for library, needed in {
        "_dflash.abi3.so": {"ggml_init", "llama_tokenize"},
        "libdflash-llama.so": {"ggml_init", "ggml_backend_load_all"},
        "libdflash-ggml.so": {"ggml_log_internal"},
        "libdflash-cpu.so": {"ggml_nbytes"},
    }.items():
        found = {symbol: Path(b).name for a, b, symbol in bindings if Path(a).name == library}
        assert needed <= found.keys()
        assert {name for symbol, name in found.items() if symbol.startswith(("ggml_", "gguf_", "llama_"))} <= {
            "libdflash-base.so",
            "libdflash-ggml.so",
            "libdflash-llama.so",
            "libdflash-cpu.so",
        }


def test_the_log_would_show_a_mix_up(stock_libraries: Path, tmp_path: Path) -> None:
    """The control: without RTLD_DEEPBIND our libraries do bind to the stock ones, and the check above sees it."""
    program = PROGRAM.split("\nresults = {}")[0] + "\nimport os; os.RTLD_DEEPBIND = 0; stock(sys.argv[1])\n"
    _, bindings = run(stock_libraries, program + "import pyllama_dflash._native", "", tmp_path / "log")
    mixed = crossings(bindings, stock_libraries)
    assert ("_dflash.abi3.so", "libggml-base.so", "ggml_init") in mixed
    assert ("libdflash-llama.so", "libggml-base.so", "ggml_init") in mixed
