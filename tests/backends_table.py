"""Writes docs/backends.md: python tests/backends_table.py > docs/backends.md

Everything in its tables is asked of the predicate that the backends' supports_op is; no limit is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from backend_nodes import BACKENDS, guard_accepts, supported

from pyllama_dflash._native import ffi, lib

SHOWN = {
    "CPU": "run in CI: every op against a reference in double, x86-64 with AVX2",
    "CUDA": "compiled in CI for sm_75, sm_90 and sm_120; run on an H200",
    "HIP": "compiled in CI for gfx1100, gfx1201 and gfx942, not run; the same files as CUDA's",
    "SYCL": "run in CI on SYCL's CPU device, never on a GPU",
}

# What the engine does where a kernel is refused.
INSTEAD = {"mul_mat": "ggml's own product", "select": "composed scores, walk on the host", "sample": "host",
           "accept": "host", "place": "host", "penalise": "host"}  # fmt: skip
COMPOSED = "composed of ggml's ops"

# Per sub-op: what it is called in ggml_patches/README.md, and the sizes that have to hold beside it.
Parameter = tuple[str, str, dict[str, int]]
LANES: Parameter = ("lanes L", "L", {})
SLOTS: Parameter = ("slots N", "N", {})
HISTORY: Parameter = ("positions of a slot's history", "positions", {})
PARAMETERS: dict[str, list[Parameter]] = {
    "gdn_verify": [("state width S", "S", {}), ("value heads Hv", "Hv", {}), ("key heads Hk of 6", "Hk", {}),
                   ("rows T of B = 16", "T", {}), ("rows T of B = 5", "T", {"B": 5}), ("block B", "B", {"T": 1}),
                   LANES, SLOTS],
    "gdn_advance": [("state width S", "S", {}), ("value heads Hv", "Hv", {}), ("rows T", "T", {}), LANES, SLOTS],
    "gdn_commit": [("state width S", "S", {}), ("value heads Hv", "Hv", {}), ("block B", "B", {}), LANES, SLOTS],
    "conv_verify": [("channels C", "C", {}), ("rows T of B = 16", "T", {}), ("block B", "B", {"T": 1}), LANES, SLOTS],
    "conv_advance": [("channels C", "C", {}), ("rows T", "T", {}), LANES, SLOTS],
    "conv_commit": [("channels C", "C", {}), ("block B", "B", {}), LANES, SLOTS],
    "attention": [("head width D", "D", {"k_type": lib.GGML_TYPE_F32, "v_type": lib.GGML_TYPE_F32}),
                  ("query heads of a kv head", "Hq", {"Hkv": 1}), ("kv heads Hkv", "Hkv", {}),
                  ("types of k_pages", "k_type", {}), ("types of v_pages", "v_type", {}), ("rows T", "T", {}),
                  LANES, SLOTS, ("pages P", "pages", {}), ("pages of a slot", "max_pages", {}),
                  ("window", "window", {}), ("causal", "causal", {})],
    "mul_mat": [("types of w", "w_type", {}), ("weights of a row K", "K", {}), ("rows of weights M", "M", {}),
                ("rows T", "T", {}), LANES],
    "dynamic_conv": [("channels E", "C", {"G": 1}), ("groups G of 48", "G", {}), ("taps K", "taps", {}),
                     ("rows T", "T", {}), LANES],
    "select": [("vocabulary V with top_k 4", "V", {"edges": False}), ("rows P", "P", {}), ("top_k", "top_k", {}),
               ("rank R", "R", {}), ("types of predecessor", "predecessor_type", {}),
               ("types of successor", "successor_type", {}), ("edge scores", "edges", {}), LANES],
    "sample": [("vocabulary V", "V", {}), ("rows T", "T", {}), LANES],
    "accept": [("rows T", "T", {}), HISTORY, LANES, SLOTS],
    "place": [("rows T", "rows", {}), HISTORY, ("pages of a slot", "max_pages", {}),
              ("pages of a slot's ring, 0 without", "ring_pages", {}), ("fill, besides -1", "fill", {}),
              ("first spare row", "spare", {}), LANES, SLOTS],
    "penalise": [("vocabulary V", "V", {}), ("rows T", "T", {}), HISTORY, ("biases of a slot", "biases", {}), LANES,
                 SLOTS],
}  # fmt: skip

SCANNED = 640  # every number up to here is asked; beyond, only the upper end is looked for
STEPS = {"K": 32}  # rows of a quantised type that can be made at all


def numbers(accepts: Callable[[int], bool], step: int = 1) -> str:
    """The accepted numbers from 0 on, multiples of `step`: as a range, a list, or the multiples of something."""
    taken = [n for n in range(0, SCANNED * step, step) if accepts(n)]
    if not taken:
        return "none"
    gaps = {b - a for a, b in pairwise(taken)}
    if len(gaps) == 1 and taken[-1] + min(gaps) >= SCANNED * step:  # regular to the end of the scan: find the end
        gap = min(gaps)
        last = _last(accepts, taken[-1], gap)
        return f"{taken[0]}..{last}" if gap == 1 else f"multiples of {gap} from {taken[0]} to {last}"
    return _runs(taken)


def _last(accepts: Callable[[int], bool], known: int, step: int) -> int:
    """The largest accepted number, by doubling and halving; everything below it is taken to be accepted too."""
    low, reach = known, step
    while low + reach < 1 << 31 and accepts(low + reach):
        low, reach = low + reach, 2 * reach
    while reach > step:
        reach //= 2
        low = low + reach if low + reach < 1 << 31 and accepts(low + reach) else low
    return low


def _runs(taken: list[int]) -> str:
    """1, 2, 3, 4, 12 -> 1..4, 12."""
    runs: list[list[int]] = []
    for n in taken:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def types(accepts: Callable[[int], bool]) -> str:
    """The accepted types among all of ggml's whose blocks fit rows of 256."""
    kinds = sorted({getattr(lib, name) for name in dir(lib) if name.startswith("GGML_TYPE_")} - {lib.GGML_TYPE_COUNT})
    return ", ".join(ffi.string(lib.ggml_type_name(kind)).decode() for kind in kinds if accepts(kind)) or "none"


