"""The draft: a DFlash2 block predictor in PyTorch.

It has no embedding and no head of its own; both are the target's.  One pass predicts a block: the input is the last
token (the anchor, at position n) followed by masks, and row i of the output proposes the token at n + i, i = 1..7.
What the draft knows of the past comes from the target: the streams entering the layers ``taps`` are fused,
e = RMS(fc(concat); enc.output_norm), and every layer turns e into one key and one value per committed position.

Layer, on the rows of a block: a = RMS(x; attn_norm); coefficients c = attn_conv_proj a; a' = CONV(a, side 0);
attention over the injected rows (position < n, nearer than the window) and all rows of the block, not causal;
x += CONV(Wo o, side 1); the same again around the feed-forward, with coefficients of its own.
CONV(side): y[t,ch] = sum_tap (base[ch,tap,side] + c[t][group(ch),tap,side]) in[t-tap,ch], zero before the block.

Selector: among the top-k tokens b of a position, the score after predecessor a is
s(a,b) = sum_r predecessor[a,r] (selector_hidden h)[r] successor[b,r] + logit[b]; the walk takes the best from left to
right, starting at the anchor.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from target import Linear, Weight, rms, rope, rope_tables
from torch import Tensor, nn


@dataclass(frozen=True)
class DraftConfig:
    n_vocab: int = 8192
    n_embd: int = 512
    n_ff: int = 1024
    n_layer: int = 3
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 128
    rope_base: float = 1e6
    eps: float = 1e-6
    block: int = 8
    kernel: int = 2
    group: int = 16
    rank: int = 64
    top_k: int = 16
    window: int = 512
    taps: tuple[int, ...] = (2, 4, 6, 7)  # layer whose input is read; at most target layers - 1
    mask_id: int = 2
    context: int = 4096

    @property
    def groups(self) -> int:
        return self.n_embd // self.group

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.c = c
        self.attn_norm = Weight(torch.ones(c.n_embd))
        self.attn_q = Linear(c.n_embd, c.n_head * c.head_dim)
        self.attn_k = Linear(c.n_embd, c.n_head_kv * c.head_dim)
        self.attn_v = Linear(c.n_embd, c.n_head_kv * c.head_dim)
        self.attn_output = Linear(c.n_head * c.head_dim, c.n_embd)
        self.attn_q_norm = Weight(torch.ones(c.head_dim))
        self.attn_k_norm = Weight(torch.ones(c.head_dim))
        self.ffn_norm = Weight(torch.ones(c.n_embd))
        self.ffn_gate = Linear(c.n_embd, c.n_ff)
        self.ffn_up = Linear(c.n_embd, c.n_ff)
        self.ffn_down = Linear(c.n_ff, c.n_embd)
        base = torch.zeros(2, c.kernel, c.n_embd)  # side, tap, channel: GGUF [channel, tap, side]
        base[:, 0] = 1.0
        self.attn_conv_base = nn.Parameter(base.clone())
        self.ffn_conv_base = nn.Parameter(base.clone())
        self.attn_conv_proj = Linear(c.n_embd, 2 * c.kernel * c.groups)
        self.ffn_conv_proj = Linear(c.n_embd, 2 * c.kernel * c.groups)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """K (normalised, rotated) and V [..., kv heads, head_dim] of rows x [..., n_embd]."""
        c = self.c
        k = self.attn_k(x).unflatten(-1, (c.n_head_kv, c.head_dim))
        k = rope(rms(k, self.attn_k_norm.weight, c.eps), cos, sin)
        return k, self.attn_v(x).unflatten(-1, (c.n_head_kv, c.head_dim))

    def convolve(self, x: Tensor, coefficients: Tensor, base: Tensor, side: int) -> Tensor:
        """x [..., block, n_embd], coefficients [..., block, 2, kernel, groups]."""
        c = self.c
        out = torch.zeros_like(x)
        for tap in range(c.kernel):
            shifted = F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
            weight = base[side, tap] + coefficients[..., side, tap, :].repeat_interleave(c.group, -1)
            out = out + weight.to(x.dtype) * shifted
        return out

    def forward(self, x: Tensor, e: Tensor, tables: tuple[Tensor, Tensor, Tensor, Tensor], mask: Tensor) -> Tensor:
        """One layer on block rows x [B,N,block,D].

        e [B,T,D] fused taps; tables: cos and sin at the blocks' positions, then at those of e;
        mask [B,1,N*block,T+N*block], added to the scores.
        """
        c = self.c
        b, n, w, _ = x.shape
        a = rms(x, self.attn_norm.weight, c.eps)
        co = self.attn_conv_proj(a).unflatten(-1, (2, c.kernel, c.groups))
        a = self.convolve(a, co, self.attn_conv_base, 0)
        q = self.attn_q(a).unflatten(-1, (c.n_head, c.head_dim))
        q = rope(rms(q, self.attn_q_norm.weight, c.eps), tables[0], tables[1])
        k, v = self.keys_values(a, tables[0], tables[1])
        ke, ve = self.keys_values(e, tables[2], tables[3])
        k = torch.cat([ke, k.flatten(1, 2)], 1).transpose(1, 2)
        v = torch.cat([ve, v.flatten(1, 2)], 1).transpose(1, 2)
        r = c.n_head // c.n_head_kv
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        q = q.flatten(1, 2).transpose(1, 2)
        o = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask.to(v.dtype))
        o = self.attn_output(o.transpose(1, 2).reshape(b, n, w, -1))
        x = x + self.convolve(o, co, self.attn_conv_base, 1)
        f = rms(x, self.ffn_norm.weight, c.eps)
        co = self.ffn_conv_proj(f).unflatten(-1, (2, c.kernel, c.groups))
        f = self.convolve(f, co, self.ffn_conv_base, 0)
        y = self.ffn_down(F.silu(self.ffn_gate(f)) * self.ffn_up(f))
        return x + self.convolve(y, co, self.ffn_conv_base, 1)


class Draft(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = Linear(len(c.taps) * c.n_embd, c.n_embd)
        self.enc = nn.Module()
        self.enc.output_norm = Weight(torch.ones(c.n_embd))
        self.output_norm = Weight(torch.ones(c.n_embd))
        self.blk = nn.ModuleList([DraftLayer(c) for _ in range(c.n_layer)])
        self.selector_predecessor = Weight(torch.randn(c.n_vocab, c.rank) * 0.5)
        self.selector_successor = Weight(torch.zeros(c.n_vocab, c.rank))
        self.selector_hidden = Linear(c.n_embd, c.rank)
        for name, p in self.named_parameters():
            if p.dim() == 2 and "selector_pre" not in name and "selector_suc" not in name:
                small = any(s in name for s in ("ffn_down", "attn_output", "conv_proj"))
                nn.init.normal_(p, std=(0.01 if small else 0.5) / math.sqrt(p.shape[1]))

    def blocks(self, taps: Tensor, anchors: Tensor, positions: Tensor, embd: Tensor) -> Tensor:
        """Normalised output rows [B,N,block,D] of N blocks for each of B sequences.

        taps [B,T,len(taps)*D] streams of the target at positions 0..T-1; anchors [B,N] token ids; positions [B,N] the
        position n of each anchor (rows < n of taps are visible to its block); embd [V,D] the target's embedding.
        """
        c = self.c
        b, t, _ = taps.shape
        n = anchors.shape[1]
        dev = taps.device
        e = rms(self.fc(taps), self.enc.output_norm.weight, c.eps)
        where = positions[..., None] + torch.arange(c.block, device=dev)  # [B,N,block]
        steps = torch.arange(t, device=dev)
        distance = where[..., None] - steps  # [B,N,block,T]
        past = (steps < positions[..., None, None]) & (distance < c.window)
        same = torch.eye(n, device=dev, dtype=torch.bool).repeat_interleave(c.block, 0).repeat_interleave(c.block, 1)
        visible = torch.cat([past.flatten(1, 2), same.expand(b, -1, -1)], -1)
        mask = torch.zeros(visible.shape, device=dev).masked_fill(~visible, float("-inf"))[:, None]
        tables = (*rope_tables(where, c.head_dim, c.rope_base), *rope_tables(steps, c.head_dim, c.rope_base))
        ids = torch.full((b, n, c.block), c.mask_id, device=dev, dtype=torch.long)
        ids[..., 0] = anchors
        x = F.embedding(ids, embd)
        for layer in self.blk:
            x = layer(x, e, tables, mask)
        return rms(x, self.output_norm.weight, c.eps)

    def edge(self, h: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """What the selector adds to logits [..., k] (F32): rows h [..., D], ids before [...], candidates [..., k]."""
        gate = self.selector_hidden(h).float() * self.selector_predecessor.weight[before].float()
        return (self.selector_successor.weight[candidates].float() @ gate[..., None]).squeeze(-1)

    @torch.no_grad()
    def walk(self, h: Tensor, logits: Tensor, anchors: Tensor, top_k: int) -> Tensor:
        """Proposals [..., block-1] for rows h [..., block, D] and their logits [..., block, V]."""
        before = anchors
        out = []
        for i in range(1, self.c.block):
            unary, candidates = logits[..., i, :].float().topk(top_k, -1)
            score = unary + self.edge(h[..., i, :], before, candidates)
            before = candidates.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)
            out.append(before)
        return torch.stack(out, -1)

    def gguf_tensors(self) -> dict[str, Tensor]:
        return {name: p.float() for name, p in self.state_dict().items()}


def draft_loss(
    draft: Draft,
    taps: Tensor,
    anchors: Tensor,
    positions: Tensor,
    labels: Tensor,
    weight: Tensor,
    embd: Tensor,
    head: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted mean loss, and the share of labels that the logits alone get right, by position.

    labels [B,N,block-1] tokens after the anchor, weight of the same shape (0 = no label).  The loss of a position is
    the cross-entropy of the logits over the vocabulary plus that of the selector's scores over the top-k candidates
    and the label, with the label before it as predecessor: a proposal only counts if all before it were right.
    """
    c = draft.c
    h = draft.blocks(taps, anchors, positions, embd)[:, :, 1:]
    logits = F.linear(h, head).float()
    flat = labels.flatten()
    plain = F.cross_entropy(logits.flatten(0, -2), flat, reduction="none").view(labels.shape)
    before = torch.cat([anchors[..., None], labels[..., :-1]], -1)
    found = logits.detach().topk(c.top_k, -1).indices
    twice = found == labels[..., None]  # the label stands last; not a second time among the others
    candidates = torch.cat([found, labels[..., None]], -1)
    # All edges, then a gather: the gradient of a gather of codebook rows would serialise on the common tokens.
    gate = draft.selector_hidden(h) * F.embedding(before, draft.selector_predecessor.weight)
    score = (logits + F.linear(gate, draft.selector_successor.weight).float()).gather(-1, candidates)
    score = torch.cat([score[..., :-1].masked_fill(twice, float("-inf")), score[..., -1:]], -1)
    selected = torch.logsumexp(score, -1) - score[..., -1]
    loss = ((plain + selected) * weight).sum() / weight.sum().clamp_min(1e-6)
    live = weight > 0
    right = ((score.argmax(-1) == c.top_k) & live).sum((0, 1)) / live.sum((0, 1)).clamp_min(1)
    return loss, right
