"""Which way each op goes, and that the way does not show in the tokens."""

from __future__ import annotations

from typing import Any
from unittest import mock

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
from pyllama_dflash.cache import LaneCache
from pyllama_dflash.ggml import Backend, Graph, Tensor, Type, choose_device
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.host_path import accepted, drawn, walk
from pyllama_dflash.lane_rows import GREEDY, LaneRows
from pyllama_dflash.loader import Loaded, load
from pyllama_dflash.models.qwen35 import Qwen35Params
from pyllama_dflash.round import COMPOSED_ROWS, Round, read_lattices
from pyllama_dflash.sampling import column
from pyllama_dflash.shapes import ShapeKey

PROMPTS = [[5], [5, 17], list(range(20, 28)), [(7 * i) % 500 for i in range(40)]]
SAMPLERS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=2**64 - 1),
    SamplingParams(temperature=0.5, top_p=0.3, seed=3),
]
BIASED = [params.replaced(logit_bias={80: -np.inf, 65: 0.75, 300: -2.0}) for params in SAMPLERS[:2]]
PENALISED = [params.replaced(repetition_penalty=1.3, presence_penalty=0.4) for params in BIASED]
ON_THE_HOST = ("place", "penalise", "sample", "accept")

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
    work = [LaneRows(i, 10 * i, rows + 1, params) for i in range(lanes)]
    tokens = np.repeat(np.array(anchors), rows + 1).reshape(lanes, rows + 1)

    def run(backend: Backend) -> tuple[list[list[int]], Any]:
        with OpRun(backend, Lanes(tuple(range(lanes)), rows + 1)) as run:
            edges = None
            if rank:
                books = (run.source(x, kind, raw=raw) for x, raw in ((before, raw_before), (after, raw_after)))
                edges = (run.source(gate), *books)
            chosen = family.select(run.graph, run.batch, run.source(logits), edges, top_k)
            if isinstance(chosen, Tensor):
                block = run.result(run.graph.output(chosen, "block"), work, tokens).reshape(lanes, rows + 1).tolist()
                assert [row[0] for row in block] == anchors
                return [row[1:] for row in block], dict(run.graph.paths)
            run.result(chosen.ids, work, tokens)
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


# -- penalise, sample and accept ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_pair):
    """What a cache has to know of a target."""
    with GGUFFile(tiny_pair.target) as file:
        return Qwen35Params.from_file(file)


