"""`pyllama-dflash doctor`: what this build can compute on, what it would use, and why."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from .. import __version__
from .._native import LIB_DIR
from ..engine import Engine
from ..errors import DflashError
from ..ggml.devices import DeviceInfo, choose_device, list_devices, load_backends
from ..pair_files import shipped

_CONTEXT = 512
_SHARED = ("base", "ggml", "llama")  # libraries in the same folder that are no backends


def report(request: str) -> str:
    """The text. RequestError or DeviceError if `request` names no device."""
    loaded = load_backends()
    modules = sorted({f.stem.removeprefix("libdflash-") for f in Path(LIB_DIR).glob("libdflash-*.so")} - {*_SHARED})
    lines = [
        f"pyllama_dflash {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"libraries   {LIB_DIR}",
        f"backends    {', '.join(_backend(name, name in loaded) for name in modules) or 'none'}",
    ]
    lines += [f"device      {_device(device)}" for device in list_devices()]
    chosen, reason = choose_device(request)
    lines.append(f"chosen      {chosen.name} ({reason})")
    lines.append(f"CPUs        {_cpus()} of {os.cpu_count()} usable by this process")
    lines.append(f"models      {_pair()}")
    lines += [f"op          {line}" for line in _ops(request)]
    return "\n".join(lines)


def _backend(name: str, loads: bool) -> str:
    return name if loads else f"{name} (does not load here; -v shows why)"


def _device(device: DeviceInfo) -> str:
    memory = ""
    if device.memory_total:
        memory = f", {device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB free"
    return f"{device.name} ({device.kind}, {device.backend}): {device.description}{memory}"


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ops(request: str) -> list[str]:
    """How the device computes each op of the family on the nodes of the shipped pair's own graphs."""
    try:
        target, draft = shipped()
        with Engine.load(target, draft, device=request, n_ctx=_CONTEXT, progress=False) as engine:
            engine.probe()
            paths, refusals = engine.paths, engine.refusals
    except DflashError as error:
        return [f"unknown: {error}"]
    return [f"{op:<13} {_uses(uses)}{_reason(uses, refusals.get(op, ''))}" for op, uses in paths.items()]


def _uses(uses: dict[str, int]) -> str:
    return ", ".join(f"{path} {n}" if len(uses) > 1 else path for path, n in sorted(uses.items(), reverse=True))


def _reason(uses: dict[str, int], refusal: str) -> str:
    return "" if set(uses) == {"kernel"} else f" ({refusal.split('; got ')[0].split(': ', 1)[-1]})"


def _pair() -> str:
    try:
        target, draft = shipped()
    except DflashError as error:
        return str(error)
    return f"{target} with {draft.name}"
