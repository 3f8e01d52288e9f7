#!/usr/bin/env python3
"""Make vendor/llama.cpp from the pinned sdist, the patch series and our own sources. Standard library only.

    python vendor/materialise.py [--sdist FILE] [--lock FILE] [--patches DIR] [--dest DIR] [--cache DIR]

The tree is built in a sibling directory and renamed into place with its stamp, so that a tree with a stamp is always
whole and one without is never used. With nothing changed the run does nothing; when only files under
ggml_patches/src/ changed, only those are copied. Files whose content did not change keep their modification time, so
that a build recompiles what really changed. Every failure is one line on stderr and a non-zero exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))
import unidiff

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".materialised.json"
LOCK_KEYS = ("package", "version", "filename", "size", "sha256", "subtree")

# What is built, relative to the llama.cpp tree: ggml with the backends we can build, libllama, and one vocabulary
# that the tests open. A trailing slash means the whole folder; "ggml/src/*" means the files right in it.
KEEP = (
    "LICENSE",
    "licenses/",
    "include/",
    "src/",
    "models/ggml-vocab-qwen35.gguf",
    "ggml/CMakeLists.txt",
    "ggml/cmake/",
    "ggml/include/",
    "ggml/src/*",
    "ggml/src/ggml-cpu/",
    "ggml/src/ggml-cuda/",
    "ggml/src/ggml-hip/",
    "ggml/src/ggml-sycl/",
)


class Failure(Exception):
    """The one line to print."""


def read_lock(path: Path) -> dict[str, str]:
    """`key = "value"` lines; all of LOCK_KEYS must be there."""
    lock: dict[str, str] = {}
    for number, line in enumerate(_read(path).decode().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        key, equals, value = line.partition("=")
        value = value.strip()
        if not equals or len(value) < 2 or value[0] != '"' or value[-1] != '"':
            raise Failure(f'{path}: line {number}: expected key = "value", found {line!r}')
        lock[key.strip()] = value[1:-1]
    for key in LOCK_KEYS:
        if key not in lock:
            raise Failure(f"{path}: key {key!r} is missing")
    return lock


def read_series(patches: Path) -> list[tuple[str, bytes]]:
    """(name, content) of the patches listed in DIR/series, in order."""
    names = [line.split("#")[0].strip() for line in _read(patches / "series").decode().splitlines()]
    return [(name, _read(patches / name)) for name in names if name]


def our_files(patches: Path) -> dict[str, Path]:
    """Tree path -> file of ours. DIR/src/REST becomes ggml/REST; DIR/src/tests stays where it is."""
    source = patches / "src"
    found = {}
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        rest = path.relative_to(source)
        if rest.parts[0] != "tests" and "__pycache__" not in rest.parts:
            found[f"ggml/{rest.as_posix()}"] = path
    return found


def fingerprint(lock: Path, series: list[tuple[str, bytes]]) -> str:
    """Changes when the tree must be made anew: another lock, another series, another version of this script."""
    digest = hashlib.sha256()
    for data in (_read(lock), _read(Path(__file__)), _read(Path(unidiff.__file__)), *(x for _, x in series)):
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def obtain(lock: dict[str, str], sdist: Path | None, cache: Path) -> Path:
    """The checked sdist: the given file, else the cached one, else fetched with pip. A bad cached file is dropped."""
    if sdist is not None:
        check(sdist, lock)
        return sdist
    cached = cache / lock["filename"]
    if cached.exists():
        try:
            check(cached, lock)
            return cached
        except Failure:
            cached.unlink()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fetched = fetch(lock, Path(folder))
        check(fetched, lock)
        os.replace(fetched, cached)
    return cached


def fetch(lock: dict[str, str], folder: Path) -> Path:
    """Download with pip, which knows the user's index and proxies, and checks the hash before it runs anything."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{lock['package']}=={lock['version']} --hash=sha256:{lock['sha256']}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", lock["package"], "--require-hashes", "-r", str(wanted), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    name = f"{lock['package']} {lock['version']}"
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons = [x for x in lines if x.startswith(("ERROR", "Expected", "Got"))] or lines[-1:] or ["no message"]
        raise Failure(f"{name}: pip could not fetch it: {' '.join(reasons)}")
    path = folder / lock["filename"]
    if not path.exists():
        others = sorted(p.name for p in folder.iterdir() if p != wanted)
        raise Failure(f"{name}: expected the file {lock['filename']}, pip fetched {', '.join(others) or 'nothing'}")
    return path


def check(path: Path, lock: dict[str, str]) -> None:
    """Size and sha256 of the archive against the lock."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error
    if size != int(lock["size"]):
        raise Failure(f"{path}: size: expected {lock['size']} bytes, found {size} (truncated, or another file)")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != lock["sha256"]:
        raise Failure(f"{path}: sha256: expected {lock['sha256']}, found {digest.hexdigest()}")


def kept(name: str) -> bool:
    """Whether a file of the llama.cpp tree is unpacked."""
    for rule in KEEP:
        if rule.endswith("/*"):
            if str(PurePosixPath(name).parent) == rule[:-2]:
                return True
        elif name == rule or (rule.endswith("/") and name.startswith(rule)):
            return True
    return False


def unpack(archive: Path, lock: dict[str, str], tree: Path) -> None:
    """The kept regular files of the archive's llama.cpp subtree, written below `tree`."""
    prefix = f"{lock['filename'].removesuffix('.tar.gz')}/{lock['subtree']}/"
    count = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix(prefix)
                if name == member.name or ".." in PurePosixPath(name).parts or not member.isreg() or not kept(name):
                    continue
                content = tar.extractfile(member)
                assert content is not None  # a regular member always has content
                path = tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                count += 1
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise Failure(f"{archive}: cannot be unpacked: {error}") from error
    if count == 0:
        raise Failure(f"{archive}: holds no file below {prefix}")


