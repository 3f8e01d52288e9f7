"""The soak in short, see soak.py; and that it notices what it looks for."""

from __future__ import annotations

import itertools

import soak
from faults import Fault, Faults

from pyllama_dflash import Engine, SamplingParams


def test_the_end_is_like_the_beginning():
    seen = soak.soak(600, "cpu")
    print("\n".join(seen.lines()))
    assert seen.counts["requests"] == 600 and seen.counts["cancelled"] > 10 and seen.counts["repeated"] > 400
    assert (seen.errors, seen.counts["empty"], seen.counts["differing"]) == ([], 0, 0)
    assert seen.passed, seen.lines()


def test_what_differs_or_fails_is_counted(monkeypatch):
    """Sabotage: every request is drawn with another seed than before, and one run fails."""
    submit, seeds = Engine.submit, itertools.count()

    def other(engine: Engine, prompt: str, params: SamplingParams) -> object:
        return submit(engine, prompt, params.replaced(seed=next(seeds)))

    monkeypatch.setattr(Engine, "submit", other)
    with Faults() as faults:
        faults.arm(Fault("compute", passing=40))
        seen = soak.soak(60, "cpu", passes=3)
    assert seen.counts["differing"] > 0 and not seen.passed
    assert seen.errors and set(seen.errors) == {"DeviceError: injected: compute failed (1)"}
