"""Which way each op goes, and that the way does not show in the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from composed_runs import Lanes, OpRun
from conftest import Pair
from model_checks import load_target, refusal
from reference.selector import greedy_walk, selector_scores
from refusing import DECISIONS, FAMILY, Refusing, logits_of, refused
from tiny_pair import TinyPair

from pyllama_dflash import DeviceError, Engine, RequestError, SamplingParams, family
from pyllama_dflash._native import ffi, lib
from pyllama_dflash.answers import answer_of
from pyllama_dflash.batch import LaneRows
from pyllama_dflash.cache import LaneCache
from pyllama_dflash.ggml import Backend, Graph, Tensor, Type, choose_device
from pyllama_dflash.host_path import accepted, drawn, walk
from pyllama_dflash.loader import load
from pyllama_dflash.round import COMPOSED_ROWS, Round, read_lattices
from pyllama_dflash.sampling import column

PROMPTS = [[5], [5, 17], list(range(20, 28)), [(7 * i) % 500 for i in range(40)]]
SAMPLERS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=2**64 - 1),
    SamplingParams(temperature=0.5, top_p=0.3, seed=3),
]


OF_A_ROUND = [op for op in FAMILY if not op.endswith("commit")]


# -- select ------------------------------------------------------------------------------------------------------------


def book(rng: np.random.Generator, kind: Type, vocabulary: int, rank: int) -> tuple[Any, Any]:
    """Raw rows of a codebook and the numbers they stand for, [V, R]."""
    values = rng.standard_normal((vocabulary, rank), dtype=np.float32)
    raw, out = ffi.new("char[]", values.nbytes), np.empty_like(values)
    size = lib.ggml_quantize_chunk(
        int(kind), ffi.from_buffer("float[]", values), raw, 0, vocabulary, rank, ffi.NULL
    )  # fmt: skip
    assert kind == Type.F32 or lib.dflash_to_float(int(kind), raw, ffi.from_buffer("float[]", out), out.size)
    return (values, values) if kind == Type.F32 else (bytes(ffi.buffer(raw, size)), out)


SELECTS = [  # vocabulary, rows behind the anchor, lanes, rank (0: none), top_k, codebook type, kernel
    (300, 7, 1, 32, 12, Type.Q8_0, True),
    (17, 1, 3, 5, 16, Type.F32, True),
    (1000, 15, 2, 64, 1, Type.F16, True),
    (129, 4, 5, 33, 3, Type.BF16, True),
    (200, 3, 2, 0, 16, Type.F32, True),
    (200, 7, 2, 32, 9, Type.Q8_0, False),
    (200, 7, 2, 64, 8, Type.Q4_0, False),
    (300, 16, 1, 32, 8, Type.F32, False),
    (90, 5, 2, 0, 40, Type.F32, False),
]


@pytest.mark.parametrize("params", SAMPLERS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", SELECTS, ids=str)
def test_select(kernels, composed, case, params):
    vocabulary, rows, lanes, rank, top_k, kind, has_kernel = case
    rng = np.random.default_rng(vocabulary + rows)
    logits = rng.standard_normal((lanes, rows, vocabulary), dtype=np.float32) * 2
    gate = rng.standard_normal((lanes, rows, max(rank, 1)), dtype=np.float32) * np.float32(max(rank, 1) ** -0.5)
    (raw_before, before), (raw_after, after) = (book(rng, kind, vocabulary, max(rank, 1)) for _ in "ba")
    anchors = [int(a) for a in rng.integers(0, vocabulary, lanes)]
    work = [LaneRows(i, 10 * i, [a] * (rows + 1), params) for i, a in enumerate(anchors)]

    def run(backend: Backend) -> tuple[list[list[int]], Any]:
        with OpRun(backend, Lanes(tuple(range(lanes)), rows + 1)) as run:
            edges = None
            if rank:
                books = (run.source(x, kind, raw=raw) for x, raw in ((before, raw_before), (after, raw_after)))
                edges = (run.source(gate), *books)
            chosen = family.select(run.graph, run.batch, run.source(logits), edges, top_k)
            if isinstance(chosen, Tensor):
                return run.result(chosen, work).reshape(lanes, rows).tolist(), dict(run.graph.paths)
            run.result(chosen.ids, work)
            lattices = read_lattices(chosen, lanes)
            return [walk(x, params, item.base) for x, item in zip(lattices, work, strict=True)], dict(run.graph.paths)

    ours, paths = run(composed)
    theirs, their_paths = run(kernels)
    assert paths == {("select", "composed"): 1}
    assert their_paths == {("select", "kernel" if has_kernel else "composed"): 1}
    assert ours == theirs
    if params.greedy:
        for lane, proposals in enumerate(ours):
            scale = 1.0 if rank else 0.0
            scores = selector_scores(logits[lane], scale * gate[lane], before, after, anchors[lane], top_k)
            assert proposals == greedy_walk(*scores)


# -- sample and accept -------------------------------------------------------------------------------------------------


def decide(backend: Backend, logits: Any, work: list[LaneRows], pending: Any) -> tuple[Any, ...]:
    """Final tokens; pending and anchors on the device; the paths."""
    lanes, rows = logits.shape[:2]
    with OpRun(backend, Lanes(tuple(item.slot for item in work), rows)) as run:
        memory = run.recurrent(1, 1, 1, rows, len(pending))
        memory.pending.set(pending)
        source = run.graph.cont(run.source(logits.reshape(lanes * rows, -1)))
        answer = answer_of(run.graph, run.batch, memory, source)
        run.result(answer.node, work)
        return answer.read(work), memory.pending.get().ravel(), memory.anchors.get().ravel(), dict(run.graph.paths)


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("params", SAMPLERS, ids=lambda p: f"T{p.temperature}")
def test_decisions(kernels, rows, params):
    rng = np.random.default_rng(rows)
    logits = rng.standard_normal((3, rows, 700), dtype=np.float32) * 3
    logits[:, :, 5] = logits.max(-1)  # ties
    slots, base = (4, 0, 2), (0, 9, 200)
    answers = [list(drawn(logits[i], params, base[i])) for i in range(3)]
    if rows > 2:
        logits[2, 2, 3] = np.nan  # ends lane 2's block behind two rows
        answers[2][2] = -1
    proposals = [answers[i][: rows - 1] for i in range(3)]
    if rows > 1:
        proposals[1] = [answers[1][0], *[1] * (rows - 2)] if rows > 2 else [0]
        proposals[2] = [max(0, token) for token in proposals[2]]
    work = [LaneRows(slots[i], base[i], [3, *proposals[i]], params) for i in range(3)]
    want = [accepted(tokens, p) for tokens, p in zip(answers, proposals, strict=True)]
    pending = np.full(5, 1, np.int32)
    final, after, anchors, paths = decide(kernels, logits, work, pending)
    assert paths == {("sample", "kernel"): 1, ("accept", "kernel"): 1}
    assert final == want
    for slot, tokens in zip(slots, want, strict=True):
        assert (after[slot], anchors[slot]) == (len(tokens), tokens[-1])
    assert after[[1, 3]].tolist() == [1, 1]
    device = choose_device("cpu")[0]
    for missing, way in ((("sample",), {"sample": "host", "accept": "host"}), (("accept",), {"accept": "host"})):
        backend = Refusing(device, refused=missing)
        final, after, _, paths = decide(backend, logits, work, pending)
        backend.close()
        assert final == want and after.tolist() == pending.tolist()
        assert set(paths) == {(op, way.get(op, "kernel")) for op in ("sample", "accept")}


def test_a_block_longer_than_the_ops_take_goes_to_the_host(kernels):
    logits = np.random.default_rng(0).standard_normal((1, 17, 50), dtype=np.float32)
    answers = logits[0].argmax(-1).tolist()
    final, _, _, paths = decide(kernels, logits, [LaneRows(0, 0, [3, *answers[:16]])], np.zeros(1, np.int32))
    assert final == [answers] and paths == {("sample", "host"): 1, ("accept", "host"): 1}


def test_no_finite_logits_is_no_token(kernels):
    logits = np.full((1, 2, 10), np.nan, np.float32)
    final, after, _, _ = decide(kernels, logits, [LaneRows(0, 0, [3, 4])], np.array([2], np.int32))
    assert final == [[]] and after.tolist() == [0]
    assert list(drawn(logits[0], SamplingParams(), 0)) == [-1, -1]


def test_sampling_column():
    words = column(SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.25, seed=2**63 + 5))
    assert words.dtype == np.int32 and words[:2].view(np.uint64)[0] == 2**63 + 5
    assert words[2:3].view(np.float32)[0] == 0.5 and words[3] == 7
    assert words[4:6].view(np.float64)[0] == 0.9
    assert words[6:7].view(np.float32)[0] == np.float32(np.log(0.25)) and words[7] == 0
    off = column(SamplingParams())
    assert off[:4].tolist() == [0, 0, 0, 0] and off[6:7].view(np.float32)[0] == -np.inf
    assert column(SamplingParams()) is off, "an equal column is the same array, which is not sent twice"


# -- whole engines -----------------------------------------------------------------------------------------------------


def texts(pair: Any, *missing: str) -> tuple[list[Any], dict[str, Any]]:
    """Tokens and acceptance by prompt, sampler and speculation, and the engine's stats; kernels `missing`."""
    with refused(*missing), Engine.load(pair.target, pair.draft, device="cpu", n_ctx=96, threads=1) as engine:
        found = [
            (r.tokens, r.accepted_per_position)
            for prompt in PROMPTS
            for params in SAMPLERS[:2]
            for speculate in (True, False)
            for r in [engine.generate(prompt, params, max_tokens=20, ignore_eos=True, speculate=speculate)]
        ]
        return found, engine.stats()


