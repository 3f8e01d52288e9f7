"""Which devices there are, which one is used, and why."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._native import LIB_DIR, ffi, lib
from ..errors import DeviceError, EngineClosed, RequestError
from . import logs

if TYPE_CHECKING:
    from .tensors import Tensor

MAX_THREADS = 512
_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}
_MODULE_PREFIX = "libdflash-"
_NOT_MODULES = {"base", "ggml", "llama"}


@dataclass(frozen=True)
class DeviceInfo:
    """One device ggml can compute on. Memory in bytes (0 = unknown)."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int
    backend: str
    index: int


@functools.cache
def load_backends() -> tuple[str, ...]:
    """Load every backend module of the package folder, once. Returns the names of those that loaded."""
    found = []
    for path in sorted(Path(LIB_DIR).glob(f"{_MODULE_PREFIX}*.so")):
        name = path.stem.removeprefix(_MODULE_PREFIX)
        if name in _NOT_MODULES:
            continue
        try:
            # Opened here first, so that its symbols bind to our libraries even if another ggml is loaded globally.
            ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0))
        except OSError as error:
            logs.logger.info("backend module %s does not load here: %s", path.name, error)
            continue
        if lib.ggml_backend_load(str(path).encode()) != ffi.NULL:
            found.append(name)
    return tuple(found)


def _device(index: int) -> DeviceInfo:
    handle = lib.ggml_backend_dev_get(index)
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    lib.ggml_backend_dev_memory(handle, free, total)
    registry = lib.ggml_backend_dev_backend_reg(handle)
    return DeviceInfo(
        name=ffi.string(lib.ggml_backend_dev_name(handle)).decode(),
        description=ffi.string(lib.ggml_backend_dev_description(handle)).decode(),
        kind=_KINDS.get(int(lib.ggml_backend_dev_type(handle)), "other"),
        memory_free=int(free[0]),
        memory_total=int(total[0]),
        backend=ffi.string(lib.ggml_backend_reg_name(registry)).decode(),
        index=index,
    )


def list_devices() -> list[DeviceInfo]:
    """All devices of all backend modules that load on this machine."""
    load_backends()
    return [_device(i) for i in range(lib.ggml_backend_dev_count())]


def choose_device(request: str = "auto") -> tuple[DeviceInfo, str]:
    """The device for `request` and the reason.

    'auto' takes a GPU when the engine's ops run there, else the CPU; a kind ('cpu', 'gpu') or a device name is taken
    literally and never replaced by another device.
    """
    devices = list_devices()
    if not devices:
        raise DeviceError(f"no device: no backend module loads from {LIB_DIR}")
    if request == "auto":
        for device in devices:
            if device.kind in ("gpu", "igpu") and _runs_our_ops(device):
                return device, f"auto: {device.name} runs the engine's ops"
        cpu = [d for d in devices if d.kind == "cpu"]
        if cpu:
            return cpu[0], "auto: no GPU backend of this build runs the engine's ops, so the CPU"
        raise DeviceError("auto: no device of this build runs the engine's ops")
    for device in devices:
        if request.lower() in (device.name.lower(), device.kind):
            return device, f"asked for: {request}"
    known = ", ".join(f"{d.name} ({d.kind})" for d in devices)
    raise RequestError("device", request, f"one of auto, {known}")


def _runs_our_ops(device: DeviceInfo) -> bool:
    """Whether the device answers yes to a GDN verify node at the usual state width."""
    from .graph import Graph
    from .tensors import Type

    f32, s, h, t = Type.F32, 128, 4, 8
    backend = Backend(device)
    try:
        with Graph(backend) as g:
            q, v = g.input("q", f32, s, h, t), g.input("v", f32, s, h, t)
            gates, state = g.input("gates", f32, h, t), g.input("state", f32, s, s, h)
            log, ints = g.input("log", f32, 2 * s + 1, h, t), g.input("ints", Type.I32, 1)
            return backend.supports(g.gdn_verify(q, q, v, gates, gates, state, log, ints, ints))
    finally:
        backend.close()


class Backend:
    """A device opened for computing. `threads` counts CPU threads (ignored by GPUs)."""

    def __init__(self, device: DeviceInfo, threads: int | None = None) -> None:
        self.device = device
        self.threads = threads if threads is not None else default_threads()
        if not 1 <= self.threads <= MAX_THREADS:
            raise RequestError("threads", self.threads, f"1..{MAX_THREADS}")
        self._dev = lib.ggml_backend_dev_get(device.index)
        self._ptr = lib.ggml_backend_dev_init(self._dev, ffi.NULL)
        if self._ptr == ffi.NULL:
            raise DeviceError(f"{device.name} cannot be opened: {logs.native_log_tail() or 'no reason given'}")
        if device.kind == "cpu":
            lib.dflash_backend_set_n_threads(self._ptr, self.threads)
            # The tiled matmul and flash attention switch by row count, which would make a token depend on how many
            # rows were computed beside it (docs/numerics.md).
            lib.dflash_backend_cpu_set_use_ref(self._ptr, True)

    @property
    def ptr(self) -> Any:
        """The native handle; raises once closed."""
        if self._ptr is None:
            raise EngineClosed(f"backend {self.device.name} is closed")
        return self._ptr

    @property
    def buffer_type(self) -> Any:
        """The device's default buffer type."""
        return lib.ggml_backend_get_default_buffer_type(self.ptr)

    @property
    def maps_host_memory(self) -> bool:
        """Whether tensors can live in mapped file memory without a copy."""
        props = ffi.new("struct ggml_backend_dev_props *")
        lib.ggml_backend_dev_get_props(self._dev, props)
        return bool(props.caps.buffer_from_host_ptr) and self.device.kind == "cpu"

    def wrap_host_memory(self, address: Any, size: int) -> Any:
        """A native buffer over `size` bytes of host memory at `address` (not copied; the caller keeps it alive)."""
        buffer = lib.ggml_backend_dev_buffer_from_host_ptr(self._dev, address, size, size)
        if buffer == ffi.NULL:
            raise DeviceError(f"{self.device.name} cannot map {size} bytes of host memory")
        return buffer

    def supports(self, tensor: Tensor) -> bool:
        """Whether the device computes this node."""
        return bool(lib.ggml_backend_supports_op(self.ptr, tensor.ptr))

    def close(self) -> None:
        """Release the device. Idempotent."""
        if self._ptr is not None:
            lib.ggml_backend_free(self._ptr)
            self._ptr = None


def default_threads() -> int:
    """One thread per CPU this process may run on."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
