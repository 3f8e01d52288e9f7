"""Load a target and its draft, and generate: the one object most users need."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, overload

import numpy as np

from .cache import LaneCache
from .errors import RequestError, no_memory
from .ggml import DeviceInfo, Type
from .ggml.devices import MAX_THREADS
from .handle import Handle
from .lanes import Lane, check_tokens, is_sequence
from .loader import Loaded, Path, load
from .models.qwen35 import Qwen35Params
from .penalties import check_bias
from .result import Chunk, Result
from .round import Round
from .sampling import SamplingParams
from .scheduler import PIECE, Scheduler
from .shapes import Counters
from .tokenizer import Tokenizer
from .worker import Worker

DEFAULT_CONTEXT = 4096
MAX_LANES = 64
_KV_TYPES = {"f16": Type.F16, "f32": Type.F32, "q8_0": Type.Q8_0}

Prompt = str | Sequence[int]


class Engine:
    """A target model, perhaps with a draft, that generates for up to `lanes` requests at once; more of them wait.

    Any thread may call it. The tokens of a request do not depend on what runs beside it.

    >>> with Engine.load(target, draft, lanes=8) as engine:
    ...     for result in engine.generate(["def add(a, b):", "class Stack:"], max_tokens=32):
    ...         print(result.text)
    """

    def __init__(self, loaded: Loaded, n_ctx: int, kv_type: Type, lanes: int, pool: int | None) -> None:
        self._loaded = loaded
        m = loaded.models
        self.n_ctx = n_ctx
        self.lanes = lanes
        with contextlib.ExitStack() as stack:
            stack.callback(loaded.resources.close)
            self._cache = LaneCache(
                loaded.backend, m.target, m.draft, n_ctx=n_ctx, slots=lanes, block=m.block, piece=PIECE,
                kv_type=kv_type, pool=pool,
            )  # fmt: skip
            stack.callback(self._cache.close)
            self._round = Round(loaded.backend, m, self._cache)
            stack.callback(self._round.close)
            self._scheduler = Scheduler(self._cache, m.block)
            self._worker = Worker(self._round, self._scheduler, stack.pop_all().close)
        # Reached by close(), when the engine is forgotten, and when the interpreter ends.
        self._finalize = weakref.finalize(self, self._worker.close)

    @classmethod
    def load(
        cls, target: Path, draft: Path | None = None, *, lanes: int = 1, device: str = "auto",
        n_ctx: int | None = None, pool: int | None = None, threads: int | None = None, kv_type: str = "f16",
        progress: bool | None = None,
    ) -> Engine:  # fmt: skip
        """Open a target GGUF and, if given, its draft.

        `lanes`: requests that run at once, 1..64. `device`: 'auto', 'cpu', 'gpu' or a device's name; never replaced
        silently. `n_ctx`: positions of prompt and text of a request (default: what the target was trained for, at most
        4096). `pool`: positions of all lanes together (default: n_ctx each); with less, requests wait for each other's
        pages. `threads`: CPU threads. `kv_type`: 'f16', 'f32' or 'q8_0'. `progress`: show a bar while weights are
        uploaded (None: on a terminal).

        Raises FileError, PairError, RequestError or DeviceError; nothing stays open then.
        """
        _check_is("target", target, (str, os.PathLike), "a path")
        _check_is("draft", draft, (str, os.PathLike, type(None)), "a path, or None")
        _check_is("device", device, str, "auto, cpu, gpu or a device's name")
        if not isinstance(kv_type, str) or kv_type not in _KV_TYPES:
            raise RequestError("kv_type", kv_type, f"one of {', '.join(_KV_TYPES)}")
        _check_int("lanes", lanes, 1, MAX_LANES)
        if threads is not None:
            _check_int("threads", threads, 1, MAX_THREADS)
        if n_ctx is not None:
            _check_int("n_ctx", n_ctx, 2)

        def positions(params: Qwen35Params) -> int:
            return _positions(params.context_length, n_ctx, pool, lanes)

        try:
            loaded = load(target, draft, device, threads, progress, positions)
            return cls(loaded, positions(loaded.models.target), _KV_TYPES[kv_type], lanes, pool)
        except MemoryError as error:
            raise no_memory(error) from error

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's vocabulary."""
        return self._loaded.tokenizer

    @property
    def has_draft(self) -> bool:
        """Whether rounds speculate."""
        return self._loaded.models.draft is not None

    @property
    def device(self) -> DeviceInfo:
        """The device that computes."""
        return self._loaded.device

    @property
    def device_reason(self) -> str:
        """Why this device."""
        return self._loaded.device_reason

    @property
    def counters(self) -> Counters:
        """Retained graphs: found, built, dropped."""
        return self._round.shapes.counters

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights and of caches."""
        return {"weights": self._loaded.weight_bytes, "cache": self._cache.nbytes}

    @property
    def paths(self) -> dict[str, dict[str, int]]:
        """How the ops of all graphs built so far are computed: op -> path ('kernel', 'composed', 'host') -> uses."""
        found: dict[str, dict[str, int]] = {}
        for (op, path), uses in sorted(self._round.paths.items()):
            found.setdefault(op, {})[path] = uses
        return found

    @property
    def refusals(self) -> dict[str, str]:
        """Why an op of :attr:`paths` that is not always a kernel is not: the first reason met."""
        return dict(self._round.refusals)

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""
        return self._worker.closed

    def stats(self) -> dict[str, Any]:
        """What the engine did so far: `work` (rounds, prefill pieces, seconds of device and host), `graphs` built,
        found, dropped, `memory` in bytes, `paths` of the ops."""
        return {
            "work": dataclasses.asdict(self._worker.work),
            "graphs": dataclasses.asdict(self.counters),
            "memory": self.memory,
            "paths": self.paths,
        }

    def prepare(self) -> None:
        """Build the graphs that a request needs, so that the first one does not wait for them. Before any request."""
        self._worker.idle(self._round.prepare)

    def probe(self) -> None:
        """:meth:`prepare`, and count in :attr:`paths` the ops that no request needs too."""
        self._worker.idle(self._round.probe)

    # -- generating --------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any) -> Handle:
        """Queue a request: `prompt` is text, or token ids; `overrides` are fields of SamplingParams.

        Raises RequestError when it could never run (empty, too long, more than the pool holds) or too many wait.
        """
        return self._submit(self._lane(prompt, params, overrides))

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None, **overrides: Any) -> Result: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        **overrides: Any,
    ) -> list[Result]: ...  # fmt: skip

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        **overrides: Any,
    ) -> Result | list[Result]:  # fmt: skip
        """The whole continuation of a prompt, or of each of a list of prompts, which run in all lanes at once.

        `params`: for all, or one each. When one request fails its error is raised and the others are cancelled.
        """
        many = [prompts] if _is_prompt(prompts) else list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError("params", f"{len(each)} of them", f"one, or one for each of {len(many)} prompts")
        handles: list[Handle] = []
        try:
            for prompt, own in zip(many, each, strict=True):
                handles.append(self.submit(prompt, own, **overrides))  # type: ignore[arg-type]
            results = [handle.result() for handle in handles]
        except BaseException:
            _cancel(handles)
            raise
        return results[0] if _is_prompt(prompts) else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Generator[Chunk, None, Result]:
        """The continuation as it comes: a chunk a round, then the result as the generator's value.

        The request is checked here and submitted with the first chunk that is asked for; closing the generator early
        cancels it.
        """
        return self._streamed(self._lane(prompt, params, overrides))

    def _lane(self, prompt: Prompt, params: SamplingParams | None, overrides: dict[str, Any]) -> Lane:
        """A checked request."""
        self._worker.check_open()
        _check_is("params", params, (SamplingParams, type(None)), "SamplingParams, or None")
        params = (params or SamplingParams()).replaced(**overrides)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = check_tokens(tokens, self.tokenizer.n_vocab, self.n_ctx)
        check_bias(params, self.tokenizer.n_vocab)
        lane = Lane(ids, params, self.n_ctx, self.tokenizer)
        self._scheduler.check(lane)
        return lane

    def _submit(self, lane: Lane) -> Handle:
        handle = self._worker.submit(lane)
        handle.engine = self
        return handle

    def _streamed(self, lane: Lane) -> Generator[Chunk, None, Result]:
        handle = self._submit(lane)
        try:
            yield from handle
            return handle.result()
        finally:
            handle.cancel()

    # -- ending ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests, release device memory and files. Idempotent."""
        self._finalize()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cancel(handles: Iterable[Handle]) -> None:
    for handle in handles:
        handle.cancel()


def _is_prompt(prompts: object) -> bool:
    """One prompt, text or token ids; not a list of prompts."""
    if isinstance(prompts, str) or not is_sequence(prompts):
        return True  # what is no prompt at all is refused where a prompt is checked
    first = prompts[:1]  # a range may be too long to ask for its length
    return len(first) == 0 or isinstance(first[0], (int, np.integer))


def _check_is(name: str, value: object, kinds: type | tuple[type, ...], limit: str) -> None:
    if not isinstance(value, kinds):
        raise RequestError(name, type(value).__name__, limit)


def _positions(trained: int, n_ctx: int | None, pool: int | None, lanes: int) -> int:
    """Positions of a request in a target of `trained`; RequestError if `n_ctx` or `pool` do not fit."""
    if n_ctx is not None and n_ctx > trained:
        raise RequestError("n_ctx", n_ctx, f"at most {trained}, the target's context_length")
    positions = n_ctx or min(trained, DEFAULT_CONTEXT)
    if pool is not None:
        _check_int("pool", pool, 16, positions * lanes)
    return positions


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    limit = f"at least {low}" if high is None else f"{low}..{high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise RequestError(name, value, limit)
