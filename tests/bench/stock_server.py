"""Build stock llama.cpp's server from the pinned sdist: `python tests/bench/stock_server.py [-j N]` prints its path.

The sdist is the one vendor/materialise.py fetched and checked. The whole upstream tree is unpacked and built
unpatched, with upstream's own defaults and GGML_NATIVE, under build/stock-server. `pyllama-dflash bench --stock PATH`
runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "vendor"))
import materialise  # noqa: E402

CACHE = ROOT / "build" / "stock-server"
CONFIGURE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # the web page would be downloaded
    "-DLLAMA_OPENSSL=OFF",
)


def build(jobs: int = 2, extra: Sequence[str] = ()) -> Path:
    """Unpack, configure and build what is not there yet; returns the program's path. About 15 minutes on 2 cores.

    Each set of `extra` arguments for cmake has a build of its own.
    """
    lock = materialise.read_lock(ROOT / "vendor" / "llama.cpp.lock")
    given = os.environ.get("PYLLAMA_DFLASH_SDIST")
    name = hashlib.sha256(" ".join([lock["sha256"], *extra]).encode()).hexdigest() if extra else lock["sha256"]
    home: Path = CACHE / name[:16]
    program = home / "build" / "bin" / "llama-server"
    if (home / "done").is_file() and program.is_file():
        return program
    source = home / "source"
    if not source.is_dir():
        archive = materialise.obtain(lock, Path(given) if given else None, ROOT / "vendor" / ".cache")
        _unpack(archive, f"{lock['filename'].removesuffix('.tar.gz')}/{lock['subtree']}", source)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(source), "-B", str(home / "build"), *generator, *CONFIGURE, *extra]
    compile_ = ["cmake", "--build", str(home / "build"), "--target", "llama-server", "-j", str(jobs)]
    with open(home / "build.log", "w") as log:
        for command in (configure, compile_):
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed, see {log.name}")
    (home / "done").touch()
    return program


def _unpack(archive: Path, subtree: str, dest: Path) -> None:
    """The files below `subtree` of the archive; `dest` appears only when all of them are written."""
    partial = dest.with_name(dest.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive, "r:gz") as tar:
        members = [m for m in tar if m.name.startswith(subtree + "/")]
        tar.extractall(partial, members, filter="data")
    (partial / subtree).rename(dest)
    shutil.rmtree(partial)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--cmake", action="append", default=[], help="one more argument for cmake, like -DGGML_CUDA=ON")
    args = parser.parse_args()
    print(build(args.jobs, args.cmake))


if __name__ == "__main__":
    main()
