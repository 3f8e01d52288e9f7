"""Text by the target, thousands of sequences at once.

Every sequence is a chain of segments: a prompt, then the target's own tokens until EOS or a length limit, then the
next prompt.  Prompts go through the same one-token step as everything else, so they may differ in length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from target import Stepper, Target, gdn_step
from tokenizer import EOS_ID
from torch import Tensor


def pack(prompts: list[list[int]], rows: int, each: int, device: str) -> tuple[Tensor, Tensor]:
    """Ids [rows, each, longest + 1], every prompt behind an EOS, and lengths with it [rows, each]."""
    longest = max(map(len, prompts)) + 1
    ids = torch.full((rows, each, longest), EOS_ID, dtype=torch.long)
    lengths = torch.ones(rows, each, dtype=torch.long)
    for i in range(rows * each):
        p = prompts[i % len(prompts)]
        ids[i // each, i % each, 1 : len(p) + 1] = torch.tensor(p)
        lengths[i // each, i % each] = len(p) + 1
    return ids.to(device), lengths.to(device)


@torch.no_grad()
def generate(
    model: Target,
    prompts: Tensor,
    lengths: Tensor,
    total: int,
    limits: Tensor,
    temperature: Tensor,
    amp: bool,
    recurrence: Callable[..., tuple[Tensor, Tensor]] = gdn_step,
) -> tuple[Tensor, Tensor]:
    """Tokens [B, total] and whether the target made them [B, total].

    prompts, lengths as ``pack`` gives them; limits [B] most tokens of a segment; temperature [B], 0 = greedy.
    """
    b, each, _ = prompts.shape
    device = prompts.device
    stepper = Stepper(model, b, total, torch.bfloat16 if amp else torch.float32, recurrence)
    row = torch.arange(b, device=device)
    current = torch.zeros(b, dtype=torch.long, device=device)
    position = torch.ones_like(current)  # behind the EOS of the first prompt
    count = torch.zeros_like(current)
    sampled = torch.zeros_like(current)
    ids = torch.zeros(b, total, dtype=torch.long, device=device)
    made = torch.zeros(b, total, dtype=torch.bool, device=device)
    hot = bool((temperature > 0).any())
    for t in range(total):
        forced = position < lengths[row, current]
        token = torch.where(forced, prompts[row, current, position.clamp(max=prompts.shape[2] - 1)], sampled)
        ids[:, t], made[:, t] = token, ~forced
        count = count + ~forced
        over = ~forced & ((token == EOS_ID) | (count >= limits))
        position = torch.where(over, (token == EOS_ID).long(), position + forced)
        current = torch.where(over, (current + 1).clamp(max=each - 1), current)
        count = torch.where(over, 0, count)
        if t + 1 == total:
            break
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = stepper.step(token)
        if hot:
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-10, 1 - 1e-7)))
            logits = torch.where(temperature[:, None] > 0, logits + temperature[:, None] * noise, logits)
        sampled = logits.argmax(-1)
    return ids, made
