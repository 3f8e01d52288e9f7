"""The whole run: for each number of lanes, waves of ours, of what it is compared with, and of ours again."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..engine import Engine
from ..ggml import Backend, choose_device
from ..gguf_file import GGUFFile
from ..models.dflash import DFlashParams
from ..sampling import MAX_WIDTH
from ..tokenizer import Tokenizer
from . import copying, figures, ours, prompts, stock, stock_process, traffic
from .plan import Plan, Width
from .waves import Side, digest_of_all

PAUSE_S = 0.1  # between two waves, so that threads of the last one have stopped waiting actively
ROUND_UP = 256

Say = Callable[[str], None]
Groups = Sequence[list[list[int]]]


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Everything measured, as plain data; `say` hears of each wave. The package's errors for what cannot be run."""
    begun = time.perf_counter()
    device, _ = choose_device(plan.device)
    width, other = plan.widths(_block(plan))
    running = stock.Client(plan.stock) if plan.stock is not None and plan.stock_is_url else None
    if running is not None:
        running.check(max(plan.lanes))
    groups = _groups(plan)
    longest = max(len(prompt) for waves in groups.values() for wave in waves for prompt in wave)
    n_ctx = -(-(longest + plan.tokens + MAX_WIDTH) // ROUND_UP) * ROUND_UP
    record = _about(plan, n_ctx)
    say("copying")
    record["copy"] = _copy(plan)
    loading = time.perf_counter()
    with Engine.load(
        plan.target, plan.draft, lanes=max(plan.lanes), device=device.name, n_ctx=n_ctx, threads=plan.threads,
        kv_type=plan.kv_type, progress=False,
    ) as engine:  # fmt: skip
        record["load_s"] = time.perf_counter() - loading
        record["device"] = {"name": device.name, "description": device.description, "kind": device.kind}
        record["memory"] = engine.memory
        bench = _Bench(plan, engine, running, width, other, record["copy"]["bytes_per_s"], say)
        record["lanes"] = {str(lanes): bench.lanes(groups[lanes]) for lanes in plan.lanes}
        record["paths"], record["refusals"] = engine.paths, engine.refusals
    record["machine"]["load_after"] = _load()
    record["minutes"] = (time.perf_counter() - begun) / 60
    return record


def _block(plan: Plan) -> int:
    """Rows of the draft's block; 1 without a draft."""
    if plan.draft is None:
        return 1
    with GGUFFile(plan.draft) as file:
        return DFlashParams.from_file(file).block_size


def _groups(plan: Plan) -> dict[int, Groups]:
    """The prompts of each wave by the number of lanes."""
    with Tokenizer(plan.target) as tokenizer:
        source = prompts.source(plan.prompts, tokenizer, plan.prompt_tokens, plan.seed)
        return {lanes: [source.wave(i, lanes) for i in range(plan.waves)] for lanes in plan.lanes}


def _copy(plan: Plan) -> dict[str, Any]:
    backend = Backend(choose_device(plan.device)[0], plan.threads)
    try:
        return copying.bandwidth(backend)
    finally:
        backend.close()


def _about(plan: Plan, n_ctx: int) -> dict[str, Any]:
    files = [Path(path) for path in (plan.target, plan.draft) if path is not None]
    return {
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), "load": _load()},
        "files": {path.name: path.stat().st_size for path in files},
        "settings": {
            "waves": plan.waves, "tokens": plan.tokens, "prompts": Path(plan.prompts).name, "seed": plan.seed,
            "kv_type": plan.kv_type, "threads": plan.threads, "n_ctx": n_ctx,
        },
        "formula": traffic.FORMULA,
    }  # fmt: skip


def _load() -> list[float]:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else []


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