def patch(tree: Path, series: list[tuple[str, bytes]], patches: Path) -> None:
    """Apply the series to the unpacked tree."""
    for name, content in series:
        try:
            for target, hunks in unidiff.parse(content).items():
                path = tree / target
                if not path.is_file():
                    raise unidiff.PatchError(f"{target}: no such file in the tree")
                path.write_bytes(unidiff.apply(path.read_bytes(), hunks, target))
        except unidiff.PatchError as error:
            raise Failure(f"{patches / name}: {error}") from error


def mirror(tree: Path, ours: dict[str, Path], before: set[str], stamp: dict[str, object]) -> int:
    """Bring our own files in the tree up to date; returns how many changed.

    The stamp lists a file before it is written and until it is removed, so that a run that dies in between leaves
    nothing unlisted.
    """
    changed = [name for name, path in ours.items() if not _same(tree / name, path)]
    gone = before - set(ours)
    if not changed and not gone:
        return 0
    for name in changed:
        if name not in before and (tree / name).exists():
            raise Failure(f"{ours[name]}: upstream has a file {name}; change it with a patch instead")
    _write_stamp(tree, {**stamp, "ours": sorted(before | set(ours))})
    for name in changed:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        partial = tree / (name + ".partial")
        partial.write_bytes(ours[name].read_bytes())
        os.replace(partial, tree / name)
    for name in gone:
        (tree / name).unlink(missing_ok=True)
    _write_stamp(tree, {**stamp, "ours": sorted(ours)})
    return len(changed) + len(gone)


def keep_times(old: Path, new: Path) -> None:
    """Give files of `new` whose content equals the one in `old` the old modification time."""
    for path in (p for p in new.rglob("*") if p.is_file()):
        twin = old / path.relative_to(new)
        if twin.is_file() and _same(twin, path):
            shutil.copystat(twin, path)


def materialise(lock: Path, patches: Path, dest: Path, cache: Path, sdist: Path | None) -> str:
    """Make or update the tree at `dest`; returns what was done, in words."""
    pin, series, ours = read_lock(lock), read_series(patches), our_files(patches)
    stamp: dict[str, object] = {"fingerprint": fingerprint(lock, series)}
    with _exclusive(dest):
        new, old = dest.with_name(f".{dest.name}.new"), dest.with_name(f".{dest.name}.old")
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        found = _read_stamp(dest)
        if found.get("fingerprint") == stamp["fingerprint"]:
            count = mirror(dest, ours, _names(found), stamp)
            return f"{count} of our files changed" if count else "unchanged"
        archive = obtain(pin, sdist, cache)
        try:
            new.mkdir(parents=True)
            unpack(archive, pin, new)
            patch(new, series, patches)
            mirror(new, ours, set(), stamp)
            if found:
                keep_times(dest, new)
            _write_stamp(new, {**stamp, "ours": sorted(ours)})
            if dest.exists():
                os.rename(dest, old)
            os.rename(new, dest)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        return f"made from {pin['package']} {pin['version']}, {len(series)} patches, {len(ours)} files of ours"


@contextlib.contextmanager
def _exclusive(dest: Path) -> Iterator[None]:
    """One run at a time for a destination; a second one waits. The kernel drops the lock of a run that dies."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with open(dest.with_name(f".{dest.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error


def _same(a: Path, b: Path) -> bool:
    return a.is_file() and a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()


def _read_stamp(tree: Path) -> dict[str, object]:
    """The stamp, or nothing when it is missing or unreadable: such a tree is not trusted."""
    try:
        stamp = json.loads((tree / STAMP).read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _names(stamp: dict[str, object]) -> set[str]:
    names = stamp.get("ours")
    return set(names) if isinstance(names, list) else set()


def _write_stamp(tree: Path, stamp: dict[str, object]) -> None:
    partial = tree / (STAMP + ".partial")
    partial.write_text(json.dumps(stamp, indent=1))
    os.replace(partial, tree / STAMP)


def main() -> int:
    """Command line; 0 when the tree stands, 1 with one line on stderr when it does not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    given = os.environ.get("PYLLAMA_DFLASH_SDIST")
    parser.add_argument("--sdist", type=Path, default=Path(given) if given else None, help="a local copy of the sdist")
    parser.add_argument("--lock", type=Path, default=ROOT / "vendor" / "llama.cpp.lock")
    parser.add_argument("--patches", type=Path, default=ROOT / "ggml_patches")
    parser.add_argument("--dest", type=Path, default=ROOT / "vendor" / "llama.cpp")
    parser.add_argument("--cache", type=Path, default=ROOT / "vendor" / ".cache")
    args = parser.parse_args()
    try:
        print(f"{args.dest}: {materialise(args.lock, args.patches, args.dest, args.cache, args.sdist)}")
    except (Failure, OSError) as error:
        print(f"materialise: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("materialise: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