class Decisions:
    """The end of a verify graph on given logits [L, T, V]; the lanes are at `base` of `slots`, behind any text."""

    N_SLOTS, CONTEXT = 5, 320

    def __init__(self, logits: Any, slots: tuple[int, ...], base: tuple[int, ...], params: SamplingParams) -> None:
        self.logits = logits
        self.rows = logits.shape[1]
        self.work = [LaneRows(slot, at, self.rows, params) for slot, at in zip(slots, base, strict=True)]
        text = np.random.default_rng(self.rows).integers(0, logits.shape[2], (len(slots), self.CONTEXT))
        self.text = [row[: at + 1].tolist() for row, at in zip(text, base, strict=True)]
        self.proposals: list[list[int]] = [[] for _ in slots]

    def answers(self, lane: int) -> list[int]:
        """The token of each row when every row's token is the next row's input."""
        item, seen = self.work[lane], np.array([*self.text[lane], *[0] * self.rows], np.int32)
        found = []
        for token in drawn(self.logits[lane], item.params, item.base, seen):  # row t + 1 is drawn behind row t's token
            found.append(token)
            seen[item.base + len(found)] = max(0, token)
        return found

    def run(self, backend: Backend, target: Qwen35Params, pending: Any, *, as_node: bool = False) -> Any:
        """Final tokens; pending, bases and histories on the device behind them; paths. `as_node`: the block is a node
        of the graph, which no history holds, as behind a draft."""
        lanes, history = len(self.work), np.zeros((self.N_SLOTS, self.CONTEXT), np.int32)
        cache = LaneCache(
            backend, target, None, n_ctx=self.CONTEXT, slots=self.N_SLOTS, block=self.rows, piece=8, kv_type=Type.F32
        )
        for item, text, proposals in zip(self.work, self.text, self.proposals, strict=True):
            cache.open(item.slot, text, item.params)
            cache.history.set_base(item.slot, item.base)
            cache.history.put(item.slot, item.base + 1, [] if as_node else proposals)
            history[item.slot, : len(text)] = text
        cache.recurrent.pending.set(pending)
        blocks = np.array([[text[-1], *p] for text, p in zip(self.text, self.proposals, strict=True)], np.int32)
        with OpRun(backend, Lanes(tuple(item.slot for item in self.work), self.rows)) as run:
            g = run.graph
            block = g.cont(run.source(blocks)) if as_node else None
            logits = g.cont(run.source(self.logits.reshape(lanes * self.rows, -1)))
            answer = answer_of(g, run.batch, cache, block, logits)
            run.result(answer.node, self.work, blocks)
            found = answer.read(self.work)
            behind = [x.get().reshape(self.N_SLOTS, -1) for x in (cache.history.base, cache.history.history)]
            behind = [cache.recurrent.pending.get().ravel(), behind[0].ravel(), behind[1]]
            paths = dict(g.paths)
        cache.close()
        return found, *behind, paths


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("params", [*SAMPLERS, *PENALISED], ids=lambda p: f"T{p.temperature}-r{p.repetition_penalty}")
def test_decisions(kernels, target, rows, params):
    rng = np.random.default_rng(rows)
    logits = rng.standard_normal((3, rows, 700), dtype=np.float32) * 3
    logits[:, :, 6] = logits.max(-1)  # ties
    slots, base = (4, 0, 2), (0, 9, 200)
    case = Decisions(logits, slots, base, params)
    answers = [case.answers(i) for i in range(3)]
    if rows > 2:
        logits[2, 2, 3] = np.nan  # ends lane 2's block behind two rows
        answers[2] = [*answers[2][:2], *[-1] * (rows - 2)]
    case.proposals = [answers[i][: rows - 1] for i in range(3)]
    if rows > 1:
        case.proposals[1] = [answers[1][0], *[1] * (rows - 2)] if rows > 2 else [0]
        case.proposals[2] = [max(0, token) for token in case.proposals[2]]
    want = [accepted(tokens, p) for tokens, p in zip(answers, case.proposals, strict=True)]
    assert [len(final) for final in want] == [rows, min(rows, 2) if rows != 2 else 1, min(rows, 2)]
    pending = np.full(5, 1, np.int32)
    for as_node in (False, True):
        final, after, bases, history, paths = case.run(kernels, target, pending, as_node=as_node)
        assert paths == {(op, "kernel"): 1 for op in ("penalise", "sample", "accept")}
        assert final == want
        for i, slot in enumerate(slots):
            assert (after[slot], bases[slot]) == (len(want[i]), base[i] + len(want[i]))
            assert history[slot, : bases[slot] + 1].tolist() == [*case.text[i], *want[i]]
        assert after[[1, 3]].tolist() == [1, 1] and not history[[1, 3]].any()
    ways = {"penalise": ON_THE_HOST, "sample": ON_THE_HOST, "accept": ("accept",)}
    for missing, on_the_host in ways.items():
        backend = Refusing(choose_device("cpu")[0], refused=[missing])
        for as_node in (False, True):
            final, after, bases, _, paths = case.run(backend, target, pending, as_node=as_node)
            assert final == want and after.tolist() == pending.tolist()
            assert bases[list(slots)].tolist() == list(base), "the host says what is final, see Round"
            assert set(paths) == {
                (op, "host" if op in on_the_host else "kernel") for op in ("penalise", "sample", "accept")
            }
        backend.close()