def values(op: str, backend: int, field: str, beside: dict[str, int]) -> str:
    """What the backend accepts in one size, parameter or type of a sub-op."""

    def accepts(value: int) -> bool:
        together = {"Hq": value} if (op, field) == ("attention", "Hkv") else {}  # one query head for each
        return supported(op, backend, **{**beside, **together, field: value})

    if field.endswith("_type"):
        return types(accepts)
    if field == "edges":
        return " or ".join(text for value, text in ((1, "all three sources"), (0, "none")) if accepts(value))
    return numbers(accepts, STEPS.get(field, 1))


def accepted(op: str) -> Iterable[tuple[str, str]]:
    """Name and accepted values of every parameter; of each backend where they differ."""
    takers = [name for name, number in BACKENDS.items() if supported(op, number)]
    for label, field, beside in PARAMETERS[op]:
        by_backend = {name: values(op, BACKENDS[name], field, beside) for name in takers}
        if len(set(by_backend.values())) == 1:
            yield label, next(iter(by_backend.values()))
        else:
            yield label, "; ".join(f"{name} {text}" for name, text in by_backend.items())


def answer(op: str, backend: int) -> str:
    """Kernel, or what is done instead."""
    return "kernel" if supported(op, backend) else f"refused: {INSTEAD.get(op, COMPOSED)}"


def guard_row() -> str:
    """What our guard lets through to upstream's GATED_DELTA_NET."""

    def layout(change: Callable[[Any], None]) -> str:
        return "accepted" if guard_accepts(change) else "refused"

    def apart(source: int) -> Callable[[Any], None]:
        def change(node: Any) -> None:
            node.src[source].nb[2] += 64
            node.src[source].nb[3] = 3 * node.src[source].nb[2]

        return change

    def both_apart(node: Any) -> None:
        apart(0)(node)
        apart(1)(node)

    def second_parameter(node: Any) -> None:
        node.op_params[1] = 1

    gates = ", ".join(f"{text} {'accepted' if guard_accepts(S=32, gates=n) else 'refused'}"
                      for n, text in ((1, "one a head"), (32, "one a state row"), (16, "half as many")))  # fmt: skip
    facts = [
        f"width {_runs([n for n in range(1, 300) if guard_accepts(S=n)])}",
        f"snapshots {numbers(lambda n: guard_accepts(K=n))}",
        f"gates: {gates}",
        f"rows of q and k apart in the same way: {layout(both_apart)}, of k alone: {layout(apart(1))}",
        f"rows of g apart: {layout(apart(3))}",
        f"another parameter: {layout(second_parameter)}",
    ]
    return "; ".join(facts)


HEAD = """# Backends

Written by `python tests/backends_table.py`, which asks the predicate behind every backend's `supports_op`
(`ggml_dflash_supported`); `tests/test_backends_doc.py` compares. `pyllama-dflash doctor` says what it finds on the
machine and which device it takes; a device that was asked for is never replaced by another.
"""

AFTER_OPS = """
Where a kernel is refused the engine takes the way that is named here; `Graph.paths` counts which way each use took and
`Graph.refusals` says why. Where mul_mat is refused and rows must not depend on how many there are, each is a
product of its own ([numerics.md](numerics.md)). The portable CPU kernels give the same bits as those with
AVX2; on aarch64 they were cross-compiled once and never run.
"""

ACCEPTED = """
## What a kernel accepts

Sizes, parameters and types that are accepted when everything else of a node is valid; the same on every backend that
has the kernel unless it is said. Letters as in [ggml_patches/README.md](../ggml_patches/README.md).
"""

GUARD = """
## Guard of upstream's GATED_DELTA_NET

Upstream's `supports_op` of this op accepts more than its launchers run. Ours (`ggml_dflash_check_gated_delta_net`)
stands in front of it on CUDA, HIP and SYCL:
"""


def document() -> str:
    """The text of docs/backends.md."""
    lines = [HEAD, "| backend | how its kernels were shown to work |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in SHOWN.items()]
    lines += ["", "| sub-op | " + " | ".join(BACKENDS) + " |", "|---|" + "---|" * len(BACKENDS)]
    for op in PARAMETERS:
        lines.append(f"| `{op}` | " + " | ".join(answer(op, number) for number in BACKENDS.values()) + " |")
    lines += [AFTER_OPS.rstrip(), ACCEPTED, "| sub-op | accepted |", "|---|---|"]
    for op in PARAMETERS:
        lines.append(f"| `{op}` | " + "; ".join(f"{label}: {text}" for label, text in accepted(op)) + " |")
    lines += [GUARD, "| backend | accepted |", "|---|---|", f"| CUDA, HIP, SYCL | {guard_row()} |"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