class _Bench:
    """What all numbers of lanes share."""

    def __init__(
        self, plan: Plan, engine: Engine, running: stock.Client | None, width: Width, other: Width, copy: float,
        say: Say,
    ) -> None:  # fmt: skip
        self._plan, self._engine, self._running = plan, engine, running
        self._width, self._other, self._copy, self._say = width, other, copy, say

    def lanes(self, groups: Groups) -> dict[str, Any]:
        """All waves with so many lanes, and what they say."""
        lanes = len(groups[0])
        a, own = _name(self._width), {_name(width): width for width in (self._width, self._other)}
        with contextlib.ExitStack() as stack:
            sides: dict[str, Side] = {
                name: functools.partial(ours.wave, self._engine, None if width == "adaptive" else width)
                for name, width in own.items()
            }
            servers = self._servers(lanes, stack)
            sides |= {name: server.wave for name, (server, _) in servers.items()}
            for name, side in sides.items():  # pages touched, threads started, graphs built, costs of widths known
                self._say(f"lanes {lanes}, warming up, {name}")
                side(groups[0], self._plan.tokens)
            halves = self._waves(a, sides, groups, lanes)
        record = self._record(a, halves)
        for name, width in own.items():
            record["sides"][name]["work"] = self._work(record["sides"][name]["all"], lanes, groups, width != 1)
        record["stock"] = {name: about for name, (_, about) in servers.items()}
        return record

    def _servers(self, lanes: int, stack: contextlib.ExitStack) -> dict[str, tuple[stock.Client, dict[str, Any]]]:
        """Stock servers by name, each with what is to be known of it."""
        plan = self._plan
        if self._running is not None:
            return {"stock": (self._running, {"url": self._running.url, "model": self._running.model})}
        if plan.stock is None:
            return {}
        drafts = {"stock, with the draft": plan.draft} if plan.draft else {}
        found = {}
        for name, draft in {**drafts, "stock, plain": None}.items():
            flags = stock_process.flags(
                plan.target, draft, block=_block(plan), lanes=lanes, n_ctx=self._engine.n_ctx, kv_type=plan.kv_type,
                threads=self._engine._loaded.backend.threads, gpu=self._engine.device.kind != "cpu",
            )  # fmt: skip
            server = stack.enter_context(stock_process.StockProcess(Path(str(plan.stock)), flags))
            command = " ".join(word.rpartition("/")[2] for word in server.command)
            found[name] = server.client, {"command": command, "load_s": server.load_s}
        return found

    def _waves(self, a: str, sides: dict[str, Side], groups: Groups, lanes: int) -> dict[str, figures.Halves]:
        """Waves by side and half; each prompt group is run by ours, all others, ours."""
        others = [name for name in sides if name != a]
        order = [("a1", a), *(("b", name) for name in others), ("a2", a)]
        halves: dict[str, figures.Halves] = {name: {} for name in sides}
        for number, group in enumerate(groups, 1):
            for half, name in order:
                time.sleep(PAUSE_S)
                wave = sides[name](group, self._plan.tokens)
                halves[name].setdefault(half, []).append(wave)
                speed = figures.of_wave(wave)["goodput"]
                self._say(f"lanes {lanes}, wave {number} of {len(groups)}, {name}: {speed:.1f} tokens/s")
        return halves

    def _record(self, a: str, halves: dict[str, figures.Halves]) -> dict[str, Any]:
        sides: dict[str, Any] = {}
        for name, found in halves.items():
            all_waves = [wave for waves in found.values() for wave in waves]
            each = {half: [figures.of_wave(wave) for wave in waves] for half, waves in found.items()}
            sides[name] = {"waves": each, "all": figures.of_side(all_waves)}
        others = {name: found["b"] for name, found in halves.items() if name != a}
        first = halves[a]["a1"]
        texts = {f"{a}: both halves": figures.equal_texts(first, halves[a]["a2"])}
        texts |= {f"{a} = {name}": figures.equal_texts(first, waves) for name, waves in others.items()}
        if {"stock, plain", "stock, with the draft"} <= set(others):
            texts["stock: with the draft = plain"] = figures.equal_texts(
                others["stock, with the draft"], others["stock, plain"]
            )
        return {
            "bracketed": a,
            "sides": sides,
            "brackets": {name: figures.bracket(halves[a], waves) for name, waves in others.items()},
            "drift": figures.drift(halves[a]),
            "texts": texts,
            "digest": digest_of_all([d for wave in sides[a]["waves"]["a1"] for d in wave["digests"]]),
        }

    def _work(self, side: dict[str, Any], lanes: int, groups: Groups, feeds: bool) -> dict[str, Any] | None:
        """Launches and bytes of a side's usual round beside its time."""
        if side["rows"] is None:
            return None
        position = _mean_prompt(groups) + self._plan.tokens / 2
        found = traffic.of_round(self._engine, lanes, side["rows"], side["tokens_a_round"], position, feeds=feeds)
        if found is None:
            return None
        total, seconds = sum(found.bytes.values()), side["round_p50_ms"] / 1e3
        return {
            "rows": side["rows"], "launches": found.launches, "ops": found.ops, "bytes": found.bytes,
            "total_bytes": total, "floor_ms": total / self._copy * 1e3, "bytes_per_s": total / seconds,
            "of_copy": total / seconds / self._copy,
        }  # fmt: skip


def _name(width: Width) -> str:
    return f"ours, width {width}"


def _mean_prompt(groups: Groups) -> float:
    lengths = [len(prompt) for wave in groups for prompt in wave]
    return sum(lengths) / len(lengths)
