"""The promise on the shipped pair, see promise.py; and that the check notices a neighbour's token."""

from __future__ import annotations

import random

import promise

from pyllama_dflash import Engine
from pyllama_dflash.pair_files import shipped

OPTIONS = {"device": "cpu", "n_ctx": 512, "threads": 1}


def test_tokens_depend_on_the_request_alone():
    report = promise.check(shipped(), tokens=20, **OPTIONS)
    assert report.requests >= 500
    assert report.differing == []


def test_the_check_sees_what_depends_on_a_neighbour(monkeypatch):
    """Sabotage: a block's last lane starts from its neighbour's anchor; some digests must differ."""
    wanted = promise.requests(20)[:6]
    expected = promise.alone(shipped(), wanted, **OPTIONS)
    with Engine.load(*shipped(), lanes=2, **OPTIONS) as engine:
        history = engine._cache.history
        note = history.note

        def swapped(slot: int, tokens: list[int]) -> None:
            note(slot, tokens)
            if slot == 1:
                history.put(
                    1, int(history.bases[1]), history.tokens[0, history.bases[0] : history.bases[0] + 1].tolist()
                )

        monkeypatch.setattr(history, "note", swapped)
        assert promise.together(engine, wanted, 8, random.Random(1)) != expected
