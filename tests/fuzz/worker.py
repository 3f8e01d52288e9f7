"""The process that runs cases. It says on stdout which one it begins, so that its death can be laid to it."""

from __future__ import annotations

import collections
import itertools
import json
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

from .cases import Cases

REPORT = 1000
"""Cases between two reports."""
MAX_BYTES = 8 << 30
"""Address space: what asks for more than this for files of some 50 kB fails here, not the machine."""


def work(
    seed: int, first: int, count: int | None, limit: bool = True, make: Callable[[int, Path], Cases] = Cases
) -> None:
    """Run cases first, first + 1, ...; `count` of them, or for ever. `limit`: in MAX_BYTES.

    Lines on stdout: the number of the case that begins; after every REPORT cases and at the end a JSON object with
    the number of cases done, taken files, distinct reasons of refusals and resident bytes.
    """
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    reasons: collections.Counter[str] = collections.Counter()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        cases = make(seed, Path(folder))
        try:
            for done in itertools.count(1):
                if count is not None and done > count:
                    break
                case = first + done - 1
                print(case, flush=True)
                reasons[cases.run(case)] += 1
                if done % REPORT == 0:
                    print(_report(done, reasons), flush=True)
            print(_report(sum(reasons.values()), reasons), flush=True)
        finally:
            cases.close()


def _report(done: int, reasons: collections.Counter[str]) -> str:
    return json.dumps({"done": done, "taken": reasons[""], "reasons": len(reasons) - 1, "bytes": _resident()})


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