def prompt_logits(pair: Any, *missing: str) -> Any:
    """Logits [8, V] of a block behind a prompt."""
    with refused("sample", *missing), Engine.load(pair.target, pair.draft, device="cpu", n_ctx=96, threads=1) as engine:
        engine._cache.open(0, 96)
        engine._round.advance([LaneRows(0, 0, PROMPTS[3])], 64)
        return logits_of(engine._round, [LaneRows(0, len(PROMPTS[3]), PROMPTS[2])])[0]


@pytest.fixture(scope="module")
def exact_pair(tmp_path_factory):
    """F32 matrices: no activation is rounded, so ways that sum in another order differ in the last bits only."""
    return Pair(*TinyPair(rigged=True).typed("F32").write(tmp_path_factory.mktemp("exact")))


@pytest.fixture(scope="module")
def expected(exact_pair):
    found, stats = texts(exact_pair, "none")
    assert stats["paths"].pop("mul_mat").keys() == {"composed"}  # the kernel takes no F32
    assert set(stats["paths"]) == set(OF_A_ROUND) - {"mul_mat"}
    assert all(set(uses) == {"kernel"} for uses in stats["paths"].values())
    assert stats["graphs"]["builds"] > 3 and stats["memory"]["cache"] > 0
    return found


def test_all_composed(exact_pair, expected):
    found, stats = texts(exact_pair)
    assert found == expected
    ways = {op: {"composed"} for op in OF_A_ROUND} | {"sample": {"host"}, "accept": {"host"}}
    assert {op: set(uses) for op, uses in stats["paths"].items()} == ways


