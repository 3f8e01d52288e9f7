"""Our engine in a process of its own: one JSON line on stdin per request, one on stdout per answer.

The first line out tells the times of import and load, so this file imports nothing heavy before it measures.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """`argv[1]` is a JSON object with target, draft (or null), threads, n_ctx."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever is printed by accident cannot break the protocol
    begin = time.perf_counter()
    from pyllama_dflash import Engine, SamplingParams

    imported = time.perf_counter()
    with Engine.load(
        options["target"],
        draft=options["draft"],
        device="cpu",
        threads=options["threads"],
        n_ctx=options["n_ctx"],
    ) as engine:
        loaded = time.perf_counter()
        _say(out, {"import_s": imported - begin, "load_s": loaded - imported})
        for line in sys.stdin:
            request = json.loads(line)
            params = SamplingParams(max_tokens=request["n"], ignore_eos=True)
            start = time.perf_counter()
            result = engine.generate(request["prompt"], params)
            wall_s = time.perf_counter() - start
            timings = {
                name: getattr(result.timings, name)
                for name in ("prefill_s", "first_token_s", "decode_s", "draft_s", "verify_s", "host_s")
            }
            answer = {
                "tokens": [int(t) for t in result.tokens],
                "text": result.text,
                "rounds": int(result.rounds),
                "accepted_per_position": [int(a) for a in result.accepted_per_position],
                "wall_s": wall_s,
                **{name: float(value) for name, value in timings.items()},
            }
            _say(out, answer)


def _say(out: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
