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
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report
from ours import Ours
from setting import human_eval, machine
from stock_server import StockServer, block_size, build

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
    host_ms: float  # ours only: what of decode_ms was not the device's


Side = Callable[[Sequence[int], int], Run]
"""A prompt and the number of tokens it is continued by."""


def our_run(ours: Ours, width: int, prompt: Sequence[int], n: int) -> Run:
    """Our engine's continuation, with at most `width` rows a round."""
    a = ours.wave([prompt], n, width)
    t = a["timings"][0]
    first_ms = (t["first_token_s"] - t["queued_s"]) * 1e3
    times = (t["decode_s"] * 1e3, first_ms, a["wall_s"] * 1e3, t["host_s"] * 1e3)
    return Run(a["tokens"][0], a["texts"][0], a["rounds"][0], len(a["tokens"][0]), *times)


def stock_run(server: StockServer, prompt: Sequence[int], n: int) -> Run:
    """The stock server's continuation in the same terms."""
    a = server.complete(prompt, n)
    return Run(a.tokens, a.text, a.rounds, a.predicted_n - 1, a.predicted_ms, a.prompt_ms, a.wall_ms, 0.0)


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
            options: dict[str, Any] = {"threads": args.threads, "n_ctx": args.ctx_size}
            ours[mode] = stack.enter_context(Ours(args.model, draft, python=args.python, **options))
            stock[mode] = stack.enter_context(StockServer(program, args.model, draft, extra=args.stock_arg, **options))
        prompts = [(name, stock["plain"].tokenize(text)) for name, text in human_eval(args.prompts)]
        data["prompts"] = [name for name, _ in prompts]
        data["stock_commands"] = {mode: shlex.join(stock[mode].command) for mode in MODES}
        widths = {"speculative": block_size(args.model_draft), "plain": 1}
        sides: dict[str, dict[str, Side]] = {}
        for mode in MODES:
            mine = functools.partial(our_run, ours[mode], widths[mode])
            sides[mode] = {"a1": mine, "b": functools.partial(stock_run, stock[mode]), "a2": mine}
        data["runs"] = {mode: _interleaved(sides[mode], prompts, args.predict, mode, args.quiet) for mode in MODES}
        data["processes"] = {
            "ours": {m: _facts(ours[m]) | {"import_s": ours[m].import_s} for m in MODES},
            "stock": {m: _facts(stock[m]) for m in MODES},
        }
    data["machine"]["load_after"] = os.getloadavg()
    return data


def _facts(process: Ours | StockServer) -> dict[str, float]:
    return {"load_s": process.load_s, "peak_rss": process.peak_rss()}


def _interleaved(
    sides: dict[str, Side], prompts: list[tuple[str, list[int]]], n: int, mode: str, quiet: bool
) -> dict[str, list[dict[str, Any]]]:
    """Lists of runs by the names of `sides`, which run in turns, in the order of the prompts."""
    runs: dict[str, list[dict[str, Any]]] = {key: [] for key in sides}
    for side in sides.values():  # pages touched, threads started, graphs built
        side(prompts[0][1], min(n, 16))
    for i, (name, ids) in enumerate(prompts):
        for key, side in sides.items():
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
    try:
        data = measure(args)
    except (RuntimeError, OSError) as error:
        raise SystemExit(f"compare.py: {error}") from None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "compare.json").write_text(json.dumps(data))
    text = report.markdown(data)
    (args.out / "compare.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
