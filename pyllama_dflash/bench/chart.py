"""A record of the bench as a picture: goodput and rounds by lanes."""

from __future__ import annotations

from typing import Any, BinaryIO

from .extras import package


def draw(record: dict[str, Any], out: BinaryIO) -> None:
    """Write a PNG. ImportError without matplotlib."""
    figure_module, backend = check()
    figure = figure_module.Figure(figsize=(11, 4.5), layout="constrained")
    backend.FigureCanvasAgg(figure)
    goodput, rounds = figure.subplots(1, 2)
    lanes = [int(n) for n in record["lanes"]]
    sides: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for n, found in record["lanes"].items():
        for name, side in found["sides"].items():
            sides.setdefault(name, []).append((int(n), side))
    for name, points in sides.items():
        at = [n for n, _ in points]
        (line,) = goodput.plot(at, [side["all"]["goodput"] for _, side in points], marker="o", label=name)
        rounds.plot(at, [side["all"]["round_p50_ms"] for _, side in points], marker="o", color=line.get_color())
        floors = [(n, side["work"]["floor_ms"]) for n, side in points if side.get("work")]
        if floors:
            rounds.plot(*zip(*floors, strict=True), linestyle=":", marker=".", color=line.get_color())
    goodput.set_ylabel("goodput, tokens/s")
    rounds.set_ylabel("round, ms (dotted: bytes at copy bandwidth)")
    for axes in (goodput, rounds):
        axes.set_xlabel("lanes")
        axes.set_xticks(lanes)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    goodput.legend()
    figure.suptitle(f"{' + '.join(record['files'])} on {record['device']['name']}")
    figure.savefig(out, format="png", dpi=120)


def check() -> tuple[Any, Any]:
    """The parts of matplotlib that are used; ImportError, one line, when it is missing."""
    why = "a picture"
    package("matplotlib", why)
    return package("matplotlib.figure", why), package("matplotlib.backends.backend_agg", why)
