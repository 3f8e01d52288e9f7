"""Stop strings against a naive reading of the whole text, and what a result computes."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyllama_dflash.result import Result, Timings
from pyllama_dflash.stops import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read the text character by character; cut before the longest stop string that is complete first."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def in_pieces(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher, out = StopMatcher(stops), ""
    for i, piece in enumerate(pieces):
        text, stopped = matcher.feed(piece)
        out += text
        seen = "".join(pieces[: i + 1])
        expected, hit = naive(seen, stops)
        assert stopped == hit == matcher.stopped
        assert expected.startswith(out)
        if not hit:  # nothing is held back that could not begin a stop string
            held = expected[len(out) :]
            assert not held or any(s.startswith(held) and s != held for s in stops)
    return out + matcher.flush(), matcher.stopped


letters = st.text("ab", max_size=12)


@given(st.lists(letters, max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
@settings(max_examples=500, deadline=None)
@example(["ab", "c"], ["abcd", "bc"])
@example(["aaaa", "ab"], ["aab"])
@example(["abcd"], ["bcd", "abcd", "d"])
def test_any_cut_gives_the_naive_text(pieces: list[str], stops: list[str]) -> None:
    assert in_pieces(pieces, stops) == naive("".join(pieces), stops)


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_any_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_pieces(pieces, stops) == naive(text, stops)


def test_only_what_could_be_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\n", "</s>"])
    assert matcher.feed("a\n") == ("a", False)
    assert matcher.feed("b<") == ("\nb", False)
    assert matcher.feed("/t") == ("</t", False)
    assert matcher.feed("\n\nrest") == ("", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""


def test_held_text_comes_with_flush() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") == ("the ", False)
    assert matcher.flush() == "EN" and matcher.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher(())
    assert matcher.feed("anything") == ("anything", False) and matcher.flush() == ""


def test_result_derives_rates_and_becomes_json() -> None:
    timings = Timings(prefill_s=0.5, first_token_s=0.6, decode_s=2.0, host_s=0.25)
    result = Result("hé", tuple(range(12)), "stop", 5, 4, 28, (4, 3, 1, 0, 0, 0, 0), timings)
    assert result.tokens_per_second == 6.0 and result.mean_accepted_length == 3.0
    read = json.loads(json.dumps(result.to_dict()))
    assert read["text"] == "hé" and read["tokens"] == list(range(12)) and read["finish_reason"] == "stop"
    assert read["accepted_per_position"] == [4, 3, 1, 0, 0, 0, 0] and read["timings"]["host_s"] == 0.25
    assert read["mean_accepted_length"] == 3.0 and read["tokens_per_second"] == 6.0


@pytest.mark.parametrize("finish", ["cancelled", "eos"])
def test_an_empty_result_has_no_rates(finish: str) -> None:
    result = Result("", (), finish, 1, 0, 0, (), Timings())  # type: ignore[arg-type]
    assert result.tokens_per_second == 0.0 and result.mean_accepted_length == 0.0
