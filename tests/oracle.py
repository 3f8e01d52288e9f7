"""The oracle: what the vendored libllama computes for a GGUF file (see native/oracle.cpp).

The program comes from, in this order: the environment variable PYLLAMA_DFLASH_ORACLE; a CMake build tree under
``build/`` (option PYLLAMA_DFLASH_TESTS); a g++ call on first use against the installed libraries and the vendored
headers, kept under ``build/oracle`` by the hash of all it was made from.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "native" / "oracle.cpp"
VENDOR = ROOT / "vendor" / "llama.cpp"
INCLUDES = ("include", "src", "ggml/include")
LINKED = ("dflash-llama", "dflash-ggml", "dflash-base")
PROGRAM = "dflash-oracle"

Ids = Sequence[int] | NDArray[np.integer]
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


class OracleError(RuntimeError):
    """The oracle could not be built, or refused its input; the text is its own line."""


@functools.cache
def library_folder() -> Path:
    """Folder of libdflash-*.so: of the imported package, else of the first one on sys.path that was built."""
    spec = importlib.util.find_spec("pyllama_dflash")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    folders += [Path(p or ".") / "pyllama_dflash" for p in sys.path]
    for folder in folders:
        if (folder / "lib" / "libdflash-llama.so").is_file():
            return (folder / "lib").resolve()
    raise OracleError("no built pyllama_dflash found: run `pip install .` first")


def _sources() -> list[Path]:
    return sorted(SOURCE.parent.glob("oracle*"))


@functools.cache
def program() -> Path:
    """Path of the oracle program, built if need be."""
    if given := os.environ.get("PYLLAMA_DFLASH_ORACLE"):
        return Path(given)
    newest = max(path.stat().st_mtime for path in _sources())
    for found in sorted((ROOT / "build").glob(f"**/{PROGRAM}")):
        if found.parent.parent != ROOT / "build" / "oracle" and found.is_file() and found.stat().st_mtime > newest:
            return found
    return _compile()


def _compile() -> Path:
    folder = library_folder()
    libraries = [folder / f"lib{name}.so" for name in LINKED]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _sources()))
    for lib in libraries:
        digest.update(f"{lib} {lib.stat().st_mtime_ns} {lib.stat().st_size}\n".encode())
    out = ROOT / "build" / "oracle" / digest.hexdigest()[:16] / PROGRAM
    if out.is_file():
        return out
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise OracleError("no C++ compiler (set CXX)")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{PROGRAM}.{os.getpid()}")  # renamed when whole: a second run never sees half a program
    command = [compiler, "-std=c++17", "-O1", *(f"-I{VENDOR / i}" for i in INCLUDES), str(SOURCE), "-o", str(fresh)]
    command += [f"-L{folder}", *(f"-l{name}" for name in LINKED), f"-Wl,-rpath,{folder}", f"-Wl,-rpath-link,{folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OracleError(f"{' '.join(command)}\n{done.stderr}")
    fresh.replace(out)
    return out


def _cpu_module() -> list[str]:
    if os.environ.get("PYLLAMA_DFLASH_ORACLE_STATIC"):  # a ggml with the CPU backend linked in has no module to load
        return []
    return ["--cpu-module", str(library_folder() / "libdflash-cpu.so")]


def _prompts(prompts: Sequence[Ids]) -> bytes:
    return b"".join(np.asarray([len(p), *p], np.int32).tobytes() for p in prompts)


def _run(mode: str, *options: str, **files: bytes) -> tuple[dict[str, int], bytes]:
    """Runs one mode; `files` are written to temporary files and passed as options of their names."""
    with tempfile.TemporaryDirectory(prefix="dflash-oracle-") as scratch:
        command = [str(program()), mode, *_cpu_module(), *options, "--out", f"{scratch}/out"]
        for name, data in files.items():
            Path(scratch, name).write_bytes(data)
            command += [f"--{name}", f"{scratch}/{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OracleError(done.stderr.strip() or f"oracle {mode} ended with {done.returncode}")
        return json.loads(done.stdout.splitlines()[-1]), Path(scratch, "out").read_bytes()


def _common(kv: str, threads: int, tiled: bool) -> list[str]:
    return ["--kv", kv, "--threads", str(threads), "--tiled" if tiled else "--no-tiled"]


def logits(
    target: str | Path, tokens: Ids, kv: str = "f32", last: int = 0, threads: int = 2, tiled: bool = False
) -> F32:
    """Teacher-forced logits [rows, vocab] of all positions, or of the last `last` ones."""
    options = ["--target", str(target), "--last", str(last), *_common(kv, threads, tiled)]
    shape, data = _run("logits", *options, tokens=_prompts([tokens]))
    return np.frombuffer(data, np.float32).reshape(shape["rows"], shape["vocab"])


def taps(target: str | Path, tokens: Ids, layers: Sequence[int], kv: str = "f32", threads: int = 2) -> F32:
    """Residual stream [positions, layers, n_embd] entering each layer of `layers` (layer count: after the last one)."""
    options = ["--target", str(target), *_common(kv, threads, False)]
    ids = np.asarray(layers, np.int32).tobytes()
    shape, data = _run("taps", *options, tokens=_prompts([tokens]), layers=ids)
    return np.frombuffer(data, np.float32).reshape(shape["rows"], shape["taps"], shape["width"])


def rounds(
    target: str | Path,
    draft: str | Path,
    tokens: Ids,
    anchors: Sequence[int],
    kv: str = "f32",
    threads: int = 2,
    tiled: bool = False,
) -> tuple[I32, F32]:
    """Lattices of the draft's blocks [tokens[n], MASK, ...] for each n of `anchors`.

    Returns candidate ids [R, block-1, k] and scores [R, block-1, k, k] (predecessor, candidate), both for block
    positions 1..block-1. At position 1 the only predecessor is the anchor: its row is repeated k times. The order of
    candidates is unspecified. A draft without a selector gives k = 1: its best token and that token's logit.
    """
    options = ["--target", str(target), "--draft", str(draft), *_common(kv, threads, tiled)]
    wanted = np.asarray(anchors, np.int32).tobytes()
    shape, data = _run("rounds", *options, tokens=_prompts([tokens]), anchors=wanted)
    count, steps, k = shape["rounds"], shape["block"] - 1, shape["k"]
    rows = np.frombuffer(data, np.float32).reshape(count, steps, k + k * k)
    ids = rows[:, :, :k].astype(np.int32)  # exact: ids are below 2^24
    return ids, rows[:, :, k:].reshape(count, steps, k, k)


def walk(ids: I32, scores: F32) -> I32:
    """Proposals [R, block-1]: the greedy walk through lattices of `rounds`, first index wins ties."""
    out = np.empty(ids.shape[:2], np.int32)
    for r in range(ids.shape[0]):
        at = 0
        for t in range(ids.shape[1]):
            at = int(np.argmax(scores[r, t, at]))
            out[r, t] = ids[r, t, at]
    return out


def greedy_all(
    target: str | Path, prompts: Sequence[Ids], n: int, kv: str = "f32", threads: int = 2, tiled: bool = False
) -> tuple[I32, F32]:
    """Plain greedy continuations [prompts, n] (never stopping) and each token's margin over the second best logit."""
    options = ["--target", str(target), "--n", str(n), *_common(kv, threads, tiled)]
    _, data = _run("greedy", *options, tokens=_prompts(prompts))
    words = np.frombuffer(data, np.int32).reshape(len(prompts), 2, n)
    return words[:, 0], words[:, 1].view(np.float32)


def greedy(target: str | Path, tokens: Ids, n: int, kv: str = "f32", threads: int = 2) -> list[int]:
    """Plain greedy continuation of one prompt: n ids."""
    return [int(t) for t in greedy_all(target, [tokens], n, kv, threads)[0][0]]