@pytest.mark.parametrize("op", OF_A_ROUND)
def test_each_op_without_its_kernel(exact_pair, expected, op):
    found, stats = texts(exact_pair, op)
    assert found == expected
    assert "kernel" not in stats["paths"][op]


@pytest.mark.parametrize("missing", [("mul_mat",), FAMILY], ids=["product", "all"])
def test_quantised_weights_without_kernels(tiny_pair, random_pair, missing):
    """In front of a product with quantised weights activations are rounded, by ggml to 8 bits, by our kernel to 16 or
    12. A last bit that a composed op has otherwise can move a step there, so tokens may part at near ties and logits
    are compared. The promise holds either way: the same tokens with and without speculation."""
    for pair in (tiny_pair, random_pair):
        found, stats = texts(pair, *missing)
        assert stats["paths"]["mul_mat"].keys() == {"composed"}
        for with_draft, without in zip(found[::2], found[1::2], strict=True):
            assert with_draft[0] == without[0]
    assert distance(prompt_logits(tiny_pair), prompt_logits(tiny_pair, *missing)) < 1e-3  # 3e-4, as upstream's own


def test_quantised_weights_with_the_own_product(tiny_pair):
    """All ops but the product composed: activations are rounded finely, what moves is small."""
    missing = [op for op in FAMILY if op != "mul_mat"]
    assert distance(prompt_logits(tiny_pair), prompt_logits(tiny_pair, *missing)) < 1e-7  # 5e-9


