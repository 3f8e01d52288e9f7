"""Goodput with many requests at once: our engine beside stock llama.cpp's server, same files, ids and threads, greedy.

    python tests/bench/goodput.py -m TARGET.gguf -md DRAFT.gguf [--lanes 1,2,4,8] [--waves 3] [-n 128] [-t 2]

In a wave as many requests as there are lanes (slots) start together, each with a HumanEval prompt and the same forced
number of tokens. A wave is run by ours (with plain steps, whole blocks, chosen widths), by stock (plain, with the
draft), and by ours again, while the other processes sleep; the two halves of ours show the drift of the machine.
Writes goodput.json and goodput.md (see waves.py for what counts). Needs an otherwise idle machine to mean anything.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import goodput_report
import stock_stream
import waves
from ours import Ours
from setting import human_eval, machine
from stock_server import StockServer, block_size, build

PAUSE_S = 0.1  # between two waves, so that threads of the last one have stopped waiting actively
MAX_LANES = 64
PROMPTS = 164  # of HumanEval

Side = Callable[[Sequence[Sequence[int]], int], dict[str, Any]]
"""Runs a wave of prompts by so many tokens."""


def our_wave(engine: Ours, width: int | None, prompts: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """A wave of ours: its numbers, and its `tokens`."""
    answer = engine.wave(prompts, n, width)
    return waves.ours(answer) | {"tokens": answer["tokens"]}


def stock_wave(server: StockServer, prompts: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """A wave of stock's: its numbers, and its `tokens`."""
    answer = stock_stream.wave(server, prompts, n)
    return waves.stock(answer) | {"tokens": answer["tokens"]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All waves, as plain data."""
    program = args.binary or build(args.threads)
    begun = time.perf_counter()
    data: dict[str, Any] = {
        "command": _written(["python", "tests/bench/goodput.py", *args.given]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "threads": args.threads,
        "max_tokens": args.predict,
        "n_ctx": args.ctx_size,
        "files": {path.name: path.stat().st_size for path in (args.model, args.model_draft)},
        "lanes": {},
    }
    for done, lanes in enumerate(args.lanes):
        deadline = begun + args.minutes * 60 * (done + 1) / len(args.lanes)
        data["lanes"][str(lanes)] = _lanes(args, program, lanes, deadline)
    data["machine"]["load_after"] = os.getloadavg()
    data["minutes"] = (time.perf_counter() - begun) / 60
    return data


def _written(command: Sequence[str]) -> str:
    """A command without this machine's folders."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in command)


def _lanes(args: argparse.Namespace, program: Path, lanes: int, deadline: float) -> dict[str, Any]:
    """All waves with so many lanes: lists of numbers by the name of the side, and how many texts were equal."""
    common: dict[str, Any] = {"threads": args.threads, "n_ctx": args.ctx_size}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Ours(args.model, args.model_draft, python=args.python, lanes=lanes, **common))
        stock = {
            name: stack.enter_context(
                StockServer(program, args.model, draft, slots=lanes, extra=args.stock_arg, **common)
            )
            for name, draft in (("stock, plain", None), ("stock, with the draft", args.model_draft))
        }
        block = block_size(args.model_draft)
        prompts = [stock["stock, plain"].tokenize(text) for _, text in human_eval(lanes * args.waves)]
        longest = max(map(len, prompts))
        if longest + args.predict + block > args.ctx_size:
            raise RuntimeError(f"-c {args.ctx_size}: a prompt of {longest} tokens and -n {args.predict} need more")
        ours: dict[str, Side] = {
            "ours, width 1": functools.partial(our_wave, engine, 1),
            f"ours, width {block}": functools.partial(our_wave, engine, block),
            "ours, chosen width": functools.partial(our_wave, engine, None),
        }
        theirs: dict[str, Side] = {name: functools.partial(stock_wave, server) for name, server in stock.items()}
        order = [("a1", ours), ("b", theirs), ("a2", ours)]
        for _, sides in order[:2]:  # pages touched, threads started, graphs built, costs of widths known
            for side in sides.values():
                side(prompts[:lanes], args.predict if sides is ours else min(16, args.predict))
        groups = [prompts[first : first + lanes] for first in range(0, len(prompts), lanes)]
        found = _waves(order, groups, args.predict, deadline, f"lanes {lanes}")
        commands = {name: _written(server.command) for name, server in stock.items()}
    return {"runs": found, "texts": _texts(found), "stock_commands": commands}


