"""Train the draft on the text that the exported, quantised target writes.

1. Prompts are cut from the documents (``prompts.py``) and continued by the target (``generate.py``), mostly greedily.
2. Every step takes some sequences, runs the frozen target over them for the taps, picks anchors among the tokens that
   the target made, and predicts the block behind each anchor (``draft_loss``).  Positions count exp(-(i - 1) / decay).
3. Acceptance is replayed on prompts from held-out documents, and on those of ``--prompts``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import checkpoint
import prompts as prompt_source
import torch
from acceptance import measure
from check import check_step
from corpus import read_documents
from draft import Draft, DraftConfig, draft_loss
from generate import generate, pack
from gguf_io import load_target
from optim import Clock, Optimizer
from target import Target, gdn_step
from tokenizer import EOS_ID
from tokenizers import Tokenizer
from torch import Tensor


def write_text(
    target: Target, prompts: list[list[int]], a: argparse.Namespace, deadline: float, amp: bool
) -> tuple[Tensor, Tensor]:
    """Sequences of the target's text, batch after batch until ``deadline``: ids and made-by-target [N, length]."""
    recurrence = gdn_step if a.no_compile else torch.compile(gdn_step)
    all_ids, all_made = [], []
    used = 0
    while True:
        begin = time.monotonic()
        ids, lengths = pack(
            prompts[used % len(prompts) :] + prompts[: used % len(prompts)], a.gen_rows, a.segments, a.device
        )
        used += a.gen_rows * a.segments
        limits = torch.randint(a.shortest, a.longest + 1, (a.gen_rows,), device=a.device)
        temperature = torch.where(torch.rand(a.gen_rows, device=a.device) < a.hot_share, a.temperature, 0.0)
        text, made = generate(target, ids, lengths, a.length, limits, temperature, amp, recurrence)
        all_ids.append(text.to(torch.int32))
        all_made.append(made)
        share = float(made.float().mean())  # waits for the device
        took = time.monotonic() - begin
        print(f"{text.numel() / 1e6:.2f} M tokens, {share:.2f} of them by the target, {took:.1f} s", flush=True)
        if time.monotonic() + took > deadline:
            return torch.cat(all_ids), torch.cat(all_made)


