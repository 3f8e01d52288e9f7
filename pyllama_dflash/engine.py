"""Load a target and its draft, and generate: the one object most users need."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

from .batch import LaneRows
from .cache import LaneCache
from .errors import EngineClosed, RequestError
from .ggml import DeviceInfo, Type
from .lanes import Lane, LaneText, check_tokens
from .loader import Loaded, Path, load
from .result import Chunk, Result, Timings
from .round import Counters, Round
from .sampling import SamplingParams
from .tokenizer import Tokenizer

PIECE = 256
"""Prompts are computed in pieces cut at multiples of this many positions."""

DEFAULT_CONTEXT = 4096
_KV_TYPES = {"f16": Type.F16, "f32": Type.F32, "q8_0": Type.Q8_0}
_SLOT = 0


class Engine:
    """A target model, perhaps with a draft, ready to generate for one request at a time.

    >>> with Engine.load(target, draft) as engine:
    ...     print(engine.generate("def add(a, b):", max_tokens=32).text)
    """

    def __init__(self, loaded: Loaded, n_ctx: int, kv_type: Type) -> None:
        self._loaded = loaded
        m = loaded.models
        self.n_ctx = n_ctx
        self.last_result: Result | None = None
        self._busy = threading.Lock()
        self._cache = LaneCache(
            loaded.backend, m.target, m.draft, n_ctx=n_ctx, slots=1, block=m.block, piece=PIECE, kv_type=kv_type
        )
        self._round = Round(loaded.backend, m, self._cache)
        self.closed = False

    @classmethod
    def load(
        cls, target: Path, draft: Path | None = None, *, device: str = "auto", n_ctx: int | None = None,
        threads: int | None = None, kv_type: str = "f16", progress: bool | None = None,
    ) -> Engine:  # fmt: skip
        """Open a target GGUF and, if given, its draft.

        `device`: 'auto', 'cpu', 'gpu' or a device's name; never replaced silently. `n_ctx`: positions of prompt and
        text together (default: what the target was trained for, at most 4096). `threads`: CPU threads. `kv_type`:
        'f16', 'f32' or 'q8_0'. `progress`: show a bar while weights are uploaded (None: on a terminal).

        Raises FileError, PairError, RequestError or DeviceError; nothing stays open then.
        """
        if kv_type not in _KV_TYPES:
            raise RequestError("kv_type", kv_type, f"one of {', '.join(_KV_TYPES)}")
        if n_ctx is not None and (not isinstance(n_ctx, int) or n_ctx < 2):
            raise RequestError("n_ctx", n_ctx, "at least 2")
        loaded = load(target, draft, device, threads, progress)
        try:
            trained = loaded.models.target.context_length
            if n_ctx is not None and n_ctx > trained:
                raise RequestError("n_ctx", n_ctx, f"at most {trained}, the target's context_length")
            return cls(loaded, n_ctx or min(trained, DEFAULT_CONTEXT), _KV_TYPES[kv_type])
        except BaseException:
            loaded.resources.close()
            raise

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
        return self._round.counters

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

    def stats(self) -> dict[str, Any]:
        """What the engine did so far: `graphs` built, found, dropped; `memory` in bytes; `paths` of the ops."""
        return {"graphs": dataclasses.asdict(self.counters), "memory": self.memory, "paths": self.paths}

    def prepare(self) -> None:
        """Build the graphs that a request needs, so that the first one does not wait for them."""
        self._open()
        self._round.prepare()

    def probe(self) -> None:
        """:meth:`prepare`, and count in :attr:`paths` the ops that no request needs too."""
        self._open()
        self._round.probe()

    # -- generating --------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Any) -> Result:
        """The whole continuation of `prompt` (text, or token ids). `overrides` are fields of SamplingParams."""
        for _ in self.stream(prompt, params, **overrides):
            pass
        assert self.last_result is not None
        return self.last_result

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Any
    ) -> Generator[Chunk, None, Result]:
        """The continuation as it comes: a chunk a round, then the result as the generator's value.

        Closing the generator early frees the lane; `last_result` then says 'closed'.
        """
        params = (params or SamplingParams()).replaced(**overrides)
        self._open()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = check_tokens(tokens, self.tokenizer.n_vocab, self.n_ctx)
        return self._run(ids, params)

    def _run(self, ids: list[int], params: SamplingParams) -> Generator[Chunk, None, Result]:
        if not self._busy.acquire(blocking=False):
            raise RequestError("lanes", "a second request", "one at a time; close or finish the other stream first")
        clock = Clock()
        lane = Lane(_SLOT, ids, params, self.n_ctx, LaneText(self.tokenizer, params.stop))
        parts: list[str] = []
        try:
            self._open()
            positions = min(self.n_ctx, lane.prompt_tokens + params.max_tokens + self._loaded.models.block)
            self._cache.open(lane.slot, positions)
            self._prefill(lane, clock)
            while lane.finish is None:
                before = len(lane.tokens)
                self._step(lane, clock)
                ended = lane.finish is not None
                parts.append(lane.text.finish(lane.finish == "stop") if ended else lane.text.take())
                yield Chunk(parts[-1], tuple(lane.tokens[before:]), lane.finish)
        finally:
            self._cache.release(lane.slot)
            self.last_result = _result(lane, "".join(parts), clock)
            self._busy.release()
        return self.last_result

    def _prefill(self, lane: Lane, clock: Clock) -> None:
        for piece in lane.pieces(PIECE):
            self._round.advance([LaneRows(lane.slot, lane.base, piece)], _bucket(len(piece)))
            lane.base += len(piece)
        clock.mark("prefill")

    def _step(self, lane: Lane, clock: Clock) -> None:
        """One round: draft, verify, emit."""
        clock.resume()
        proposals: list[int] = []
        if lane.rows(self._loaded.models.block) > 1:
            (proposals,) = self._round.propose([lane.anchored])
            clock.mark("draft")
        (final,) = self._round.verify([lane.block(proposals)])
        clock.mark("verify")
        lane.take(final, proposals, self.tokenizer)
        clock.mark("host")
        clock.first_token()

    # -- ending ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self.closed:
            raise EngineClosed("the engine is closed")

    def close(self) -> None:
        """Release device memory and files. Idempotent."""
        if not self.closed:
            self.closed = True
            self._round.close()
            self._cache.close()
            self._loaded.resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Clock:
    """Seconds by phase of one request."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()
        self.phases = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
        self.first: float | None = None

    def mark(self, phase: str) -> None:
        """What passed since the last mark belongs to `phase`."""
        now = time.perf_counter()
        self.phases[phase] += now - self._last
        self._last = now

    def resume(self) -> None:
        """Leave out what passed since the last mark: the consumer's time."""
        self._last = time.perf_counter()

    def first_token(self) -> None:
        """The first token is there."""
        if self.first is None:
            self.first = self._last - self.start

    def timings(self) -> Timings:
        """As the result shows it."""
        p = self.phases
        decode = p["draft"] + p["verify"] + p["host"]
        return Timings(p["prefill"], self.first or 0.0, decode, p["draft"], p["verify"], p["host"])


def _bucket(rows: int) -> int:
    """Rows of the prefill graph for a piece: the next power of two from 8 on, so that few shapes are built."""
    return max(8, 1 << (rows - 1).bit_length())


def _result(lane: Lane, text: str, clock: Clock) -> Result:
    return Result(
        text=text,
        tokens=tuple(lane.emitted),
        finish_reason=lane.finish or "closed",
        prompt_tokens=lane.prompt_tokens,
        rounds=lane.rounds,
        proposed=lane.proposed,
        accepted_per_position=tuple(lane.accepted),
        timings=clock.timings(),
    )
