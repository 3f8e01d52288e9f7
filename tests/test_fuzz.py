"""The fuzzer of GGUF files: its cases are what the seed says, reach the checks, and findings are found."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from fuzz.cases import Cases
from fuzz.watch import watch

N = 400


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    opened = Cases(3, tmp_path_factory.mktemp("fuzz"), every=50)
    yield opened
    opened.close()


def test_cases_are_what_the_seed_says(cases, tmp_path):
    again = Cases(3, tmp_path)
    other = Cases(4, tmp_path)
    content = [cases.content(i) for i in range(60)]
    assert content == [again.content(i) for i in range(60)] and len(set(content)) > 55
    assert sum(a != other.content(i) for i, a in enumerate(content)) > 55
    again.close()
    other.close()


def test_cases_reach_the_checks_and_some_are_taken(cases):
    """Nothing but the package's own refusals comes out; one in 50 of the files that open generates."""
    reasons = [cases.run(i) for i in range(N)]
    assert 0.1 < reasons.count("") / N < 0.5
    assert len(set(reasons)) > 30


WORKER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fuzz import worker

worker.REPORT = 2
hoard = []

class Planted:
    def __init__(self, seed, folder):
        pass

    def run(self, case):
        if case == {at}:
            {fault}
        return ""

    def close(self):
        pass

worker.work(7, int(sys.argv[sys.argv.index("--first") + 1]), {count}, make=Planted)
"""


def planted(tmp_path: Path, fault: str = "pass", at=13, count: int | None = 20, seconds=None, **options) -> str:
    """What the watcher says of a worker with a fault in one case."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER.format(tests=str(Path(__file__).parent), fault=fault, at=at, count=count))
    return watch(7, 10, count, seconds, command=(sys.executable, str(program)), **options)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("import ctypes; ctypes.string_at(0)", "crash: worker ended with -11 in seed 7 case 13"),
        ("raise ValueError", "crash: worker ended with 1 in seed 7 case 13"),
        ("__import__('os')._exit(3)", "crash: worker ended with 3 in seed 7 case 13"),
        ("bytearray(1 << 40)", "crash: worker ended with 1 in seed 7 case 13"),
        ("__import__('time').sleep(60)", "hang: nothing for 3 s in seed 7 case 13"),
    ],
)
def test_crashes_and_hangs_are_laid_to_their_case(tmp_path, capfd, fault, found):
    assert planted(tmp_path, fault, silence=3) == found
    assert "seed 7 from case 10" in capfd.readouterr().out


def test_growth_is_found(tmp_path):
    found = planted(tmp_path, "hoard.append(b'x' * (16 << 20))", growth=8 << 20)
    assert found.startswith("growth: 1") and "bytes in 4 cases up to seed 7 case 13" in found


def test_all_is_well(tmp_path, capfd):
    assert planted(tmp_path, count=3) == ""
    assert '"done": 3, "taken": 3, "reasons": 0' in capfd.readouterr().out


def test_it_ends_in_time(tmp_path):
    start = time.monotonic()
    assert planted(tmp_path, count=None, seconds=0.5) == ""
    assert time.monotonic() - start < 30