def _waves(
    order: Sequence[tuple[str, dict[str, Side]]],
    groups: Sequence[Sequence[Sequence[int]]],
    n: int,
    deadline: float,
    label: str,
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """side -> half -> numbers of each wave. At least one wave; none starts behind the deadline."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for i, group in enumerate(groups):
        if i and time.perf_counter() > deadline:
            break
        for half, sides in order:
            for name, side in sides.items():
                time.sleep(PAUSE_S)
                numbers = side(group, n)
                found.setdefault(name, {}).setdefault(half, []).append(numbers)
                print(f"{label}, wave {i + 1}, {half}, {name}: {numbers['goodput']:.1f} tok/s", file=sys.stderr)
    return found


def _texts(found: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, list[int]]:
    """What was compared -> how many token lists were equal, and of how many. Takes the tokens out of `found`."""
    tokens = {
        (name, half): [text for numbers in runs for text in numbers.pop("tokens")]
        for name, halves in found.items()
        for half, runs in halves.items()
    }
    first = tokens["ours, width 1", "a1"]
    others = [
        lists for (name, half), lists in tokens.items() if half != "b" and (name, half) != ("ours, width 1", "a1")
    ]
    pairs = {
        "ours: all widths and halves": [(a, b) for lists in others for a, b in zip(first, lists, strict=True)],
        "ours = stock, plain": list(zip(first, tokens["stock, plain", "b"], strict=True)),
        "stock: with the draft = plain": list(
            zip(tokens["stock, with the draft", "b"], tokens["stock, plain", "b"], strict=True)
        ),
    }
    return {what: [sum(a == b for a, b in lists), len(lists)] for what, lists in pairs.items()}


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """RuntimeError for arguments that cannot work, before anything is built or started."""
    for path in (args.model, args.model_draft):
        if not path.is_file():
            raise RuntimeError(f"{path}: no such file")
    try:
        args.lanes = [int(lanes) for lanes in args.lanes.split(",")]
    except ValueError:
        raise RuntimeError(f"--lanes {args.lanes}: numbers with commas between them") from None
    _within("-t", args.threads, os.cpu_count() or 1)
    _within("-n", args.predict, args.ctx_size - 1)
    for lanes in args.lanes:
        _within("--lanes", lanes, MAX_LANES)
        _within("--waves", args.waves, PROMPTS // lanes)
    return args


def _within(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise RuntimeError(f"{name} {value}: 1..{most} here")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-md", "--model-draft", type=Path, required=True)
    parser.add_argument("--lanes", default="1,2,4,8", help="requests at once, each number a measurement of its own")
    parser.add_argument("--waves", type=int, default=3, help="waves a number of lanes, each with prompts of its own")
    parser.add_argument("--minutes", type=float, default=5.0, help="no second or later wave starts behind its share")
    parser.add_argument("-n", "--predict", type=int, default=128, help="tokens per request, end-of-text ignored")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-c", "--ctx-size", type=int, default=1024, help="positions of one request")
    parser.add_argument("--binary", type=Path, help="an existing stock llama-server (default: build it)")
    parser.add_argument("--stock-arg", action="append", default=[], help="one more argument for the stock server")
    parser.add_argument("--python", default=sys.executable, help="interpreter of our worker")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.given = sys.argv[1:]
    try:
        data = measure(_checked(args))
    except (RuntimeError, OSError) as error:
        raise SystemExit(f"goodput.py: {error}") from None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "goodput.json").write_text(json.dumps(data, indent=1) + "\n")
    text = goodput_report.markdown(data)
    (args.out / "goodput.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