def test_a_block_longer_than_the_ops_take_goes_to_the_host(kernels, target):
    logits = np.random.default_rng(0).standard_normal((1, 17, 50), dtype=np.float32)
    case = Decisions(logits, (0,), (0,), GREEDY)
    answers = logits[0].argmax(-1).tolist()
    case.proposals = [answers[:16]]
    final, *_, paths = case.run(kernels, target, np.zeros(5, np.int32))
    assert final == [answers] and paths == {(op, "host"): 1 for op in ("penalise", "sample", "accept")}


def test_no_finite_logits_is_no_token(kernels, target):
    logits = np.full((1, 2, 10), np.nan, np.float32)
    case = Decisions(logits, (0,), (0,), GREEDY)
    case.proposals = [[4]]
    final, after, bases, _, _ = case.run(kernels, target, np.array([2, 0, 0, 0, 0], np.int32))
    assert final == [[]] and after[0] == 0 and bases[0] == 0
    assert list(drawn(logits[0], SamplingParams(), 0, np.zeros(2, np.int32))) == [-1, -1]


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


def texts(pair: Any, *missing: str, samplers: Any = SAMPLERS[:2]) -> tuple[list[Any], dict[str, Any]]:
    """Tokens and acceptance by prompt, sampler and width, 8 and 1, and the engine's stats; kernels `missing`."""
    with refused(*missing), Engine.load(pair.target, pair.draft, device="cpu", n_ctx=96, threads=1) as engine:
        found = [
            (r.tokens, r.accepted_per_position)
            for prompt in PROMPTS
            for params in samplers
            for width in (8, 1)
            for r in [engine.generate(prompt, params, max_tokens=20, ignore_eos=True, width=width)]
        ]
        return found, engine.stats()


def prompt_logits(pair: Any, *missing: str) -> Any:
    """Logits [8, V] of a block behind a prompt."""
    with refused("sample", *missing), Engine.load(pair.target, pair.draft, device="cpu", n_ctx=96, threads=1) as engine:
        engine._cache.open(0, PROMPTS[3], GREEDY)
        engine._cache.grow(0, 96)
        engine._round.advance(LaneRows(0, 0, len(PROMPTS[3])), 64)
        return logits_of(engine._round, 0, len(PROMPTS[3]), PROMPTS[2])


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
    ways = {op: {"composed"} for op in OF_A_ROUND} | {op: {"host"} for op in ON_THE_HOST}
    assert {op: set(uses) for op, uses in stats["paths"].items()} == ways


@pytest.mark.parametrize("op", OF_A_ROUND)
def test_each_op_without_its_kernel(exact_pair, expected, op):
    found, stats = texts(exact_pair, op)
    assert found == expected
    assert "kernel" not in stats["paths"][op]


@pytest.fixture(scope="module")
def penalised(tiny_pair):
    """With penalties and biases, all by kernels: both are felt, and the same with and without speculation."""
    found, stats = texts(tiny_pair, "none", samplers=PENALISED)
    assert all(set(uses) == {"kernel"} for op, uses in stats["paths"].items() if op != "mul_mat")
    assert all(with_draft[0] == without[0] for with_draft, without in zip(found[::2], found[1::2], strict=True))
    assert sum(sum(with_draft[1]) for with_draft in found[::2]) > 0, "no proposal was ever accepted"
    free, biased = (texts(tiny_pair, "none", samplers=samplers)[0] for samplers in (SAMPLERS[:2], BIASED))
    assert all(80 in tokens for tokens, _ in free) and not any(80 in tokens for tokens, _ in (*biased, *found))
    greedy = [n for n in range(len(found)) if n % 4 < 2]
    assert any(found[n][0] != biased[n][0] for n in greedy), "no penalty was felt"
    return found


@pytest.mark.parametrize("missing", [(op,) for op in ("select", *ON_THE_HOST)] + [("place", "penalise")], ids="-".join)
def test_penalties_on_the_host(tiny_pair, penalised, missing):
    """What the host adjusts, places, draws or compares is what the kernels do: tokens and acceptance."""
    found, stats = texts(tiny_pair, *missing, samplers=PENALISED)
    assert found == penalised
    for op in missing:
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
            runs.append(engine.generate(PROMPTS[2], max_tokens=24, ignore_eos=True, width=8))
            plain = engine.generate(PROMPTS[2], max_tokens=24, ignore_eos=True, width=1)
            assert plain.tokens == runs[-1].tokens
            drafts = [key for key in engine._round.shapes.keys if key.kind == "round"]
            assert engine.paths["select"] == {"composed" if missing else way: len(drafts)}
            assert max(key.rows for key in drafts) == options.get("block", 8)
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


