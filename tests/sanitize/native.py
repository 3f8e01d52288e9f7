"""Native code under AddressSanitizer and UndefinedBehaviorSanitizer: texts, load and unload, mutated files.

Reports end the process. Leaks are looked for by the live bytes of the heap from loop to loop, which counts what Python
keeps too and needs no list of what an interpreter leaves at its end. Run by `run.sh`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.cases import Cases
from refusing import refused
from tiny_pair import TinyPair

from pyllama_dflash import Engine, FileError, SamplingParams
from pyllama_dflash._native import ffi, lib

LOOPS = 6
GROWTH = 16 << 10
"""Live bytes that the loops may add: a context or a graph that is forgotten in each of them is more."""
PROMPTS = ["def add(a, b):", [5, 17, 40], list(range(20, 60))]
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=3, repetition_penalty=1.1)
PAIRS = (
    {"rigged": True},
    {"seed": 2, "matrices": "IQ4_XS", "head": "Q6_K", "codebooks": "F16", "kv_type": "q8_0"},
    {"seed": 3, "matrices": "Q4_K", "gates": "F16", "dflash2": False, "window": 0, "kv_type": "f32"},
)


def live_bytes() -> int:
    """Bytes of the heap in use, by AddressSanitizer's count."""
    gc.collect()
    count = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    count.restype = ctypes.c_size_t
    return int(count())


def texts(target: Path, draft: Path | None, kv_type: str) -> None:
    """Load, speculate for several lanes, greedily and sampled, cancel one, unload."""
    with Engine.load(target, draft, device="cpu", lanes=2, n_ctx=96, threads=1, kv_type=kv_type) as engine:
        engine.generate(PROMPTS, max_tokens=12, ignore_eos=True)
        engine.generate(PROMPTS, SAMPLED, max_tokens=12)
        handle = engine.submit(PROMPTS[0], max_tokens=60)
        next(iter(handle))
        handle.cancel()


def bad_file(folder: Path) -> None:
    """A load that fails half way: the draft is no draft."""
    target = folder / "0-target.gguf"
    with contextlib.suppress(FileError):
        Engine.load(target, target, device="cpu", threads=1)
        raise AssertionError("a target was taken for a draft")


def loop(what: str, run: Callable[[], None]) -> None:
    """Run it LOOPS times behind one that warms caches; SystemExit if the heap grew from its smallest size."""
    run()
    live = []
    for _ in range(LOOPS):
        run()
        live.append(live_bytes())
    grown = live[-1] - min(live)
    print(f"{what}: {grown} bytes more after {LOOPS} loops", flush=True)
    if grown > GROWTH:
        sys.exit(f"{what} leaks: the heap grew by {grown} bytes, more than {GROWTH}")


def mutated_files(count: int) -> None:
    """Cases of the fuzzer, every tenth file that is taken with a text."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(11, Path(folder), every=10)
        taken = sum(cases.run(i) == "" for i in range(count))
        cases.close()
    print(f"mutated files: {count}, taken {taken}", flush=True)


def plant(fault: str) -> None:
    """A fault that must be found, else nothing that is not found means anything."""
    if fault == "overflow":
        ids = ffi.new("int32_t[4]")
        lib.dflash_to_float(lib.GGML_TYPE_F32, ids, ffi.new("float[64]"), 64)
    elif fault == "undefined":
        tensor = ffi.new("struct ggml_tensor *")
        tensor.ne = [1 << 62] * 4
        lib.ggml_nelements(tensor)
    elif fault == "leak":
        loop("planted", lambda: lib.ggml_init({"mem_size": 1 << 14, "mem_buffer": ffi.NULL, "no_alloc": True}) and None)


def main() -> None:
    """All of it, or one planted fault."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plant", choices=["overflow", "undefined", "leak"])
    parser.add_argument("--files", type=int, default=3000)
    args = parser.parse_args()
    if args.plant:
        plant(args.plant)
        return
    with tempfile.TemporaryDirectory() as folder:
        for i, options in enumerate(PAIRS):
            shape = {name: value for name, value in options.items() if name != "kv_type"}
            target, draft = TinyPair(**shape).write(folder, str(i))
            kv_type = str(options.get("kv_type", "f16"))
            loop(f"pair {i}", functools.partial(texts, target, draft, kv_type))
            loop(f"target {i} alone", functools.partial(texts, target, None, kv_type))
        loop("a file that is refused", functools.partial(bad_file, Path(folder)))
        with refused():
            texts(Path(folder) / "0-target.gguf", Path(folder) / "0-draft.gguf", "f16")
        print("composed ops: done", flush=True)
    mutated_files(args.files)


main()
