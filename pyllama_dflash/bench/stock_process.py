"""A llama-server that the bench starts and stops, on the same files, device kind, lanes and cache types as ours."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import DeviceError, RequestError
from .extras import package
from .stock import Client

START_S = 600.0
POLL_S = 0.05


class StockProcess:
    """A running server; `with` stops it. `flags` come from :func:`flags`. DeviceError when it does not start."""

    def __init__(self, program: Path, flags: list[str]) -> None:
        self._requests = package("requests", "a stock server")
        port = _free_port()
        self.command = [str(program), "--host", "127.0.0.1", "--port", str(port), *flags]
        self._log = tempfile.TemporaryFile()
        begin = time.perf_counter()
        try:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._log.close()
            raise RequestError("--stock", program, f"a program that runs ({error.strerror})") from None
        try:
            self._wait(f"http://127.0.0.1:{port}", begin + START_S)
            self.client = Client(f"http://127.0.0.1:{port}")
        except BaseException:
            self.stop()
            raise
        self.load_s = time.perf_counter() - begin

    def _wait(self, url: str, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self.process.poll() is not None:
                raise DeviceError(f"llama-server ended with {self.process.returncode}: {self._tail()}")
            with contextlib.suppress(self._requests.RequestException):
                if self._requests.get(url + "/health", timeout=POLL_S * 20).status_code == 200:
                    return
            time.sleep(POLL_S)
        raise DeviceError(f"llama-server was not ready after {START_S:.0f} s: {self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        return " | ".join(self._log.read().decode(errors="replace").splitlines()[-8:])

    def stop(self) -> None:
        """End the server; does nothing the second time."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def __enter__(self) -> StockProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def flags(
    target: str, draft: str | None, *, block: int, lanes: int, n_ctx: int, kv_type: str, threads: int, gpu: bool
) -> list[str]:
    """Arguments of a server with `lanes` slots of `n_ctx` positions; with a draft, its whole block is proposed."""

    def words() -> Iterator[str]:
        layers = "999" if gpu else "0"
        yield from ("-m", target, "-c", str(n_ctx * lanes), "-np", str(lanes), "-t", str(threads), "-tb", str(threads))
        yield from ("-ngl", layers, "--fit", "off", "-ctk", kv_type, "-ctv", kv_type)
        yield from ("-fa", "on" if kv_type == "q8_0" else "auto")  # quantised values need it
        yield from ("--cache-ram", "0", "--ctx-checkpoints", "0")  # nothing is saved between requests
        yield from ("--no-slots", "--offline")
        if draft is not None:
            yield from (
                "-md",
                draft,
                "--spec-type",
                "draft-dflash",
                "-ngld",
                layers,
                "-ctkd",
                kv_type,
                "-ctvd",
                kv_type,
            )
            yield from ("--spec-draft-n-max", str(block - 1), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0")
            yield from ("-td", str(threads), "-tbd", str(threads))

    return list(words())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