def distance(a: Any, b: Any) -> float:
    """Normalised mean square error."""
    return float(np.sum((a - b) ** 2) / np.sum(a**2))


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"top_k": 9}, "composed"),
        ({"codebooks": "Q4_0"}, "composed"),
        ({"codebooks": "F16", "top_k": 8, "rank": 24}, "kernel"),
        ({"codebooks": "BF16", "top_k": 5}, "kernel"),
        ({"dflash2": False, "block": 6}, "kernel"),
    ],
    ids=str,
)
def test_rank_and_top_k_of_the_file(tmp_path, options, way):
    target, draft = TinyPair(rigged=True, **options).write(tmp_path)
    runs = []
    for missing in ((), DECISIONS):
        with (
            refused(*missing or ("none",)),
            Engine.load(target, draft, device="cpu", n_ctx=96, threads=1) as engine,
        ):
            runs.append(engine.generate(PROMPTS[2], max_tokens=24, ignore_eos=True))
            plain = engine.generate(PROMPTS[2], max_tokens=24, ignore_eos=True, speculate=False)
            assert plain.tokens == runs[-1].tokens
            assert engine.paths["select"] == {"composed" if missing else way: 1}
            assert missing or way == "kernel" or "select: " in engine.refusals["select"]
    assert runs[0].accepted_per_position == runs[1].accepted_per_position


@pytest.mark.parametrize("missing", [("none",), DECISIONS], ids=["device", "host"])
def test_logits_that_are_not_finite_end_the_request(tmp_path, missing):
    pair = TinyPair()
    model = pair.target()
    model.tensors["output_norm.weight"] = ("F32", np.full(pair.n_embd, np.nan, np.float32))
    target, draft = model.write(tmp_path / "target.gguf"), pair.draft().write(tmp_path / "draft.gguf")
    with refused(*missing), Engine.load(target, draft, device="cpu", n_ctx=64, threads=1) as engine:
        for _ in range(2):  # the engine stays usable: the second request says the same
            with pytest.raises(DeviceError, match="logits at position 2 are not finite"):
                engine.generate([5, 6])