def pick_anchors(
    ids: Tensor, made: Tensor, blocks: int, block: int, decay: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors, positions [B,N], labels and weights [B,N,block-1]; a label counts while the target's own run lasts."""
    b, t = ids.shape
    dev = ids.device
    good = made & (ids != EOS_ID)
    good[:, :-1] &= made[:, 1:]
    good[:, t - block :] = False
    score = torch.rand(b, t, device=dev) + good
    positions = score.topk(blocks, -1).indices
    row = torch.arange(b, device=dev)[:, None, None]
    after = (positions[..., None] + torch.arange(1, block, device=dev)).clamp(max=t - 1)
    run = made[row, after].long().cumprod(-1) * good.gather(1, positions)[..., None]
    weight = run * torch.exp(-torch.arange(block - 1, device=dev) / decay)
    return ids.gather(1, positions), positions, ids[row, after], weight


def make_optimizer(model: Draft, a: argparse.Namespace) -> Optimizer:
    matrices, tables, others = [], [], []
    for name, p in model.named_parameters():
        if name.startswith("selector_"):
            tables.append(p)
        elif p.dim() == 2 and "conv_proj" not in name:
            matrices.append(p)
        else:
            others.append(p)
    return Optimizer(matrices, tables, others, a.lr_matrix, a.lr_table, a.lr_other, a.weight_decay)


def main() -> None:
    begin = time.monotonic()
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", type=Path, required=True, help="GGUF")
    ap.add_argument("--tokenizer", type=Path, required=True)
    ap.add_argument("--documents", type=Path, nargs="+", required=True)
    ap.add_argument("--held-out", type=Path, required=True, help="documents whose prompts are for measuring")
    ap.add_argument("--prompts", type=Path, help="JSON list of further prompts for measuring")
    ap.add_argument("--out", type=Path, required=True, help="folder for draft.ckpt.N and draft.json")
    ap.add_argument("--minutes", type=float, default=8.0, help="from start of this program to the last step")
    ap.add_argument("--generate-minutes", type=float, default=1.5)
    ap.add_argument("--config", type=json.loads, default={}, help="JSON with fields of DraftConfig to change")
    ap.add_argument("--most-documents", type=int, default=12000)
    ap.add_argument("--prompt-limit", type=int, default=160, help="most tokens of a prompt")
    ap.add_argument("--gen-rows", type=int, default=4096)
    ap.add_argument("--segments", type=int, default=8, help="prompts a sequence has at hand")
    ap.add_argument("--shortest", type=int, default=64, help="tokens after which a segment may be cut")
    ap.add_argument("--longest", type=int, default=192)
    ap.add_argument("--hot-share", type=float, default=0.1)
    ap.add_argument("--temperature", type=float, default=0.7)
    ap.add_argument("--length", type=int, default=768)
    ap.add_argument("--rows", type=int, default=64)
    ap.add_argument("--blocks", type=int, default=48, help="anchors a sequence and step")
    ap.add_argument("--decay", type=float, default=4.0)
    ap.add_argument("--lr-matrix", type=float, default=0.02)
    ap.add_argument("--lr-table", type=float, default=3e-3)
    ap.add_argument("--lr-other", type=float, default=1e-3)
    ap.add_argument("--weight-decay", type=float, default=0.1)
    ap.add_argument("--hold", type=float, default=0.35)
    ap.add_argument("--measure-prompts", type=int, default=256)
    ap.add_argument("--measure-tokens", type=int, default=128)
    ap.add_argument("--jobs", type=int, default=16)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--no-compile", action="store_true")
    a = ap.parse_args()
    cuda = a.device.startswith("cuda")
    torch.manual_seed(2)
    tok = Tokenizer.from_file(str(a.tokenizer))
    target = load_target(a.target).to(a.device).requires_grad_(False)
    documents = [d for p in a.documents for d in read_documents(p)][: a.most_documents]
    prompts = prompt_source.build(documents, a.tokenizer, 1, 12, a.prompt_limit, a.jobs)
    held_prompts = prompt_source.build(read_documents(a.held_out), a.tokenizer, 2, 2, a.prompt_limit, a.jobs)[
        : a.measure_prompts
    ]
    seen = {tuple(p) for p in prompts}
    held_prompts = [p for p in held_prompts if tuple(p) not in seen]
    print(f"{len(prompts)} prompts, {len(held_prompts)} held out; {time.monotonic() - begin:.0f} s", flush=True)
    print(
        "one-token against parallel:",
        check_step(target, torch.tensor(prompts[0] * 60, device=a.device)[None, :200]),
        flush=True,
    )

    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    torch._dynamo.config.suppress_errors = True
    ids, made = write_text(target, prompts, a, time.monotonic() + 60 * a.generate_minutes, cuda)
    n_made = int(made.sum())
    print(f"{ids.numel() / 1e6:.1f} M tokens, {n_made / 1e6:.1f} M by the target; {time.monotonic() - begin:.0f} s")
    for row in range(2):
        print("-" * 80 + "\n" + tok.decode(ids[row, :300].tolist(), skip_special_tokens=False), flush=True)

    config = replace(
        DraftConfig(
            n_vocab=target.c.n_vocab,
            n_embd=target.c.n_embd,
            rope_base=target.c.rope_base,
            eps=target.c.eps,
            context=target.c.context,
        ),
        **a.config,
    )
    if max(config.taps) >= target.c.n_layer:
        raise SystemExit(f"tap {max(config.taps)}: the target has {target.c.n_layer} layers")
    draft = Draft(config).to(a.device)
    n_params = sum(p.numel() for p in draft.parameters())
    opt = make_optimizer(draft, a)
    embd, head = target.token_embd.weight, target.output.weight
    loss_function = draft_loss
    if not a.no_compile:
        for block in target.blk:
            block.compile(dynamic=False)
        loss_function = torch.compile(draft_loss, dynamic=False)
    print(f"draft of {n_params / 1e6:.2f} M parameters", flush=True)

    clock = Clock(begin + 60 * a.minutes, warm=0.02, hold=a.hold)
    step, mark, mark_step, warm_steps = 0, time.monotonic(), 0, 3
    while True:
        pick = torch.randint(0, len(ids), (a.rows,), device=a.device)
        x, own = ids[pick].long(), made[pick]
        anchors, positions, labels, weight = pick_anchors(x, own, a.blocks, config.block, a.decay)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=cuda):
            with torch.no_grad():
                taps = torch.cat(target.hidden(x, config.taps)[1], -1)
            loss, right = loss_function(draft, taps, anchors, positions, labels, weight, embd, head)
        loss.backward()
        opt.step(clock.factor() if step >= warm_steps else 1e-3)
        step += 1
        if step == warm_steps:
            print(f"first loss {float(loss):.3f}, ready after {time.monotonic() - begin:.0f} s", flush=True)
            clock.start()
            mark, mark_step = time.monotonic(), step
        elif step % 10 == 0 or not cuda:
            value = float(loss)
            if not math.isfinite(value):
                raise SystemExit(f"loss is {value} at step {step}")
            now = time.monotonic()
            if now - mark > 10 or clock.share >= 1:
                shown = " ".join(f"{float(r):.3f}" for r in right)
                rate = (step - mark_step) / (now - mark)
                print(
                    f"step {step} share {clock.share:.3f} loss {value:.4f} right {shown} {rate:.1f} steps/s", flush=True
                )
                mark, mark_step = now, step
            if clock.share >= 1:
                break
    if cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    torch.compiler.set_stance("force_eager")
    paths = checkpoint.save(a.out / "draft.ckpt", draft.state_dict(), config.to_dict())
    print("saved", [p.stat().st_size for p in paths], f"{time.monotonic() - begin:.0f} s", flush=True)
    report: dict[str, object] = {"steps": step, "parameters": n_params, "generated_tokens": n_made}
    for k in sorted({8, config.top_k}):
        report[f"held_out_top{k}"] = measure(draft, target, held_prompts, a.measure_tokens, k, cuda, a.device)
        print(f"held-out prompts, top {k}:", report[f"held_out_top{k}"], flush=True)
    if a.prompts:
        more = [tok.encode(p, add_special_tokens=False).ids for p in json.loads(a.prompts.read_text())]
        report["prompts"] = measure(draft, target, more, a.measure_tokens, config.top_k, cuda, a.device)
        print(f"{a.prompts.name}:", report["prompts"], flush=True)
    (a.out / "draft.json").write_text(json.dumps(report, indent=1))
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
