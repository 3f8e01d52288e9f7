"""A record of the bench as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MEANING = (
    "As many requests as lanes start together. Goodput counts from the start, prompts included, to the end of the"
    " first request; decode from the last request's first token to there. The tail behind it is run, not counted."
    " Medians over waves. A round of ours is timed from the end of the round before to its own end while all lanes"
    " decode; host is what of it was not the device call. Of a server: its own decode time by its rounds. Nodes"
    " are those of the round's graphs that compute. Prompt tok/s: the prompt's tokens by the time until it was"
    " computed; a server's first token comes with it. Rounds are compared where they bring as many tokens, within"
    " a tenth. A gain counts above twice the drift of ours' halves."
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def cell(value: float | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value * scale:.{digits}f}{unit}"


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    return "\n\n".join(
        [
            _head(record),
            "## Goodput, tokens/s", _goodput(record),
            "## Rounds", _rounds(record),
            "## Prefill", _prefill(record),
            "## Brackets", _brackets(record),
            "## Accepted, by position in the block", _accepted(record),
            "## Texts", _texts(record), _digests(record),
            "## What the numbers are", _meaning(record),
        ]
    ) + "\n"  # fmt: skip


def _head(record: dict[str, Any]) -> str:
    s, m, copy = record["settings"], record["machine"], record["copy"]
    files = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in record["files"].items())
    load = f", load average {m['load'][0]:.1f} before and {m['load_after'][0]:.1f} after" if m["load"] else ""
    stock = {name: about for found in record["lanes"].values() for name, about in found["stock"].items()}
    lines = [
        "# Bench", "",
        f"{record['date']}, version {record['version']}, {record['minutes']:.1f} minutes. `{record['command']}`", "",
        f"* device: {record['device']['name']} ({record['device']['description']}); {m['cpu']}, {m['cores']} cores"
        f"{load}",
        f"* files: {files}; loaded in {record['load_s']:.1f} s",
        f"* waves: {s['waves']} a number of lanes, prompts: {s['prompts']} (seed {s['seed']}), {s['tokens']} forced"
        f" tokens, greedy; keys and values {s['kv_type']}; {s['n_ctx']} positions a lane",
        f"* copy of {copy['tensor_bytes'] / 2**20:.0f} MiB: {copy['bytes_per_s'] / 1e9:.1f} GB/s, read and written",
        *(f"* {name}: `{about.get('command') or about['url']}`" for name, about in stock.items()),
    ]  # fmt: skip
    return "\n".join(lines)


def _each(record: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(lanes, side, its numbers) in order."""
    return [(n, name, side) for n, found in record["lanes"].items() for name, side in found["sides"].items()]


def _goodput(record: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for _, name, _ in _each(record)))
    by = {(n, name): side["all"] for n, name, side in _each(record)}
    rows = [[name, *(cell(by[n, name]["goodput"], 1) for n in record["lanes"])] for name in names]
    return table(["lanes", *record["lanes"]], rows)


def _rounds(record: dict[str, Any]) -> str:
    head = ["lanes, side", "p50 ms", "p95 ms", "device p50", "host p50", "tokens a round", "decode tok/s", "nodes"]
    head += ["MB", "floor ms", "of copy", "graph hits", "built"]
    rows = []
    for n, name, side in _each(record):
        a, work = side["all"], side.get("work") or {}
        phases = a.get("phases", {})
        row = [f"{n}, {name}", cell(a["round_p50_ms"], 3)]
        row += [cell(phases["round"]["p95_ms"], 3) if phases else ""]
        row += [cell(phases[part]["p50_ms"], 3) if phases else "" for part in ("device", "host")]
        row += [cell(a["tokens_a_round"], 2), cell(a["decode"], 1), str(work.get("launches", ""))]
        row += [cell(work.get("total_bytes"), 1, 1e-6), cell(work.get("floor_ms"), 3)]
        row += [cell(work.get("of_copy"), 1, 100, " %")]
        row += [str(a["hits"]), str(a["builds"])] if phases else ["", ""]
        rows.append(row)
    return table(head, rows)


def _prefill(record: dict[str, Any]) -> str:
    rows = []
    for n, name, side in _each(record):
        a = side["all"]
        phases = a.get("phases", {})
        piece = [cell(phases["piece"]["p50_ms"], 3), cell(phases["piece_tok_s"], 0)] if phases else ["", ""]
        rows.append([f"{n}, {name}", cell(a["first_ms"], 2), cell(a["prompt_tok_s"], 0), *piece])
    return table(["lanes, side", "first token ms", "prompt tok/s", "piece p50 ms", "pieces tok/s"], rows)


def _brackets(record: dict[str, Any]) -> str:
    rows, drifts = [], []
    for n, found in record["lanes"].items():
        apart = found["drift"]
        drifts.append(f"* {n}: goodput {cell(apart['goodput'], 1, 100)} %, round {cell(apart['round'], 1, 100)} %")
        for name, bracket in found["brackets"].items():
            for what, x in bracket.items():
                if x is not None:
                    row = [f"{n}, {found['bracketed']} / {name}", what, cell(x["ours"], 2), cell(x["other"], 2)]
                    rows.append([*row, cell(x["ratio"], 3), cell(x["drift"], 1, 100, " %"), x["verdict"]])
    head = ["lanes, sides", "", "ours", "other", "ratio (above 1: ours better)", "drift", "verdict"]
    compared = table(head, rows) if rows else "Nothing was compared."
    return "\n".join([compared, "", "Drift between ours' halves by lanes:", "", *drifts])


def _accepted(record: dict[str, Any]) -> str:
    found = [(f"{n}, {name}", side["all"]) for n, name, side in _each(record) if side["all"]["accepted_per_position"]]
    if not found:
        return "Nothing was proposed."
    most = max(len(side["accepted_per_position"]) for _, side in found)
    rows = []
    for name, side in found:
        counts = [str(count) for count in side["accepted_per_position"]]
        rows.append([name, str(side["rounds_of_requests"]), *counts, *[""] * (most - len(counts))])
    return table(["lanes, side", "rounds of requests", *(str(i + 1) for i in range(most))], rows)


def _texts(record: dict[str, Any]) -> str:
    rows = []
    for n, found in record["lanes"].items():
        for what, x in found["texts"].items():
            apart = "" if x["first_difference"] is None else str(x["first_difference"])
            rows.append([f"{n}, {what}", f"{x['equal']} of {x['of']}", apart])
    return table(["lanes, token lists", "equal", "first difference at"], rows)


def _digests(record: dict[str, Any]) -> str:
    lines = [f"* {n} lanes: `{found['digest']}`" for n, found in record["lanes"].items()]
    return "SHA-256 of all outputs of the first half:\n\n" + "\n".join(lines)


def _meaning(record: dict[str, Any]) -> str:
    return f"{MEANING}\n\n{record['formula']}"
