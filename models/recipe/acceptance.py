"""Speculation replayed on finished greedy text.

The target's greedy text does not depend on the draft, so the rounds of a run are known once the number of right
proposals is known at every position: a round at anchor n emits accepted(n) + 1 tokens and the next starts there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from draft import Draft
from generate import generate, pack
from target import Target
from torch import Tensor


@torch.no_grad()
def accepted(draft: Draft, target: Target, ids: Tensor, top_k: int, amp: bool, chunk: int = 64) -> Tensor:
    """Leading right proposals [B, T] for an anchor at every position of ids [B, T] (0 for the last block - 1 ones)."""
    b, t = ids.shape
    c = draft.c
    out = torch.zeros(b, t, dtype=torch.long, device=ids.device)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=amp):
        taps = torch.cat(target.hidden(ids, c.taps)[1], -1)
    last = t - c.block
    for start in range(0, last, chunk):
        positions = torch.arange(start, start + chunk, device=ids.device).clamp(max=last).expand(b, -1)
        anchors = ids.gather(1, positions)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=amp):
            h = draft.blocks(taps, anchors, positions, target.token_embd.weight)
            logits = F.linear(h, target.output.weight)
        proposals = draft.walk(h, logits, anchors, top_k)
        truth = ids[
            torch.arange(b, device=ids.device)[:, None, None],
            positions[..., None] + torch.arange(1, c.block, device=ids.device),
        ]
        out.scatter_(1, positions, (proposals == truth).cumprod(-1).sum(-1))
    return out


def replay(counts: list[int], first: int, end: int, block: int) -> list[int]:
    """Accepted proposals of every round of one sequence whose own tokens are at first .. end - 1."""
    rounds = []
    n = first
    while n + 1 < end:
        a = min(counts[n], end - n - 1)
        rounds.append(a)
        n += a + 1
    return rounds


@torch.no_grad()
def measure(
    draft: Draft, target: Target, prompts: list[list[int]], tokens: int, top_k: int, amp: bool, device: str
) -> dict[str, object]:
    """Mean tokens a round and acceptance by position over greedy continuations of ``prompts``."""
    ids, lengths = pack(prompts, len(prompts), 1, device)
    total = -(-(int(lengths.max()) + tokens + draft.c.block) // 64) * 64
    limits = torch.full((len(prompts),), tokens, device=device)
    text, made = generate(target, ids, lengths, total, limits, torch.zeros(len(prompts), device=device), amp)
    group = 64 if amp else 16  # sequences at once; logits of all their blocks are in memory
    counts = torch.cat([accepted(draft, target, t, top_k, amp) for t in text.split(group)])
    rounds: list[int] = []
    emitted = 0
    for b in range(len(prompts)):
        first = int(lengths[b, 0]) - 1
        end = first
        while end < total and bool(made[b, end]):
            end += 1
        mine = replay(counts[b].tolist(), first, end, draft.c.block)
        rounds += mine
        emitted += sum(mine) + len(mine)
    n = max(len(rounds), 1)
    return {
        "prompts": len(prompts),
        "rounds": len(rounds),
        "tokens": emitted,
        "tokens_per_round": emitted / n,
        "acceptance_by_position": [sum(a >= i for a in rounds) / n for i in range(1, draft.c.block)],
    }
