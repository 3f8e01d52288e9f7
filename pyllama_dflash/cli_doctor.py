"""`pyllama-dflash doctor`: what this build can compute on, what it would use, and why."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from . import __version__
from ._native import LIB_DIR
from .errors import DflashError
from .ggml.devices import DeviceInfo, choose_device, list_devices, load_backends
from .pair_files import shipped

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


def _pair() -> str:
    try:
        target, draft = shipped()
    except DflashError as error:
        return str(error)
    return f"{target} with {draft.name}"