class Opened:
    """A pair with a cache of four slots and its rounds."""

    def __init__(self, loaded: Loaded) -> None:
        m = loaded.models
        self.block = m.block
        self.cache = LaneCache(
            loaded.backend, m.target, m.draft, n_ctx=96, slots=4, block=m.block, piece=64, kv_type=Type.F16
        )
        self.rounds = Round(loaded.backend, m, self.cache)
        self._loaded = loaded

    def start(self, slot: int, prompt: list[int], params: SamplingParams) -> None:
        """A request in `slot`, prefilled but for its anchor."""
        self.cache.open(slot, prompt, params)
        self.cache.grow(slot, 96)
        self.rounds.advance(LaneRows(slot, 0, len(prompt) - 1, params), 8)

    def close(self) -> None:
        for resource in (self.rounds, self.cache, self._loaded.resources):
            resource.close()


@pytest.fixture
def opened(tiny_pair):
    made: list[Opened] = []

    def make(*missing: str) -> Opened:
        with refused(*missing):
            made.append(Opened(load(tiny_pair.target, tiny_pair.draft, "cpu", 1, False)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "missing",
    [("none",), ("place",), ("select",), ("penalise",), ("sample",), FAMILY],
    ids=["kernels", "place", "select", "penalise", "host", "composed"],
)
def test_lanes_of_a_round_do_not_see_each_other(opened, missing):
    """Two lanes in permuted slots, different samplers, a padded one between them and in some rounds fewer rows in one:
    the tokens and counts that each has alone."""
    pair = opened(*missing)
    recurrent, history, rounds = pair.cache.recurrent, pair.cache.history, pair.rounds
    prompts, params = ([5, 17, 300, 42], [8, 99, 123]), (SamplingParams(), PENALISED[1])
    slots = {"together": (2, 0), "alone": (3, 1)}
    tokens: dict[str, list[list[int]]] = {name: [list(p) for p in prompts] for name in slots}
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in slots}
    for own in slots.values():
        for slot, prompt, p in zip(own, prompts, params, strict=True):
            pair.start(slot, prompt, p)
    padded = LaneRows(-1, 0, 0)
    for n in range(5):
        for name, own in slots.items():
            for group in [(0, None, 1)] if name == "together" else [(0,), (1,)]:
                work = [
                    padded if i is None
                    else LaneRows(own[i], len(tokens[name][i]) - 1, pair.block - (i == 1) * n, params[i])
                    for i in group
                ]  # fmt: skip
                for i, final in zip(group, rounds.run(work), strict=True):
                    if i is None:
                        assert final == []
                        continue
                    tokens[name][i] += final
                    counts[name].append((i, len(final)))
                    slot, length = own[i], len(tokens[name][i])
                    assert recurrent.pending.get().ravel()[slot] == recurrent.pending_rows[slot] == len(final)
                    assert history.base.get().ravel()[slot] == history.bases[slot] == length - 1
                    assert history.history.get().reshape(4, -1)[slot, :length].tolist() == tokens[name][i]
                    assert history.tokens[slot, :length].tolist() == tokens[name][i]
    assert tokens["together"] == tokens["alone"] and counts["together"] == counts["alone"]
    assert sum(n for _, n in counts["alone"]) > 12


