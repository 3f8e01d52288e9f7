"""Tables of a comparison: what compare.py measured, as Markdown.

python tests/bench/report.py build/bench/compare.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Runs = list[dict[str, Any]]
NAMES = {"a1": "ours, first half", "b": "stock", "a2": "ours, second half"}


def totals(runs: Runs) -> dict[str, float]:
    """Rates over all runs: sums of times over sums of counts."""
    tokens = sum(r["decoded"] for r in runs)
    rounds = sum(r["rounds"] for r in runs)
    decode_ms = sum(r["decode_ms"] for r in runs)
    return {
        "tok_s": tokens / decode_ms * 1e3,
        "round_ms": decode_ms / rounds,
        "accepted_length": tokens / rounds,
        "rounds": rounds,
        "host_ms": sum(r["host_ms"] for r in runs) / rounds,
        "first_ms": statistics.median(r["first_ms"] for r in runs),
    }


def compared(runs: dict[str, Runs]) -> dict[str, float]:
    """Ours over stock, ours being the mean of both halves; drift is how far the halves are apart."""
    a1, b, a2 = (totals(runs[key]) for key in NAMES)
    ours = {key: (a1[key] + a2[key]) / 2 for key in a1}
    return {
        "tok_s_ratio": ours["tok_s"] / b["tok_s"],
        "round_ratio": ours["round_ms"] / b["round_ms"],
        "first_ratio": ours["first_ms"] / b["first_ms"],
        "drift": abs(a1["round_ms"] - a2["round_ms"]) / ours["round_ms"],
    }


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs (or that one side lacks); None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def speed(runs: dict[str, Runs]) -> str:
    """Rows of a mode: ours, stock, ours, ratio."""
    rows = []
    for key, name in NAMES.items():
        t = totals(runs[key])
        host = "" if key == "b" else f"{t['host_ms']:.2f}"
        rows.append([name, f"{t['tok_s']:.1f}", f"{t['round_ms']:.2f}", host])
        rows[-1] += [f"{t['accepted_length']:.2f}", f"{t['rounds']:.0f}"]
    c = compared(runs)
    rows.append(["ours / stock", f"{c['tok_s_ratio']:.2f}", f"{c['round_ratio']:.2f}", "", "", ""])
    head = ["", "tok/s", "ms per round", "host", "accepted length", "rounds"]
    return table(head, rows) + f"\n\nDrift between our halves: {c['drift'] * 100:.1f} %."


def texts(data: dict[str, Any]) -> str:
    """Which pairs of token lists are equal, and where the first differences are."""
    spec, plain = data["runs"]["speculative"], data["runs"]["plain"]
    pairs = {
        "ours: speculative = plain": (spec["a1"], plain["a1"]),
        "ours: first half = second half": (spec["a1"] + plain["a1"], spec["a2"] + plain["a2"]),
        "speculative: ours = stock": (spec["a1"], spec["b"]),
        "plain: ours = stock": (plain["a1"], plain["b"]),
        "stock: speculative = plain": (spec["b"], plain["b"]),
    }
    rows = []
    for name, (left, right) in pairs.items():
        found = [
            (i, first_difference(a["tokens"], b["tokens"])) for i, (a, b) in enumerate(zip(left, right, strict=True))
        ]
        unequal = [(data["prompts"][i % len(data["prompts"])], at) for i, at in found if at is not None]
        where = ", ".join(f"{prompt} at {at}" for prompt, at in unequal[:6]) + (", …" if len(unequal) > 6 else "")
        rows.append([name, f"{len(found) - len(unequal)} of {len(found)}", where])
    return table(["token lists", "equal", "first difference"], rows)


def costs(data: dict[str, Any]) -> str:
    """First token, load, import, memory."""
    rows = []
    for mode in data["runs"]:
        size = sum(data["files"].values()) if mode == "speculative" else next(iter(data["files"].values()))
        for side in ("ours", "stock"):
            facts = data["processes"][side][mode]
            halves = [data["runs"][mode][key] for key in (("a1", "a2") if side == "ours" else ("b",))]
            first = statistics.median(r["first_ms"] for runs in halves for r in runs)
            rss = facts["peak_rss"]
            rows.append([f"{side}, {mode}", f"{first:.1f}", f"{facts['load_s']:.2f}"])
            rows[-1] += [f"{facts['import_s']:.2f}" if "import_s" in facts else ""]
            rows[-1] += [f"{rss / 2**20:.0f}", f"{rss / size:.2f}"]
    head = ["", "first token ms (median)", "load s", "import s", "peak RSS MiB", "peak RSS / files"]
    return table(head, rows)


def markdown(data: dict[str, Any]) -> str:
    """The whole section."""
    files = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in data["files"].items())
    m = data["machine"]
    return f"""## Against stock llama.cpp, CPU

`{data["command"]}`

{data["date"]}, {m["cpu"]}, {m["cores"]} cores, {data["threads"]} threads, load average {m["load"][0]:.1f} before and \
{m["load_after"][0]:.1f} after. Files: {files}. {len(data["prompts"])} HumanEval prompts, {data["max_tokens"]} tokens \
each, greedy, the same ids on both sides, every prompt run as ours, stock, ours. The server is built from the pinned \
sdist, unpatched. Times of the server are its own (`timings` of its reply), without HTTP. Its first token comes with \
the prompt's last row and is not counted as decoded; ours comes from the first round and is.

### Speculative

{speed(data["runs"]["speculative"])}

### Plain

{speed(data["runs"]["plain"])}

### Texts

{texts(data)}

### First token, load, memory

{costs(data)}

The server's load time ends with its first healthy answer, polled every 50 ms. Peak RSS counts mapped file pages.
"""


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
