"""Stock llama.cpp's server from the pinned sdist: build it, start it, drive it over HTTP.

    python tests/bench/stock_server.py build
    python tests/bench/stock_server.py run -m TARGET.gguf [-md DRAFT.gguf] [--prompt TEXT] [-n 64]

The sdist is the one vendor/materialise.py fetched and checked. The whole upstream tree is unpacked and built
unpatched, with upstream's own defaults and GGML_NATIVE, under build/stock-server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def build(jobs: int = 2) -> Path:
    """Unpack, configure and build what is not there yet; returns the program's path. About 15 minutes on 2 cores."""
    lock = materialise.read_lock(ROOT / "vendor" / "llama.cpp.lock")
    given = os.environ.get("PYLLAMA_DFLASH_SDIST")
    home: Path = CACHE / lock["sha256"][:16]
    program = home / "build" / "bin" / "llama-server"
    if (home / "done").is_file() and program.is_file():
        return program
    source = home / "source"
    if not source.is_dir():
        archive = materialise.obtain(lock, Path(given) if given else None, ROOT / "vendor" / ".cache")
        _unpack(archive, f"{lock['filename'].removesuffix('.tar.gz')}/{lock['subtree']}", source)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(source), "-B", str(home / "build"), *generator, *CONFIGURE]
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


def block_size(draft: Path) -> int:
    """`dflash.block_size` of a draft; 16, upstream's default, when the file has none."""
    import gguf

    field = gguf.GGUFReader(draft).fields.get("dflash.block_size")
    return int(field.contents()) if field else 16


@dataclass(frozen=True)
class Answer:
    """One completion. Times are the server's own; the first token comes with the prompt's last row."""

    tokens: list[int]
    text: str
    predicted_n: int
    predicted_ms: float  # from the end of the prompt to the last token: decode only
    prompt_ms: float  # from the start of the prompt to its end
    wall_ms: float  # of the whole HTTP call, seen from here
    draft_n: int
    draft_n_accepted: int

    @property
    def rounds(self) -> int:
        """Target calls spent on decoding: every one yields one token of its own beside the accepted drafts."""
        return self.predicted_n - 1 - self.draft_n_accepted


class StockServer:
    """A running llama-server; `with` stops it. Greedy, no prompt cache, the draft's full block.

    It has `slots` slots of `n_ctx` positions each.
    """

    def __init__(
        self,
        program: Path,
        target: Path,
        draft: Path | None = None,
        *,
        threads: int = 2,
        n_ctx: int = 2048,
        slots: int = 1,
        extra: Sequence[str] = (),
        log: Path | None = None,
        start_timeout_s: float = 600,
    ) -> None:
        self.port = _free_port()
        self.command = [
            str(program),
            "-m",
            str(target),
            *_draft_flags(draft, threads),
            *_base_flags(threads, n_ctx, slots),
        ]
        self.command += ["--port", str(self.port), *extra]
        self.log = log or CACHE / f"server-{os.getpid()}-{self.port}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._keep_log = log is not None
        begin = time.perf_counter()
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            self._wait(begin + start_timeout_s)
        except BaseException:
            self._keep_log = True
            self.stop()
            raise
        self.load_s = time.perf_counter() - begin

    def _wait(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self.process.poll() is not None:
                tail = self.log.read_text(errors="replace").splitlines()[-15:]
                raise RuntimeError("\n".join([f"llama-server ended with {self.process.returncode}:", *tail]))
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if self._call("/health", None)["status"] == "ok":
                    return
            time.sleep(0.05)
        raise TimeoutError(f"llama-server was not ready in time, see {self.log}")

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return json.load(reply)

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, without added special tokens and without reading any out of it."""
        body = {"content": text, "add_special": False, "parse_special": False}
        return [int(t) for t in self._call("/tokenize", body)["tokens"]]

    def complete(self, prompt: Sequence[int] | str, n: int, ignore_eos: bool = True) -> Answer:
        """Greedy completion of at most `n` tokens; ids reach the model as they are."""
        begin = time.perf_counter()
        reply = self._call("/completion", greedy(prompt, n, ignore_eos))
        wall_ms = (time.perf_counter() - begin) * 1e3
        t = reply["timings"]
        return Answer(
            tokens=[int(x) for x in reply["tokens"]],
            text=reply["content"],
            predicted_n=int(t["predicted_n"]),
            predicted_ms=float(t["predicted_ms"]),
            prompt_ms=float(t["prompt_ms"]),
            wall_ms=wall_ms,
            draft_n=int(t.get("draft_n", 0)),
            draft_n_accepted=int(t.get("draft_n_accepted", 0)),
        )

    def peak_rss(self) -> int:
        """VmHWM of the server in bytes."""
        return peak_rss(self.process.pid)

    def stop(self) -> None:
        """End the server; does nothing the second time."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if not self._keep_log:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> StockServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def greedy(prompt: Sequence[int] | str, n: int, ignore_eos: bool = True) -> dict[str, Any]:
    """The body of a request for at most `n` tokens of the likeliest continuation."""
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "n_predict": n,
        "temperature": 0,
        "samplers": ["temperature"],  # temperature 0 is argmax: the others would only cost time
        "ignore_eos": ignore_eos,
        "cache_prompt": False,
        "return_tokens": True,
    }


def _base_flags(threads: int, n_ctx: int, slots: int) -> Iterator[str]:
    yield from ("--host", "127.0.0.1", "-c", str(n_ctx * slots), "-np", str(slots))
    yield from ("-t", str(threads), "-tb", str(threads))
    yield from ("-ngl", "0", "--fit", "off")
    yield from ("--cache-ram", "0", "--ctx-checkpoints", "0")  # nothing is saved between requests
    yield from ("--no-slots", "--offline")


def _draft_flags(draft: Path | None, threads: int) -> Iterator[str]:
    if draft is not None:
        yield from ("-md", str(draft), "--spec-type", "draft-dflash", "-ngld", "0")
        yield from ("--spec-draft-n-max", str(block_size(draft) - 1), "--spec-draft-n-min", "0")
        yield from ("--spec-draft-p-min", "0", "-td", str(threads), "-tbd", str(threads))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def peak_rss(pid: int) -> int:
    """VmHWM of a process in bytes: its largest resident set so far, mapped file pages included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="build the server, print its path")
    make.add_argument("-j", "--jobs", type=int, default=2)
    run = commands.add_parser("run", help="start, complete one prompt with and without the draft, stop")
    run.add_argument("-m", "--model", type=Path, required=True)
    run.add_argument("-md", "--model-draft", type=Path)
    run.add_argument("--binary", type=Path)
    run.add_argument("--prompt", default="def fibonacci(n):\n")
    run.add_argument("-n", type=int, default=64)
    run.add_argument("-t", "--threads", type=int, default=2)
    run.add_argument("-c", "--ctx-size", type=int, default=2048)
    args = parser.parse_args()
    if args.command == "build":
        print(build(args.jobs))
        return
    for draft in [None, args.model_draft] if args.model_draft else [None]:
        options = {"threads": args.threads, "n_ctx": args.ctx_size}
        with StockServer(args.binary or build(), args.model, draft, **options) as server:
            print(" ".join(server.command))
            answer = server.complete(server.tokenize(args.prompt), args.n)
            print(json.dumps({**vars(answer), "rounds": answer.rounds, "load_s": server.load_s}))


if __name__ == "__main__":
    main()