@pytest.mark.parametrize("missing", [("none",), FAMILY], ids=["kernels", "composed"])
def test_a_round_is_a_draft_and_a_verify(opened, missing):
    """What one graph does is what the proposals give when the histories hold them and the target alone runs."""
    pair = opened(*missing)
    whole, parts, params = 2, 1, SAMPLERS[1]
    for slot in (whole, parts):
        pair.start(slot, PROMPTS[2], params)
    base = len(PROMPTS[2]) - 1
    for _ in range(4):
        work = [LaneRows(slot, base, pair.block, params) for slot in (whole, parts)]
        (final,) = pair.rounds.run(work[:1])
        pair.cache.history.put(parts, base + 1, [*final, *[0] * pair.block][: pair.block - 1])
        (again,) = pair.rounds.verify(work[1:])
        assert again[: len(final)] == final
        pair.cache.recurrent.set_pending(parts, len(final))
        pair.cache.history.set_base(parts, base + len(final))
        base += len(final)
        n, memory = len(final), pair.cache.recurrent
        for tensors, rows, final_rows in (
            (memory.state, 1, 1), (memory.log, pair.block, n), (memory.rows, 3 + pair.block, 3 + n)
        ):  # fmt: skip
            for tensor in tensors.values():
                a, b = tensor.get().reshape(4, rows, -1)[[whole, parts], :final_rows]
                assert a.tobytes() == b.tobytes()
    assert {key.kind for key in pair.rounds.shapes.keys} == {"advance", "verify", "round"}


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((1, 4), "slot of lane 1: 4 given; expected 0..3"),
        ((-1, 2), "slot of lane 0: -1 given; expected 0..3"),
        ((2, 2), "slot of lane 1: 2 given; expected a slot that no other lane of the run has"),
    ],
)
def test_wrong_slots_are_refused_before_a_launch(opened, slots, message):
    pair = opened("none")
    for slot in range(4):
        pair.start(slot, [5, 17, 7], GREEDY)
    memory = [*pair.cache.recurrent.state.values(), pair.cache.history.history, pair.cache.history.base]
    before = [tensor.get() for tensor in memory]
    work = [LaneRows(slot, 2, pair.block) for slot in slots]
    for run in (pair.rounds.verify, pair.rounds.run):
        with pytest.raises(RequestError) as error:
            run(work)
        assert str(error.value) == message
    for slot in (-1, 4):
        with pytest.raises(RequestError, match=f"slot of lane 0: {slot} given; expected 0..3"):
            pair.rounds.advance(LaneRows(slot, 2, 3), 8)
    with pytest.raises(RequestError, match=f"pending rows: {pair.block + 1} given; expected 0..{pair.block}"):
        pair.cache.recurrent.set_pending(1, pair.block + 1)
    assert all(np.array_equal(a, b.get()) for a, b in zip(before, memory, strict=True))


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
        pieces = [key for key in engine._round.shapes.keys if key.kind == "advance"]
        assert pieces == [ShapeKey("advance", 1, COMPOSED_ROWS, feeds=False)]


def test_kernels_ask_for_no_row_numbers(tiny_pair):
    with Engine.load(tiny_pair.target, tiny_pair.draft, device="cpu", n_ctx=96, threads=1) as engine:
        engine.prepare()
        asked = {key.kind: set(shape.batch.asked._asked) for key, shape in engine._round.shapes._kept.items()}
        assert asked == {"advance": set(), "verify": {"sampling"}, "round": {"sampling"}}
        assert all(shape.batch.places.given is None for shape in engine._round.shapes._kept.values())


def test_a_round_of_the_same_lanes_sends_nothing(opened):
    """The device knows tokens, positions, anchors and counts of the next round by itself."""
    pair = opened("none")
    slots, base = (2, 0), {}
    for slot in slots:
        pair.start(slot, PROMPTS[2], GREEDY)
        base[slot] = len(PROMPTS[2]) - 1
    sent = []
    for _ in range(4):
        with mock.patch.object(Tensor, "set", autospec=True, side_effect=Tensor.set) as send:
            final = pair.rounds.run([LaneRows(slot, base[slot], pair.block) for slot in slots])
        sent.append(send.call_count)
        for slot, tokens in zip(slots, final, strict=True):
            base[slot] += len(tokens)
    assert sent == [4, 0, 0, 0], "a constant at the build, slots, live rows and how they draw; then nothing"


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
