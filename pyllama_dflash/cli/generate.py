"""`pyllama-dflash generate`: one prompt as a stream of text, or several requests at once, shown in their order."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..engine import Engine
from ..errors import DflashError
from ..handle import Handle
from ..result import Result
from .main import PROGRAM
from .output import opened, put, put_whole
from .requests import Request, read
from .stats import Tally, report

MOST_LANES = 8  # unless -np says otherwise
AHEAD = 256  # requests the engine has at a time: more than lanes, so that a long one in front does not hold up others
POLL_S = 0.1

Outcome = Result | DflashError
Show = Callable[[Request, Outcome], None]


def run(args: argparse.Namespace) -> int:
    """Returns how many requests failed. A prompt that is alone on the command line raises its error instead."""
    requests = read(args)
    target, draft = _models(args)
    lanes = min(len(requests), MOST_LANES) if args.parallel is None else args.parallel
    several = args.jsonl is not None or len(requests) > 1
    as_json = args.jsonl is not None or args.output is not None or args.json
    echo = not args.no_display_prompt
    tally = Tally()
    with (
        opened(args.output) as out,
        Engine.load(
            target, draft, lanes=lanes, device=args.device, n_ctx=args.ctx_size, pool=args.pool, threads=args.threads
        ) as engine,
    ):
        if not several and not as_json:
            _stream(engine, requests[0], out, tally, echo)
        else:
            about = partial(_about, engine, target, draft) if args.json else None
            show: Show = partial(_show_json, out, about) if as_json else partial(_show_text, out, echo)
            hidden = not (several and (args.progress or sys.stderr.isatty()))
            _batch(engine, requests, show, tally, hidden=hidden, go_on=several)
        if args.stats:
            print(report(engine, tally), file=sys.stderr)
    if tally.failed:
        print(f"{PROGRAM}: error: {tally.failed} of {len(requests)} requests failed", file=sys.stderr)
    return tally.failed


def _models(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The files to load: the shipped target unless another is named, with the shipped draft for that target only."""
    target = Path(args.model) if args.model else None
    draft = Path(args.model_draft) if args.model_draft else None
    if target is None:
        from ..pair_files import shipped

        target, shipped_draft = shipped()
        draft = draft or shipped_draft
    return target, None if args.no_draft else draft


# -- one prompt --------------------------------------------------------------------------------------------------------


def _stream(engine: Engine, request: Request, out: TextIO, tally: Tally, echo: bool) -> None:
    tally.start()
    handle = engine.submit(request.prompt, request.params)
    try:
        put(out, str(request.prompt) if echo else "")
        for chunk in handle:
            put(out, chunk.text)
        tally.add(handle.result())
    finally:
        with contextlib.suppress(BrokenPipeError):
            put(out, "\n")


# -- several -----------------------------------------------------------------------------------------------------------


def _batch(engine: Engine, requests: Sequence[Request], show: Show, tally: Tally, *, hidden: bool, go_on: bool) -> None:
    """Run the requests and show what came of each; unless `go_on`, the first that fails raises its error."""
    tally.start()
    with tqdm(total=len(requests), disable=hidden, file=sys.stderr, unit="prompt", dynamic_ncols=True) as bar:

        def ended(outcome: Outcome) -> None:
            tally.add(outcome)
            speed = f"{tally.tokens_per_second:.1f} tokens/s, {tally.mean_accepted_length:.2f} tokens a round"
            bar.set_postfix_str(speed, refresh=False)
            bar.update()

        for request, outcome in _in_order(engine, requests, ended):
            if isinstance(outcome, DflashError) and not go_on:
                raise outcome
            bar.clear()
            show(request, outcome)
            bar.refresh()


def _in_order(
    engine: Engine, requests: Sequence[Request], ended: Callable[[Outcome], None]
) -> Iterator[tuple[Request, Outcome]]:
    """What came of each request, in their order; `ended` hears of each as it ends. Closing the engine ends all."""
    coming = iter(requests)
    flights: deque[_Flight] = deque()
    while True:
        flights.extend(_Flight(engine, request) for request in islice(coming, AHEAD - len(flights)))
        if not flights:
            return
        flights[0].wait()
        for flight in flights:
            if (landed := flight.lands()) is not None:
                ended(landed)
        while flights and (outcome := flights[0].outcome) is not None:
            yield flights.popleft().request, outcome


class _Flight:
    """A request that the engine has taken, or refused."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.outcome: Outcome | None = None
        self._handle: Handle | None = None
        try:
            self._handle = engine.submit(request.prompt, request.params)
        except DflashError as error:
            self._refused = error

    def wait(self) -> None:
        """Until it has ended, but not for long."""
        if self._handle is not None and self.outcome is None:
            with contextlib.suppress(DflashError, TimeoutError):
                self._handle.result(POLL_S)

    def lands(self) -> Outcome | None:
        """What came of it, when it has ended since the last call."""
        if self.outcome is not None or (self._handle is not None and not self._handle.done):
            return None
        try:
            self.outcome = self._refused if self._handle is None else self._handle.result()
        except DflashError as error:
            self.outcome = error
        return self.outcome


# -- what is shown -----------------------------------------------------------------------------------------------------


def _show_text(out: TextIO, echo: bool, request: Request, outcome: Outcome) -> None:
    if isinstance(outcome, DflashError):
        print(f"{PROGRAM}: error: prompt {request.id}: {outcome}", file=sys.stderr)
        return
    gap = "" if request.id == 1 else "\n"
    put_whole(out, f"{gap}### prompt {request.id}\n{request.prompt if echo else ''}{outcome.text}\n")


def _show_json(out: TextIO, about: Callable[[], dict[str, Any]] | None, request: Request, outcome: Outcome) -> None:
    """A line; `about` adds what ran and the prompt to it."""
    record: dict[str, Any] = {"id": request.id}
    if isinstance(outcome, DflashError):
        record["error"] = {"type": type(outcome).__name__, "message": str(outcome)}
    else:
        record |= {**about(), "prompt": request.prompt} if about else {}
        record |= outcome.to_dict()
    put_whole(out, json.dumps(record, ensure_ascii=False) + "\n")


def _about(engine: Engine, target: Path, draft: Path | None) -> dict[str, Any]:
    return {
        "model": str(target),
        "draft": None if draft is None else str(draft),
        "device": engine.device.name,
        "n_ctx": engine.n_ctx,
        "paths": engine.paths,
    }
