"""Tables of a goodput comparison: what goodput.py measured, as Markdown.

python tests/bench/goodput_report.py build/bench/goodput.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from report import table

Side = dict[str, list[dict[str, Any]]]


def middle(side: Side, name: str) -> float | None:
    """Median over all waves of both halves; None where no wave has the number."""
    values = [numbers[name] for runs in side.values() for numbers in runs if numbers.get(name) is not None]
    return statistics.median(values) if values else None


def drift(side: Side) -> float | None:
    """How far the medians of both halves' goodput are apart, relative to their mean; None with one half."""
    halves = [statistics.median(numbers["goodput"] for numbers in runs) for runs in side.values()]
    return abs(halves[0] - halves[1]) / statistics.mean(halves) if len(halves) == 2 else None


def cell(value: float | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value * scale:.{digits}f}{unit}"


def best(sides: dict[str, Side], who: str) -> float:
    """The largest goodput of ours or of stock's."""
    values = [middle(side, "goodput") for name, side in sides.items() if name.startswith(who)]
    return max(value for value in values if value is not None)


def overview(data: dict[str, Any]) -> str:
    """Goodput by lanes, and the best of ours over the best of stock's."""
    lanes = data["lanes"].values()
    names = list(next(iter(lanes))["runs"])
    rows = [[name, *(cell(middle(x["runs"][name], "goodput"), 1) for x in lanes)] for name in names]
    ratios = [best(x["runs"], "ours") / best(x["runs"], "stock") for x in lanes]
    rows.append(["best of ours / best of stock", *(f"{ratio:.2f}" for ratio in ratios)])
    return table(["goodput, tok/s", *(f"{n} lane{'s' * (n != '1')}" for n in data["lanes"])], rows)


def details(sides: dict[str, Side]) -> str:
    """All medians with one number of lanes."""
    head = ["", "goodput tok/s", "decode tok/s", "tokens a round", "ms a round", "host ms a round", "host share"]
    head += ["first token ms", "drift", "graphs built"]
    rows = []
    for name, side in sides.items():
        builds = [numbers["builds"] for runs in side.values() for numbers in runs if "builds" in numbers]
        row = [name, cell(middle(side, "goodput"), 1), cell(middle(side, "decode"), 1)]
        row += [cell(middle(side, "tokens_a_round"), 2), cell(middle(side, "round_ms"), 2)]
        row += [cell(middle(side, "host_ms"), 3), cell(middle(side, "host_share"), 1, 100, " %")]
        row += [cell(middle(side, "first_ms"), 1), cell(drift(side), 1, 100, " %"), str(sum(builds)) if builds else ""]
        rows.append(row)
    return table(head, rows)


def texts(data: dict[str, Any]) -> str:
    """How many token lists were equal, by lanes."""
    lanes = data["lanes"].values()
    rows = [[what, *("{} of {}".format(*x["texts"][what]) for x in lanes)] for what in next(iter(lanes))["texts"]]
    return table(["token lists that are equal", *(f"{n} lane{'s' * (n != '1')}" for n in data["lanes"])], rows)


def markdown(data: dict[str, Any]) -> str:
    """The whole section."""
    files = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in data["files"].items())
    m = data["machine"]
    counts = {n: len(next(iter(x["runs"].values()))["a1"]) for n, x in data["lanes"].items()}
    per_lane = "\n\n".join(
        f"#### {n} lane{'s' * (n != '1')}, waves: {counts[n]}\n\n{details(x['runs'])}" for n, x in data["lanes"].items()
    )
    return f"""### Many requests at once: goodput, CPU

`{data["command"]}`

{data["date"]}, {m["cpu"]}, {m["cores"]} cores, {data["threads"]} threads, load average {m["load"][0]:.1f} before and \
{m["load_after"][0]:.1f} after, {data["minutes"]:.1f} minutes. Files: {files}. As many requests as lanes start \
together, HumanEval prompts, {data["max_tokens"]} forced tokens each, greedy, the same ids on both sides; every wave \
is run by ours, stock, ours. Goodput counts from the start, prompts included, to the end of the first request; decode \
from the last request's first token to there. The tail behind it, with fewer requests, is run but not counted. Medians \
over waves and halves. Ours streams within its process, stock over HTTP.

{overview(data)}

{per_lane}

{texts(data)}

Tokens a round are one request's. Round and host are the engine's own times while all requests decode; drift is \
between the goodput of our two halves; graphs built are those that waves had to wait for.
"""


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
