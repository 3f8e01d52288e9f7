"""What the package asks native code and cffi for: every such call counted, made to fail on demand, and matched with the
call that gives it back."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from pyllama_dflash._native import ffi, lib

_FREED_BY = {
    "ggml_init": "ggml_free",
    "ggml_backend_dev_init": "ggml_backend_free",
    "ggml_backend_alloc_ctx_tensors": "ggml_backend_buffer_free",
    "ggml_backend_dev_buffer_from_host_ptr": "ggml_backend_buffer_free",
    "ggml_gallocr_new": "ggml_gallocr_free",
    "gguf_init_from_buffer": "gguf_free",
    "llama_model_load_from_file": "llama_model_free",
}
_FAILS: dict[str, Any] = dict.fromkeys(_FREED_BY, ffi.NULL) | {"ggml_gallocr_alloc_graph": False}
del _FAILS["ggml_gallocr_new"]  # ends the process itself; the buffer comes with the next call


class Allocations:
    """Inside `with Allocations() as made:` the calls of _FAILS and `ffi.new` go through here.

    `made.fail(n)`: the call behind the next n fails, native ones by their answer, `ffi.new` with MemoryError; `failed`
    is its name, None until then. `passing`: how many still pass, -1: all. `held`: what native code was asked for and
    did not get back.
    """

    def __init__(self) -> None:
        self.failed: str | None = None
        self.held: Counter[str] = Counter()
        self.passing = -1
        self._patches = contextlib.ExitStack()

    def fail(self, n: int) -> None:
        self.failed, self.passing = None, n

    def __enter__(self) -> Allocations:
        package = [module for name, module in sys.modules.items() if name.startswith("pyllama_dflash.")]
        for module, (name, real) in itertools.product(package, {"lib": lib, "ffi": ffi}.items()):
            if getattr(module, name, None) is real and not module.__name__.startswith("pyllama_dflash._native"):
                self._patches.enter_context(mock.patch.object(module, name, _Through(real, self)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _due(self, name: str) -> bool:
        self.passing -= 1
        if self.passing != -1:
            return False
        self.failed = name
        return True

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, which may fail, or whose call is noted."""
        if name == "new":

            def new(*args: Any) -> Any:
                if self._due(f"ffi.new {args[0]}"):
                    raise MemoryError(f"injected: {args[0]}")
                return real(*args)

            return new

        def call(*args: Any) -> Any:
            if name in _FAILS and self._due(name):
                return _FAILS[name]
            got = real(*args)
            if name in _FREED_BY:
                self.held[_FREED_BY[name]] += 1
            elif name in _FREED_BY.values():
                self.held[name] -= 1
            return got

        return call


class _Through:
    """Stands before `lib` or `ffi`."""

    def __init__(self, real: Any, made: Allocations) -> None:
        self._real, self._made = real, made

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name in (("new",) if self._real is ffi else (*_FAILS, *_FREED_BY, *_FREED_BY.values())):
            return self._made.wrapped(name, value)
        return value
