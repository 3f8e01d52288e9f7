"""`pyllama-dflash bench`: the record, the report and the picture of a run."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "bench"))
import stock_stand_in
from bench_run import TOKENS, WAVES, arguments, run

LANES = (1, 3)


@pytest.fixture(scope="module")
def written(tiny_pair, tmp_path_factory):
    """Record, report and picture of one run beside a stock server."""
    folder = tmp_path_factory.mktemp("bench")
    names = ("r.json", "r.md", "r.png")
    with stock_stand_in.running() as url:
        files = [str(x) for pair in zip(("--json", "--report", "--png"), names, strict=True) for x in pair]
        files[1::2] = [str(folder / name) for name in names]
        assert run(*arguments(tiny_pair, "--lanes", ",".join(map(str, LANES)), "--stock", url, *files)) == 0
    return json.loads((folder / "r.json").read_text()), (folder / "r.md").read_text(), (folder / "r.png").read_bytes()


def test_record_has_what_ran(written, tiny_pair):
    record = written[0]
    assert record["files"] == {path.name: path.stat().st_size for path in (tiny_pair.target, tiny_pair.draft)}
    assert record["settings"] | {"waves": WAVES, "tokens": TOKENS, "seed": 0, "kv_type": "f16"} == record["settings"]
    assert record["device"]["kind"] == "cpu" and record["copy"]["bytes_per_s"] > 1e8
    assert str(tiny_pair.target.parent) not in json.dumps(record)
    assert list(record["lanes"]) == [str(n) for n in LANES]
    assert record["paths"]["accept"] == {"kernel": record["paths"]["accept"]["kernel"]}


@pytest.mark.parametrize("lanes", LANES)
def test_waves_have_all_tokens_and_equal_digests(written, lanes):
    sides = written[0]["lanes"][str(lanes)]["sides"]
    assert list(sides) == ["ours, width 8", "ours, width 1", "stock"]
    digests = {}
    for name, side in sides.items():
        assert list(side["waves"]) == (["a1", "a2"] if name == "ours, width 8" else ["b"])
        assert side["all"]["tokens"] == len(side["waves"]) * WAVES * lanes * TOKENS
        for half, found in side["waves"].items():
            assert len(found) == WAVES
            digests[name, half] = [d for wave in found for d in wave["digests"]]
            assert len(digests[name, half]) == WAVES * lanes
            for wave in found:
                assert wave["tokens"] == lanes * TOKENS and wave["goodput"] > 0 and wave["tail_s"] >= 0
                assert wave["window_s"] * wave["goodput"] <= lanes * TOKENS + 1e-6
    first = digests["ours, width 8", "a1"]
    assert first == digests["ours, width 8", "a2"] == digests["ours, width 1", "b"] != digests["stock", "b"]
    whole = hashlib.sha256("".join(first).encode()).hexdigest()
    assert written[0]["lanes"][str(lanes)]["digest"] == whole


def test_a_prompt_has_the_same_text_at_any_number_of_lanes(written):
    one, three = (written[0]["lanes"][n]["sides"]["ours, width 8"]["waves"]["a1"] for n in ("1", "3"))
    assert [wave["digests"][0] for wave in one] == [wave["digests"][0] for wave in three]


@pytest.mark.parametrize("lanes", LANES)
def test_rounds_phases_and_acceptance(written, lanes):
    sides = written[0]["lanes"][str(lanes)]["sides"]
    wide, plain, server = (sides[name]["all"] for name in ("ours, width 8", "ours, width 1", "stock"))
    for side in (wide, plain):
        phases = side["phases"]
        assert 0 < phases["round"]["p50_ms"] <= phases["round"]["p95_ms"]
        assert 0 < phases["device"]["p50_ms"] and 0 < phases["host"]["p50_ms"] < phases["round"]["p50_ms"]
        assert phases["piece"]["count"] == (2 if side is wide else 1) * WAVES * lanes and phases["piece_tok_s"] > 0
        assert side["round_p50_ms"] == phases["round"]["p50_ms"]
    assert plain["rows"] == 1 and plain["tokens_a_round"] == 1 and plain["proposed"] == 0
    if lanes == 1:
        assert plain["phases"]["round"]["count"] == WAVES * (TOKENS - 1)  # but for the one behind the prompt
    assert wide["rows"] == 8 and len(wide["accepted_per_position"]) == 7
    # every token but a request's last round is an accepted proposal or the round's own
    counts = wide["accepted_per_position"]
    assert counts == sorted(counts, reverse=True) and counts[0] <= wide["rounds_of_requests"]
    assert wide["tokens"] <= wide["rounds_of_requests"] + sum(counts) < wide["tokens"] + 2 * WAVES * lanes * 8
    assert wide["tokens_a_round"] == pytest.approx(wide["tokens"] / wide["rounds_of_requests"])
    assert server["tokens_a_round"] == pytest.approx((TOKENS - 1) / 12) and server["round_p50_ms"] >= 2
    assert wide["hits"] > 0 and plain["builds"] == 0


@pytest.mark.parametrize("lanes", LANES)
def test_work_of_a_round(written, lanes):
    record = written[0]
    sides = record["lanes"][str(lanes)]["sides"]
    wide, plain = (sides[name]["work"] for name in ("ours, width 8", "ours, width 1"))
    for work in (wide, plain):
        assert work["launches"] == sum(work["ops"].values()) > 50 and not {"VIEW", "RESHAPE"} & set(work["ops"])
        assert work["total_bytes"] == sum(work["bytes"].values())
        assert work["floor_ms"] == pytest.approx(work["total_bytes"] / record["copy"]["bytes_per_s"] * 1e3)
    assert wide["of_copy"] == pytest.approx(wide["floor_ms"] / sides["ours, width 8"]["all"]["round_p50_ms"])
    assert wide["launches"] > plain["launches"] and wide["bytes"]["weights"] > plain["bytes"]["weights"]
    assert "ring" in wide["bytes"] and "ring" not in plain["bytes"]
    # 3 delta-net layers of 4 heads of 64 x 64, read and written
    assert plain["bytes"]["state"] == lanes * 2 * 3 * 4 * 64 * 64 * 4


def test_brackets_and_texts(written):
    for n in LANES:
        found = written[0]["lanes"][str(n)]
        assert list(found["brackets"]) == ["ours, width 1", "stock"]
        for bracket in found["brackets"].values():
            x = bracket["goodput"]
            assert x["ratio"] == pytest.approx(x["ours"] / x["other"]) and x["drift"] == found["drift"]["goodput"]
            decided = "better" if x["ratio"] > 1 else "worse"
            assert x["verdict"] == (decided if abs(x["ratio"] - 1) > 2 * x["drift"] else "within twice the drift")
        texts = found["texts"]
        assert texts["ours, width 8: both halves"] == {"equal": WAVES * n, "of": WAVES * n, "first_difference": None}
        assert texts["ours, width 8 = ours, width 1"]["equal"] == WAVES * n
        assert texts["ours, width 8 = stock"]["equal"] == 0


def test_report_and_picture(written):
    record, text, picture = written
    for line in ("## Goodput", "## Rounds", "## Prefill", "## Brackets", "## Accepted", "## Texts", record["formula"],
                 "| 3, ours, width 8 |", "| 3, stock |", record["lanes"]["3"]["digest"]):  # fmt: skip
        assert line in text
    widths = {row.count("|") for row in text.split("## Rounds")[1].split("##")[0].splitlines() if row.startswith("|")}
    assert len(widths) == 1 and "nan" not in text and "None" not in text
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
