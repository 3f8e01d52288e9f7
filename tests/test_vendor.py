"""vendor/materialise.py on a small made-up sdist: what it builds; every failure is one line and leaves nothing.

The real script runs as a process, as the build runs it; only its paths are pointed at the test's own files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "vendor" / "materialise.py"
STAMP = ".materialised.json"
NAME = "fake_llama-1.0"
UPSTREAM = {
    "LICENSE": "licence\n",
    "src/llama.cpp": "int llama;\n",
    "ggml/CMakeLists.txt": "project(ggml)\n",
    "ggml/src/ggml.c": "one\ntwo\nthree\nfour\nfive\nsix\n",
    "ggml/src/ggml-cpu/ops.cpp": "int ops;\n",
    "ggml/src/ggml-vulkan/vulkan.cpp": "not built\n",
    "tools/server.cpp": "not built\n",
}
PATCH = """--- a/ggml/src/ggml.c
+++ b/ggml/src/ggml.c
@@ -2,3 +2,4 @@
 two
-three
+THREE
+three and a half
 four
"""


class Project:
    """A lock, a series, sources of ours and a destination, all below one temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sdist = root / f"{NAME}.tar.gz"
        self.lock = root / "llama.cpp.lock"
        self.patches = root / "ggml_patches"
        self.dest = root / "vendor" / "llama.cpp"
        self.cache = root / "cache"
        self.make_sdist(UPSTREAM)
        self.write_patch("0001-first.patch", PATCH)
        self.series("0001-first.patch")
        self.ours("src/ggml-dflash.c", "ours\n")
        self.ours("tests/test_ours.cpp", "a test\n")

    def make_sdist(self, files: dict[str, str], extra: dict[str, bytes] | None = None) -> None:
        members = {f"{NAME}/vendor/llama.cpp/{name}": text.encode() for name, text in files.items()} | (extra or {})
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        self.sdist.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
        self.pin()

    def pin(self, **changes: str) -> None:
        """Write the lock for the archive as it stands, with some values changed."""
        content = self.sdist.read_bytes()
        values = {
            "package": "fake-llama",
            "version": "1.0",
            "filename": f"{NAME}.tar.gz",
            "size": str(len(content)),
            "sha256": hashlib.sha256(content).hexdigest(),
            "subtree": "vendor/llama.cpp",
        } | changes
        self.lock.write_text("".join(f'{key} = "{value}"\n' for key, value in values.items()))

    def write_patch(self, name: str, text: str) -> None:
        self.patches.mkdir(exist_ok=True)
        (self.patches / name).write_text(text)

    def series(self, *names: str) -> None:
        (self.patches / "series").write_text("# a comment\n" + "".join(f"{name}\n" for name in names))

    def ours(self, name: str, text: str) -> None:
        path = self.patches / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def command(self, sdist: bool = True) -> list[str]:
        paths = {"--lock": self.lock, "--patches": self.patches, "--dest": self.dest, "--cache": self.cache}
        command = [sys.executable, str(SCRIPT), *(str(part) for pair in paths.items() for part in pair)]
        return [*command, "--sdist", str(self.sdist)] if sdist else command

    def run(self, sdist: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key != "PYLLAMA_DFLASH_SDIST"}
        return subprocess.run(self.command(sdist), capture_output=True, text=True, env=clean | env, timeout=120)

    def succeed(self, sdist: bool = True, **env: str) -> str:
        done = self.run(sdist, **env)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def fail(self, *words: str, sdist: bool = True, **env: str) -> str:
        """The run fails with exactly one line that holds all the words, and no tree is left behind."""
        done = self.run(sdist, **env)
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n"), done.stderr
        for word in words:
            assert word in done.stderr
        leftovers = [p.name for p in self.dest.parent.iterdir() if p.suffix in (".new", ".old")]
        assert leftovers == []
        return done.stderr

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        files = (p for p in self.dest.rglob("*") if p.is_file())
        return {str(p.relative_to(self.dest)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_builds_the_patched_tree(project: Project) -> None:
    assert "made from fake-llama 1.0, 1 patches, 1 files of ours" in project.succeed()
    files = {name for name in project.snapshot() if not name.startswith(".")}
    assert files == {
        "LICENSE",
        "src/llama.cpp",
        "ggml/CMakeLists.txt",
        "ggml/src/ggml.c",
        "ggml/src/ggml-cpu/ops.cpp",
        "ggml/src/ggml-dflash.c",
    }
    assert (project.dest / "ggml/src/ggml.c").read_text() == "one\ntwo\nTHREE\nthree and a half\nfour\nfive\nsix\n"


def test_unchanged_is_no_work(project: Project) -> None:
    project.succeed()
    before = project.snapshot()
    project.sdist.unlink()  # it is not even looked at
    start = time.perf_counter()
    assert "unchanged" in project.succeed()
    assert time.perf_counter() - start < 2.0  # generous: the process start is most of it
    assert project.snapshot() == before


def test_only_changed_files_of_ours_are_copied(project: Project) -> None:
    project.ours("src/second.c", "second\n")
    project.succeed()
    before = project.snapshot()
    project.sdist.unlink()
    project.ours("src/ggml-dflash.c", "changed\n")
    project.ours("src/ggml-cpu/dflash/new.cpp", "new\n")
    (project.patches / "src/src/second.c").unlink()
    project.succeed()
    after = project.snapshot()
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert names == {"ggml/src/ggml-dflash.c", "ggml/src/ggml-cpu/dflash/new.cpp", "ggml/src/second.c", STAMP}
    assert "ggml/src/second.c" not in after


def test_a_copy_of_ours_changed_in_the_tree_is_put_right(project: Project) -> None:
    project.succeed()
    (project.dest / "ggml/src/ggml-dflash.c").write_text("edited in the wrong place\n")
    project.succeed()
    assert (project.dest / "ggml/src/ggml-dflash.c").read_text() == "ours\n"


def test_a_new_patch_touches_only_what_it_changes(project: Project) -> None:
    project.succeed()
    before = project.snapshot()
    project.write_patch("0002-second.patch", "--- a/LICENSE\n+++ b/LICENSE\n@@ -1 +1 @@\n-licence\n+LICENCE\n")
    project.series("0001-first.patch", "0002-second.patch")
    project.succeed()
    after = project.snapshot()
    assert {name for name in after if after[name] != before[name]} == {"LICENSE", STAMP}
    project.series("0001-first.patch")  # and back: the old content is new again
    project.succeed()
    assert project.snapshot()["LICENSE"][1] == b"licence\n"
    assert project.snapshot()["LICENSE"][0] > after["LICENSE"][0]


def test_wrong_hash(project: Project) -> None:
    project.pin(sha256="0" * 64)
    message = project.fail(str(project.sdist), "sha256", "expected " + "0" * 64, "found ")
    assert hashlib.sha256(project.sdist.read_bytes()).hexdigest() in message
    assert not project.dest.exists()


def test_truncated_archive(project: Project) -> None:
    content = project.sdist.read_bytes()
    project.sdist.write_bytes(content[: len(content) // 2])
    project.fail(str(project.sdist), f"expected {len(content)} bytes, found {len(content) // 2}", "truncated")
    assert not project.dest.exists()


def test_archive_that_breaks_off_while_unpacking(project: Project) -> None:
    content = project.sdist.read_bytes()
    project.sdist.write_bytes(content[: len(content) // 2])
    project.pin()  # hash and size agree: the damage shows only in the middle of the work
    project.fail(str(project.sdist), "cannot be unpacked")
    assert not project.dest.exists()


def test_missing_archive(project: Project) -> None:
    project.sdist.unlink()
    project.fail(str(project.sdist), "No such file")


def test_archive_without_the_tree(project: Project) -> None:
    project.make_sdist({})
    project.fail(str(project.sdist), f"holds no file below {NAME}/vendor/llama.cpp/")


def test_members_outside_the_tree_are_not_written(project: Project) -> None:
    evil = {f"{NAME}/vendor/llama.cpp/src/../../../../evil": b"x", "/abs": b"x", f"{NAME}/other": b"x"}
    project.make_sdist(UPSTREAM, evil)
    project.succeed()
    assert [p for p in project.root.rglob("*") if p.name in ("evil", "abs", "other")] == []


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (PATCH.replace(" two", " zwei"), ["hunk 1 of 1 does not apply", "line 2 expected 'zwei', found 'two'"]),
        (PATCH.replace("ggml/src/ggml.c", "ggml/src/gone.c"), ["ggml/src/gone.c", "no such file"]),
        (PATCH.replace("@@ -2,3 +2,4 @@", "@@ -2,9 +2,4 @@"), ["states 9 old and 4 new lines, it has 3 and 4"]),
        ("--- /dev/null\n+++ b/new.c\n@@ -0,0 +1 @@\n+x\n", ["existing file", "/dev/null"]),
        ("nothing\n", ["no file in it"]),
    ],
)
def test_patch_that_no_longer_applies(project: Project, patch: str, words: list[str]) -> None:
    project.write_patch("0001-first.patch", patch)
    project.fail("0001-first.patch", *words)
    assert not project.dest.exists()


def test_a_moved_place_is_found_but_an_ambiguous_one_is_refused(project: Project) -> None:
    project.make_sdist(UPSTREAM | {"ggml/src/ggml.c": "zero\none\ntwo\nthree\nfour\n"})
    project.succeed()
    assert "THREE" in (project.dest / "ggml/src/ggml.c").read_text()
    project.make_sdist(UPSTREAM | {"ggml/src/ggml.c": "x\nx\ntwo\nthree\nfour\ntwo\nthree\nfour\n"})
    project.fail("0001-first.patch", "fits at 2 places (lines 3, 6")


def test_failure_keeps_the_tree_that_stood_but_does_not_trust_it(project: Project) -> None:
    project.succeed()
    before = project.snapshot()
    project.write_patch("0001-first.patch", PATCH.replace(" two", " zwei"))
    project.fail("0001-first.patch")
    assert project.snapshot() == before
    project.fail("0001-first.patch")  # the second run does not take the old tree for the new one
    project.write_patch("0001-first.patch", PATCH)
    assert "unchanged" in project.succeed()


@pytest.mark.parametrize("place", ["dest", "new", "old"])
def test_half_finished_earlier_run(project: Project, place: str) -> None:
    """Whatever a killed run left, under any of its names, does not get into the tree."""
    folder = {"dest": project.dest, "new": project.dest.with_name(".llama.cpp.new")}.get(
        place, project.dest.with_name(".llama.cpp.old")
    )
    (folder / "ggml/src").mkdir(parents=True)
    (folder / "ggml/src/ggml.c").write_text("half a fi")
    (folder / "left over").write_text("x")
    assert "made from" in project.succeed()
    assert (project.dest / "ggml/src/ggml.c").read_text().startswith("one\ntwo\nTHREE\n")
    assert list(project.root.rglob("left over")) == []


def test_unreadable_stamp_is_not_trusted(project: Project) -> None:
    project.succeed()
    (project.dest / STAMP).write_text('{"fingerprint": ')
    (project.dest / "ggml/src/ggml.c").write_text("damaged")
    assert "made from" in project.succeed()
    assert "THREE" in (project.dest / "ggml/src/ggml.c").read_text()


def test_killed_in_the_middle(project: Project) -> None:
    """A run killed while it unpacks leaves no tree; the next run builds it."""
    big = {f"src/{i}.cpp": f"{i}\n" * 20000 for i in range(120)}
    project.make_sdist(UPSTREAM | big)
    process = subprocess.Popen(project.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    new = project.dest.with_name(".llama.cpp.new")
    deadline = time.monotonic() + 60
    while not (new / "src").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not project.dest.exists() and new.exists()  # it was caught in the act
    project.succeed()
    assert len(list((project.dest / "src").iterdir())) == len(big) + 1
    assert not new.exists()


def test_two_runs_at_once(project: Project) -> None:
    runs = [subprocess.Popen(project.command(), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0, 0]
    assert sum("made from" in text for text in outputs) == 1
    assert sum("unchanged" in text for text in outputs) == 3


def test_file_of_ours_may_not_replace_an_upstream_one(project: Project) -> None:
    project.ours("src/ggml.c", "ours\n")
    project.fail("ggml_patches/src/src/ggml.c", "upstream has a file ggml/src/ggml.c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("package = fake\n", ["line 1", 'expected key = "value"']),
        ('package = "fake"\n', ["key 'version' is missing"]),
        (None, ["No such file"]),
    ],
)
def test_bad_lock(project: Project, text: str | None, words: list[str]) -> None:
    project.lock.unlink()
    if text is not None:
        project.lock.write_text(text)
    project.dest.parent.mkdir()
    project.fail(str(project.lock), *words)


def test_patch_named_in_the_series_is_missing(project: Project) -> None:
    project.series("0001-first.patch", "0002-gone.patch")
    project.dest.parent.mkdir()
    project.fail("0002-gone.patch", "No such file")


class Index:
    """A folder that pip takes as its only index, with a small sdist in it that pip can prepare."""

    BACKEND = """
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.mkdir(os.path.join(folder, "fake_llama-1.0.dist-info"))
    with open(os.path.join(folder, "fake_llama-1.0.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: fake-llama\\nVersion: 1.0\\n")
    return "fake_llama-1.0.dist-info"
def build_wheel(folder, settings=None, metadata=None):
    raise SystemExit("not built here")
"""

    def __init__(self, project: Project) -> None:
        extra = {
            "pyproject.toml": b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": self.BACKEND.encode(),
            "PKG-INFO": b"Metadata-Version: 2.1\nName: fake-llama\nVersion: 1.0\n",
        }
        project.make_sdist(UPSTREAM, {f"{NAME}/{name}": content for name, content in extra.items()})
        self.folder = project.root / "index"
        self.folder.mkdir()
        project.sdist = project.sdist.rename(self.folder / project.sdist.name)
        self.env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_NO_CACHE_DIR": "1"}


def test_fetches_with_pip_and_caches(project: Project) -> None:
    index = Index(project)
    project.succeed(sdist=False, **index.env)
    assert [p.name for p in project.cache.iterdir()] == [f"{NAME}.tar.gz"]
    project.sdist.unlink()
    (project.dest / STAMP).unlink()
    assert "made from" in project.succeed(sdist=False, **index.env)  # from the cache


def test_damaged_cache_is_fetched_again(project: Project) -> None:
    index = Index(project)
    project.cache.mkdir()
    (project.cache / f"{NAME}.tar.gz").write_bytes(b"half an archi")
    project.succeed(sdist=False, **index.env)


def test_fetched_file_with_another_hash(project: Project) -> None:
    index = Index(project)
    project.pin(sha256="0" * 64)
    project.dest.parent.mkdir()
    project.fail("fake-llama 1.0", "pip could not fetch it", "0" * 64, sdist=False, **index.env)
    assert list(project.cache.iterdir()) == []


def test_download_fails(project: Project) -> None:
    project.dest.parent.mkdir()
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.root / "empty")}
    project.fail("fake-llama 1.0", "pip could not fetch it", sdist=False, **env)
    assert list(project.cache.iterdir()) == []
