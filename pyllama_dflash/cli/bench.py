"""`pyllama-dflash bench`: waves of requests, measured; a record, a report and a picture of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench import chart, measure, report
from ..bench.extras import package
from ..bench.plan import Plan
from .output import opened, put_whole


def run(args: argparse.Namespace) -> None:
    """Print the report; write what was asked for. Everything that can be wrong is found before the first wave."""
    plan = Plan(
        target=args.model, draft=args.model_draft, lanes=args.lanes, waves=args.waves, tokens=args.n_predict,
        prompts=args.prompts, prompt_tokens=args.prompt_tokens, width=args.width, other=args.other, device=args.device,
        kv_type=args.kv_type, threads=args.threads, seed=args.seed, stock=args.stock,
    )  # fmt: skip
    if args.png is not None:
        chart.check()
    if plan.stock is not None:
        package("requests", "a stock server")
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(opened(path))
            for name, path in (("json", args.json), ("report", args.report), ("png", args.png))
            if path is not None
        }
        record = {"command": _written(["pyllama-dflash", *args.given]), **measure.run(plan, _say)}
        text = report.markdown(record)
        if "json" in files:
            put_whole(files["json"], json.dumps(record, indent=1) + "\n")
        if "report" in files:
            put_whole(files["report"], text)
        if "png" in files:
            chart.draw(record, files["png"].buffer)
    put_whole(sys.stdout, text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _written(command: Sequence[str]) -> str:
    """A command without this machine's folders."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in command)
