"""`pyllama-dflash info`: what a file holds, what it needs, and whether a pair fits together."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ..engine import DEFAULT_CONTEXT
from ..errors import RequestError
from ..ggml.dflash_ops import PAGE
from ..gguf_file import GGUFFile
from ..models import dflash
from ..models.dflash import DFlashParams
from ..models.pair import pair_report
from ..models.qwen35 import Qwen35Params
from ..pages import pages_for, ring_pages
from ..sampling import MAX_BIASES
from ..scheduler import PIECE

_KV_BYTES = 2  # F16, the engine's default


def report(paths: Sequence[str], n_ctx: int | None) -> tuple[str, bool]:
    """The text, and whether the pair fits (True when there is none).

    FileError for a file that cannot be used, RequestError for a wrong number of files or a wrong context.
    """
    target: tuple[Qwen35Params, GGUFFile] | None = None
    draft: tuple[DFlashParams, GGUFFile] | None = None
    lines: list[str] = []
    fits = True
    with contextlib.ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(GGUFFile(path))
            if file.text("general.architecture") in dflash.ARCHS:
                if draft:
                    raise RequestError("FILE", path, "at most one draft")
                draft = DFlashParams.from_file(file), file
            else:
                if target:
                    raise RequestError("FILE", path, "at most one target")
                target = Qwen35Params.from_file(file), file
            lines += [*_file_lines(file), ""]
        for about in (target and _target_lines(*target), draft and _draft_lines(draft[0])):
            lines += [*about, ""] if about else []
        if target:
            lines += [*_plan_lines(target, draft, n_ctx), ""]
        if target and draft:
            checks = pair_report(*target, *draft)
            fits = all(ok for _, ok, _ in checks)
            lines.append(f"the pair {'fits' if fits else 'does not fit'}")
            lines += [f"  {'ok ' if ok else 'NOT'} {what}: {detail}" for what, ok, detail in checks]
    return "\n".join(lines).rstrip(), fits


def _file_lines(file: GGUFFile) -> Iterator[str]:
    yield file.path
    name = file.text("general.name", "")
    yield f"  architecture  {file.text('general.architecture')}{f' ({name})' if name else ''}"
    yield f"  size          {_size(file.size)}, {len(file.tensors)} tensors, {_parameters(file)}"
    count: Counter[str] = Counter()
    size: dict[str, int] = defaultdict(int)
    for tensor in file.tensors.values():
        count[tensor.type_name] += 1
        size[tensor.type_name] += tensor.nbytes
    for kind in sorted(size, key=lambda kind: -size[kind]):
        yield f"  {kind:<12}  {count[kind]} tensors, {_size(size[kind])}"


def _target_lines(p: Qwen35Params, file: GGUFFile) -> Iterator[str]:
    yield "target"
    yield f"  layers        {sum(p.recurrent)} gated delta net, {p.n_layer - sum(p.recurrent)} full attention"
    if p.n_nextn:
        yield f"  not loaded    {p.n_nextn} multi-token-prediction block"
    yield f"  width         {p.n_embd}, feed-forward {p.n_ff}"
    yield f"  attention     {p.n_head} heads, {p.n_head_kv} for keys and values, {p.head_dim} wide"
    yield f"  delta net     {p.n_v_heads} value heads, {p.n_k_heads} key heads, state {p.state_size} x {p.state_size}"
    yield f"  vocabulary    {p.n_vocab} tokens, head {'tied to the embedding' if p.tied_head else 'of its own'}"
    yield f"  context       {p.context_length} positions in training"
    yield f"  chat template {'yes' if 'tokenizer.chat_template' in file else 'no'}"


def _draft_lines(p: DFlashParams) -> Iterator[str]:
    yield "draft"
    yield f"  kind          {p.kind}, blocks of {p.block_size}"
    yield f"  layers        {p.n_layer}, width {p.n_embd}, feed-forward {p.n_ff}"
    yield f"  attention     {p.n_head} heads, {p.n_head_kv} for keys and values, {p.head_dim} wide"
    yield f"  window        {p.window or 'none'}"
    yield f"  taps          before layers {', '.join(map(str, p.target_layers))} of the target"
    if p.is_dflash2:
        yield f"  convolution   kernel {p.conv_kernel}, groups of {p.conv_group}"
        yield f"  selector      rank {p.selector_rank}, {p.selector_top_k} candidates a row"


def cache_bytes(target: Qwen35Params, draft: DFlashParams | None, n_ctx: int) -> dict[str, int]:
    """Bytes the engine's caches take for one lane, by what they hold (cache.py; alignment aside)."""
    block = draft.block_size if draft else 1
    per_slot = pages_for(n_ctx)
    s, gdn = target.state_size, sum(target.recurrent)

    def pages(layers: int, width: int, n: int) -> int:
        return 2 * layers * width * PAGE * (n + 1) * _KV_BYTES + 4 * per_slot

    sizes = {
        "keys and values": pages(target.n_layer - gdn, target.head_dim * target.n_head_kv, per_slot),
        "delta net states": 4 * gdn * s * s * target.n_v_heads,
        "pending log": 4 * gdn * (2 * s + 1) * target.n_v_heads * block,
        "convolution rows": 4 * gdn * target.conv_channels * (target.conv_kernel - 1 + block) + 4,
        "tokens, biases": 4 * (n_ctx + 1 + 2 + 2 * MAX_BIASES),
    }
    if draft:
        ring = ring_pages(draft.window, n_ctx, max(PIECE, block))
        sizes["draft's ring"] = pages(draft.n_layer, draft.head_dim * draft.n_head_kv, ring)
    return sizes


def _plan_lines(
    target: tuple[Qwen35Params, GGUFFile], draft: tuple[DFlashParams, GGUFFile] | None, n_ctx: int | None
) -> Iterator[str]:
    trained = target[0].context_length
    n_ctx = min(trained, DEFAULT_CONTEXT) if n_ctx is None else n_ctx
    if not 2 <= n_ctx <= trained:
        raise RequestError("-c", n_ctx, f"2..{trained}, the target's context_length")
    weights = target[1].size + (draft[1].size if draft else 0)
    caches = cache_bytes(target[0], draft[0] if draft else None, n_ctx)
    yield f"memory for {n_ctx} positions, one text at a time, without the working memory of a round"
    yield f"  {'weights':<16}  {_size(weights)} (mapped from the file on the CPU)"
    for what, size in caches.items():
        yield f"  {what:<16}  {_size(size)}"
    yield f"  {'together':<16}  {_size(weights + sum(caches.values()))}"


def _parameters(file: GGUFFile) -> str:
    total = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    return f"{total / 1e9:.2f} G parameters" if total >= 1e9 else f"{total / 1e6:.2f} M parameters"


def _size(n: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n} bytes"
