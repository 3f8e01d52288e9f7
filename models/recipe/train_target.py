"""Train the target on token files for a fixed time and write a checkpoint.

The learning rate follows the clock, not a step count: it rises for 2 % of the time, holds, and falls linearly to
zero at the deadline, so the run anneals fully however fast the machine is.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import checkpoint
import numpy as np
import torch
import torch.nn.functional as F
from check import check_chunked, check_step
from optim import Clock, Optimizer
from target import Stepper, Target, TargetConfig
from tokenizer import EOS_ID
from tokenizers import Tokenizer
from torch import Tensor

PROMPTS = [
    "def fibonacci(n):",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    "from typing import List\n\n\ndef running_max(numbers: List[int]) -> List[int]:\n"
    '    """Return the list of maxima of all prefixes.\n    >>> running_max([1, 3, 2])\n    [1, 3, 3]\n    """\n',
    "class Stack:\n    def __init__(self):\n",
]


class Rows:
    """Training rows of ``length`` + 1 tokens cut from one long stream.

    Each pass visits every window once at a random phase; half of the rows are moved forward to the next start of a
    document, because a prompt at inference is the start of one.
    """

    def __init__(self, stream: Tensor, length: int) -> None:
        self.stream, self.length = stream, length
        starts = torch.where(stream == EOS_ID)[0] + 1
        where = torch.arange(len(stream), device=stream.device)
        at = torch.searchsorted(starts, where, out_int32=True).clamp_(max=len(starts) - 1)
        self.next_start = starts[at].to(torch.int32)
        self.order = torch.empty(0, dtype=torch.long, device=stream.device)
        self.passes = 0

    def take(self, rows: int) -> Tensor:
        n = (len(self.stream) - 2 * self.length - 2) // self.length
        while len(self.order) < rows:
            phase = int(torch.randint(0, self.length, (1,)))
            fresh = torch.randperm(n, device=self.stream.device) * self.length + phase
            self.order = torch.cat([self.order, fresh])
            self.passes += 1
        at, self.order = self.order[:rows], self.order[rows:]
        snapped = self.next_start[at].long()
        use = (torch.rand(rows, device=at.device) < 0.5) & (snapped - at < self.length)
        at = torch.where(use & (snapped >= at), snapped, at)
        return self.stream[at[:, None] + torch.arange(self.length + 1, device=at.device)].long()


def load_stream(paths: list[Path], device: str) -> Tensor:
    data = np.concatenate([np.fromfile(p, np.uint16) for p in paths]).astype(np.int32)
    return torch.from_numpy(data).to(device)


def loss_of(model: Target, h: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(h).float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def held_out_loss(model: Target, stream: Tensor, length: int, rows: int, amp: bool) -> float:
    """Mean nats per token over the first ``rows`` windows of the held-out stream."""
    n = min(rows, (len(stream) - 1) // length)
    total = 0.0
    for i in range(0, n, 32):
        at = torch.arange(i, min(i + 32, n), device=stream.device) * length
        x = stream[at[:, None] + torch.arange(length + 1, device=stream.device)].long()
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=amp):
            total += float(loss_of(model, model.hidden(x[:, :-1])[0], x[:, 1:])) * len(at)
    return total / n


@torch.no_grad()
def sample(model: Target, tok: Tokenizer, prompt: str, n: int) -> str:
    """Greedy continuation of ``prompt``."""
    device = model.token_embd.weight.device
    ids = tok.encode(prompt, add_special_tokens=False).ids
    stepper = Stepper(model, 1, len(ids) + n, torch.float32)
    for t in ids:
        logits = stepper.step(torch.tensor([t], device=device))
    out: list[int] = []
    while len(out) < n:
        t = int(logits.argmax())
        if t == EOS_ID:
            break
        out.append(t)
        if len(out) < n:
            logits = stepper.step(torch.tensor([t], device=device))
    return prompt + tok.decode(out)


def make_optimizer(model: Target, a: argparse.Namespace) -> Optimizer:
    matrices, tables, others = [], [], []
    for name, p in model.named_parameters():
        if name in ("token_embd.weight", "output.weight"):
            tables.append(p)
        elif p.dim() == 2 and min(p.shape) >= 128:
            matrices.append(p)
        else:
            others.append(p)
    return Optimizer(matrices, tables, others, a.lr_matrix, a.lr_table, a.lr_other, a.weight_decay)


def main() -> None:
    begin = time.monotonic()
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tokens", type=Path, nargs="+", required=True, help="a file given twice counts twice")
    ap.add_argument("--held-out", type=Path, required=True)
    ap.add_argument("--tokenizer", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True, help="folder for target.ckpt.N and target.json")
    ap.add_argument("--minutes", type=float, default=8.0, help="from start of this program to the last step")
    ap.add_argument("--config", type=json.loads, default={}, help="JSON with fields of TargetConfig to change")
    ap.add_argument("--rows", type=int, default=128)
    ap.add_argument("--length", type=int, default=1024)
    ap.add_argument("--lr-matrix", type=float, default=0.02)
    ap.add_argument("--lr-table", type=float, default=4e-3)
    ap.add_argument("--lr-other", type=float, default=2e-3)
    ap.add_argument("--weight-decay", type=float, default=0.1)
    ap.add_argument("--hold", type=float, default=0.35, help="share of the time after which the rate starts to fall")
    ap.add_argument("--eval-rows", type=int, default=512)
    ap.add_argument("--sample-tokens", type=int, default=160)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--no-compile", action="store_true")
    a = ap.parse_args()
    cuda = a.device.startswith("cuda")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    print("chunked recurrence against the naive one:", check_chunked(a.device), flush=True)

    tok = Tokenizer.from_file(str(a.tokenizer))
    config = replace(TargetConfig(n_vocab=tok.get_vocab_size()), **a.config)
    model = Target(config).to(a.device)
    n_params = sum(p.numel() for p in model.parameters())
    rows = Rows(load_stream(a.tokens, a.device), a.length)
    held = load_stream([a.held_out], a.device)
    opt = make_optimizer(model, a)
    sizes = (
        f"{n_params / 1e6:.2f} M parameters, {len(rows.stream) / 1e6:.1f} M tokens, {len(held) / 1e6:.2f} M held out"
    )
    print(f"{sizes}; {time.monotonic() - begin:.0f} s", flush=True)

    loss_function = loss_of
    if not a.no_compile:
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.suppress_errors = True  # a region that cannot be compiled runs as it is
        for block in model.blk:
            block.compile(dynamic=False)
        loss_function = torch.compile(loss_of, dynamic=False)

    clock = Clock(begin + 60 * a.minutes, warm=0.02, hold=a.hold)
    step, mark, mark_step, warm_steps = 0, time.monotonic(), 0, 3
    recent: list[Tensor] = []
    while True:
        x = rows.take(a.rows)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=cuda):
            loss = loss_function(model, model.hidden(x[:, :-1])[0], x[:, 1:])
        loss.backward()
        opt.step(clock.factor() if step >= warm_steps else 1e-3)
        recent.append(loss.detach())
        step += 1
        if step == warm_steps:  # compilation is over: the schedule starts here
            print(f"first loss {float(loss):.3f}, ready after {time.monotonic() - begin:.0f} s", flush=True)
            clock.start()
            mark, mark_step = time.monotonic(), step
        elif step % 10 == 0 or not cuda:
            value = float(loss)  # also keeps the host from running ahead of the device
            if not math.isfinite(value):
                raise SystemExit(f"loss is {value} at step {step}")
            now = time.monotonic()
            if now - mark > 10 or clock.share >= 1:
                rate = (step - mark_step) * a.rows * a.length / (now - mark)
                mean = float(torch.stack(recent).mean())
                speed = f"{rate / 1e3:.0f} k tokens/s pass {rows.passes}"
                print(f"step {step} share {clock.share:.3f} loss {mean:.4f} {speed}", flush=True)
                mark, mark_step, recent = now, step, []
            if clock.share >= 1:
                break
    if cuda:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)

    torch.compiler.set_stance("force_eager")  # other shapes from here on: not worth compiling
    paths = checkpoint.save(a.out / "target.ckpt", model.state_dict(), config.to_dict())
    print("saved", [p.stat().st_size for p in paths], f"{time.monotonic() - begin:.0f} s", flush=True)
    report = {
        "steps": step,
        "tokens": step * a.rows * a.length,
        "parameters": n_params,
        "passes": rows.passes,
        "held_out_loss": held_out_loss(model, held, a.length, a.eval_rows, cuda),
    }
    print("held-out loss", report["held_out_loss"], flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    print("one-token against parallel:", check_step(model, held[:600].view(2, 300).long()), flush=True)
    samples = [sample(model, tok, p, a.sample_tokens) for p in PROMPTS]
    for s in samples:
        print("-" * 80 + "\n" + s, flush=True)
    (a.out / "target.json").write_text(json.dumps({**report, "samples": samples}, indent=1))
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
