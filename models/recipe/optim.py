"""Muon for the matrices of the trunk, AdamW for the rest, one schedule driven by time.

Muon: the momentum of a matrix is replaced by the nearest (semi-)orthogonal one, found with five steps of a quintic
Newton-Schulz iteration, so every direction of the matrix moves at the same speed.  Matrices of equal shape go together.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(x: Tensor) -> Tensor:
    """Nearest orthogonal matrices of a batch [n, rows, columns], roughly."""
    y = x.bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = y @ y.mT
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * (a @ a)) @ y
    return y.mT if tall else y


class Muon:
    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            self.groups[tuple(p.shape)].append(p)
        self.momentum = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, scale: float, momentum: float) -> None:
        for shape, params in self.groups.items():
            grad = torch.stack([p.grad for p in params if p.grad is not None])
            buffer = self.momentum[shape]
            buffer.lerp_(grad, 1 - momentum)
            update = orthogonal(grad.lerp(buffer, momentum)).float()
            rate = scale * self.lr
            torch._foreach_mul_(params, 1 - rate * self.weight_decay)
            torch._foreach_add_(params, list(update.unbind(0)), alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)


class Optimizer:
    """Both optimisers under one learning-rate factor in [0, 1]."""

    def __init__(
        self,
        matrices: list[nn.Parameter],
        tables: list[nn.Parameter],
        others: list[nn.Parameter],
        lr_matrix: float,
        lr_table: float,
        lr_other: float,
        weight_decay: float,
    ) -> None:
        self.muon = Muon(matrices, lr_matrix, weight_decay)
        groups = [{"params": tables, "lr": lr_table}, {"params": others, "lr": lr_other}]
        fused = bool(tables and tables[0].is_cuda)
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
        self.base = [lr_table, lr_other]
        self.everything = [*matrices, *tables, *others]
        self.steps = 0

    def step(self, factor: float) -> None:
        nn.utils.clip_grad_norm_(self.everything, 1.0)
        for group, base in zip(self.adam.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        self.adam.step()
        self.muon.step(factor, min(0.95, 0.85 + 0.1 * self.steps / 300))
        for p in self.everything:
            p.grad = None
        self.steps += 1


class Clock:
    """Learning-rate factor by share of the time that has passed, from ``start()`` to the deadline."""

    def __init__(self, deadline: float, warm: float, hold: float) -> None:
        self.deadline, self.warm, self.hold = deadline, warm, hold
        self.begin = time.monotonic()

    def start(self) -> None:
        self.begin = time.monotonic()

    @property
    def share(self) -> float:
        return (time.monotonic() - self.begin) / max(self.deadline - self.begin, 1e-3)

    def factor(self) -> float:
        s = self.share
        return max(0.0, min(1.0, s / self.warm, (1 - s) / (1 - self.hold)))