# -- lanes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [("none",), ("sample",), FAMILY], ids=["kernels", "host", "composed"])
def test_lanes_of_a_round_do_not_see_each_other(tiny_pair, missing):
    """Two lanes in permuted slots, different samplers, a padded one between them and in some rounds fewer rows in one:
    the tokens and counts that each has alone."""
    with refused(*missing):
        loaded = load(tiny_pair.target, tiny_pair.draft, "cpu", 1, False)
    m = loaded.models
    prompts, params = ([5, 17, 300, 42], [8, 99, 123]), (SamplingParams(), SAMPLERS[1])
    cache = LaneCache(loaded.backend, m.target, m.draft, n_ctx=96, slots=4, block=m.block, piece=64, kv_type=Type.F16)
    rounds = Round(loaded.backend, m, cache)
    slots = {"together": (2, 0), "alone": (3, 1)}
    tokens: dict[str, list[list[int]]] = {name: [list(p) for p in prompts] for name in slots}
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in slots}
    for pair in slots.values():
        for slot, prompt in zip(pair, prompts, strict=True):
            cache.open(slot, 96)
            rounds.advance([LaneRows(slot, 0, prompt[:-1])], 8)
    padded = LaneRows(-1, 0, [])
    for n in range(5):
        for name, pair in slots.items():
            groups = [(0, None, 1)] if name == "together" else [(0,), (1,)]
            for group in groups:
                bases = [0 if i is None else len(tokens[name][i]) - 1 for i in group]
                work = [
                    padded if i is None else LaneRows(pair[i], b, tokens[name][i][b:], params[i])
                    for i, b in zip(group, bases, strict=True)
                ]
                work = [
                    dataclasses.replace(item, tokens=[*item.tokens, *p[: m.block - 1 - (i == 1) * n]])
                    for i, item, p in zip(group, work, rounds.propose(work), strict=True)
                ]
                for i, final in zip(group, rounds.verify(work), strict=True):
                    if i is None:
                        assert final == []
                        continue
                    tokens[name][i] += final
                    counts[name].append((i, len(final)))
                    assert cache.recurrent.pending.get().ravel()[pair[i]] == len(final)
                    assert cache.recurrent.pending_rows[pair[i]] == len(final)
                    if missing == ("none",):
                        assert cache.recurrent.anchors.get().ravel()[pair[i]] == final[-1]
    assert tokens["together"] == tokens["alone"] and counts["together"] == counts["alone"]
    assert sum(n for _, n in counts["alone"]) > 12
    rounds.close()
    cache.close()
    loaded.resources.close()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((1, 4), "slot of lane 1: 4 given; expected 0..3"),
        ((-1, 2), "slot of lane 0: -1 given; expected 0..3"),
        ((2, 2), "slot of lane 1: 2 given; expected a slot that no other lane of the run has"),
    ],
)
def test_wrong_slots_are_refused_before_a_launch(tiny_pair, slots, message):
    loaded = load(tiny_pair.target, tiny_pair.draft, "cpu", 1, False)
    m = loaded.models
    cache = LaneCache(loaded.backend, m.target, m.draft, n_ctx=96, slots=4, block=m.block, piece=64, kv_type=Type.F16)
    rounds = Round(loaded.backend, m, cache)
    for slot in range(4):
        cache.open(slot, 96)
    rounds.advance([LaneRows(1, 0, [5, 17])], 8)
    states = [state.get() for state in cache.recurrent.state.values()]
    work = [LaneRows(slot, 2, [7] * m.block) for slot in slots]
    for run in (rounds.verify, rounds.propose, lambda rows: rounds.advance(rows, 8)):
        with pytest.raises(RequestError) as error:
            run(work)
        assert str(error.value) == message
    with pytest.raises(RequestError, match=f"pending rows: {m.block + 1} given; expected 0..{m.block}"):
        cache.recurrent.set_pending(1, m.block + 1)
    assert all(np.array_equal(a, b.get()) for a, b in zip(states, cache.recurrent.state.values(), strict=True))
    for resource in (rounds, cache, loaded.resources):
        resource.close()


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_refused_nodes_stay_outside_the_graph(composed):
    with Graph(composed) as g:
        w, x = g.input("w", Type.Q8_0, 256, 8), g.input("x", Type.F32, 256, 3)
        g.output(g.product(w, x), "y")
        g.build()
        assert dict(g.nodes) == {"MUL_MAT": 1}
        assert g.paths == {("mul_mat", "composed"): 1}
        assert g.refusals == {"mul_mat": "mul_mat: the device has no kernel"}


def test_composed_prefill_goes_in_short_pieces(tiny_pair):
    with refused("gdn_advance"), Engine.load(tiny_pair.target, device="cpu", n_ctx=96, threads=1) as engine:
        engine.generate(PROMPTS[3], max_tokens=1)
        assert list(engine._round._advance._kept) == [(1, COMPOSED_ROWS)]


def test_kernels_ask_for_no_row_numbers(tiny_pair):
    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=96, threads=1) as engine:
        engine.prepare()
        shapes = (engine._round._verify, engine._round._advance, engine._round._propose)
        asked = [set(shape.batch.asked._asked) for kept in shapes for shape in kept._kept.values()]
        assert asked == [{"sampling"}, {"sampling"}, set(), {"sampling"}]


# -- what no op takes --------------------------------------------------------------------------------------------------


def test_decay_per_channel_is_refused(tmp_path):
    """The gated delta rule has one decay a head; a file with one a key channel names its tensor."""
    pair = TinyPair(n_vocab=320).typed("F16")
    for name in ("ssm_alpha.weight", "ssm_a", "ssm_dt.bias"):
        model = pair.target()
        shape = (pair.n_embd,) * name.startswith("ssm_alpha") + (pair.n_v_heads * pair.state_size,)
        model.reshape(f"blk.0.{name}", *shape)
        expected = rf"\[{pair.n_embd}, {pair.n_v_heads}\]" if len(shape) == 2 else rf"\[{pair.n_v_heads}\]"
        error = refusal(load_target, model, tmp_path, f"blk.0.{name}", str(shape[-1]), expected)
        assert error.reason == "tensor has the wrong shape"
