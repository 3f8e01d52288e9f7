"""The target: a ``qwen35`` hybrid decoder (three Gated DeltaNet layers to one full-attention layer) in PyTorch.

Parameter names and layouts are those of the GGUF file, so export is a renaming.  Formulas, with x a row vector:

* RMS(x; w) = w * x / sqrt(mean x^2 + eps).
* Block: h += mixer(RMS(h; attn_norm)); h += down(silu(gate a) * up a) with a = RMS(h; post_attention_norm).
* GDN: u = silu(causal depthwise convolution, 4 taps, of Wqkv x), split into q, k, v; q and k are scaled to
  x / sqrt(sum x^2 + eps) per head; g = ssm_a * softplus(Wa x + dt) <= 0; beta = sigmoid(Wb x).  Value head h
  uses key head h mod Hk.  Per token  S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q / sqrt(size);
  y = Wout (RMS(o; ssm_norm) * silu(Wz x)).
* Attention: Wq x holds, per head, the query and then an output gate; q and k are RMS-normalised per head; rotary
  embedding (pairs i, i + n_rot/2) on the first n_rot dimensions; y = Wo (attention * sigmoid(gate)).

Training runs the recurrence in chunks of 64 tokens (``gdn_chunked``); generation runs it one token at a time
(``gdn_step``).  Both are checked against ``gdn_naive`` in ``check.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


@dataclass(frozen=True)
class TargetConfig:
    n_vocab: int = 8192
    n_embd: int = 512
    n_ff: int = 1536
    n_layer: int = 8
    interval: int = 4  # layer i is full attention iff (i + 1) % interval == 0
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 128
    n_rot: int = 32
    rope_base: float = 1e6
    rope_sections: tuple[int, int, int, int] = (6, 5, 5, 0)  # sums to n_rot / 2; equal axes for text
    state: int = 128
    k_heads: int = 2
    v_heads: int = 4
    conv: int = 4
    eps: float = 1e-6
    context: int = 4096

    def recurrent(self, i: int) -> bool:
        return (i + 1) % self.interval != 0

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, in F32."""
    y = x.float()
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), from elementary functions: the library's backward has other strides compiled than not."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def rope_tables(positions: Tensor, n_rot: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., n_rot/2] for ``positions`` [...]."""
    freq = base ** (-torch.arange(0, n_rot, 2, device=positions.device, dtype=torch.float32) / n_rot)
    angle = positions.float().unsqueeze(-1) * freq
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, dim] by tables [..., n_rot/2]; dimensions past n_rot pass through."""
    half = cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * c - b * s).to(x.dtype), (a * s + b * c).to(x.dtype), rest], -1)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C], C = 8 * 2^n.

    Blocks of 8 by the finite series (I - A)(I + A^2)(I + A^4), then merged pairwise: the lower left block of the
    inverse is -T22 A21 T11.  A series over all of C would cancel catastrophically when keys are alike.
    """

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        c = a.shape[-1]
        lead = a.shape[:-2]
        eye = torch.eye(8, device=a.device, dtype=a.dtype)
        n = c // 8
        d = a.reshape(*lead, n, 8, n, 8).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., n, 8, 8]
        d2 = d @ d
        t = (eye - d) @ (eye + d2)
        t = t @ (eye + d2 @ d2)
        size = 8
        while size < c:
            n = c // (2 * size)
            blocks = a.reshape(*lead, n, 2, size, n, 2, size)
            a21 = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., n, size, size]
            t = t.reshape(*lead, n, 2, size, size)
            t11, t22 = t[..., 0, :, :], t[..., 1, :, :]
            low = -(t22 @ (a21 @ t11))
            top = torch.cat([t11, torch.zeros_like(t11)], -1)
            t = torch.cat([top, torch.cat([low, t22], -1)], -2)  # [..., n, 2 size, 2 size]
            size *= 2
        t = t.reshape(a.shape)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        (t,) = ctx.saved_tensors
        tt = t.transpose(-1, -2)
        return torch.tril(-(tt @ grad @ tt), -1)


def gdn_naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence as written.  q, k [B,T,H,S], v [B,T,H,S], g, beta [B,T,H]; F32 [B,T,H,S]."""
    b, t, h, s = v.shape
    state = torch.zeros(b, h, s, s, device=v.device, dtype=torch.float32)
    out = []
    for i in range(t):
        o, state = gdn_step(q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], state)
        out.append(o)
    return torch.stack(out, 1)


def gdn_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k, v [B,H,S], g, beta [B,H], state [B,H,key,value]."""
    state = state * g.exp()[..., None, None]
    d = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * d[..., None, :]
    return (state * q[..., None]).sum(-2) / math.sqrt(q.shape[-1]), state


def gdn_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence in chunks.  q, k [B,T,Hk,S], v [B,T,Hv,S], g, beta [B,T,Hv], all F32, T % 64 == 0.

    With G the running sum of g inside a chunk, S0 the state at its start and A[t,j] = beta_t exp(G_t - G_j) k_t.k_j
    for j < t, the corrections of the chunk are D = (I + A)^-1 (beta V - beta exp(G) K S0), and
    o_t = (exp(G_t) q_t S0 + sum_{j<=t} exp(G_t - G_j) (q_t.k_j) d_j) / sqrt(S),
    S1 = exp(G_C) S0 + sum_j exp(G_C - G_j) k_j d_j^T.
    """
    b, t, hk, s = k.shape
    hv = v.shape[2]
    n, c, r = t // CHUNK, CHUNK, hv // hk

    def split(x: Tensor, heads: int) -> Tensor:  # [B,T,H,S] -> [B,H,N,C,S]
        return x.reshape(b, n, c, heads, -1).permute(0, 3, 1, 2, 4).contiguous()

    q, k, v = split(q, hk), split(k, hk), split(v, hv)
    beta = beta.reshape(b, n, c, hv).permute(0, 3, 1, 2)
    run = g.reshape(b, n, c, hv).permute(0, 3, 1, 2).cumsum(-1)  # [B,Hv,N,C]
    lower = torch.ones(c, c, device=v.device, dtype=torch.bool).tril()
    decay = (run[..., :, None] - run[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    kk = (k @ k.transpose(-1, -2)).repeat(1, r, 1, 1, 1)  # value head h reads key head h mod Hk
    qk = (q @ k.transpose(-1, -2)).repeat(1, r, 1, 1, 1)
    q, k = q.repeat(1, r, 1, 1, 1), k.repeat(1, r, 1, 1, 1)
    inv = UnitLowerInverse.apply(torch.tril(beta[..., None] * decay * kk, -1))
    up = run.exp()[..., None]
    u = inv @ (beta[..., None] * v)
    w = inv @ (beta[..., None] * up * k)
    k_end = k * (run[..., -1:] - run).exp()[..., None]
    end = run[..., -1].exp()[..., None, None]  # [B,Hv,N,1,1]
    state = torch.zeros(b, hv, s, s, device=v.device, dtype=v.dtype)
    states, deltas = [], []
    for i in range(n):
        d = u[:, :, i] - w[:, :, i] @ state
        states.append(state)
        deltas.append(d)
        state = end[:, :, i] * state + k_end[:, :, i].transpose(-1, -2) @ d
    s0, d = torch.stack(states, 2), torch.stack(deltas, 2)
    o = ((q * up) @ s0 + (qk * decay) @ d) / math.sqrt(s)
    return o.permute(0, 2, 3, 1, 4).reshape(b, t, hv, s)


class Linear(nn.Linear):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)


class Weight(nn.Module):
    """A lone tensor whose GGUF name ends in ``.weight``."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


class Bias(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(value)


def add_recurrent(block: nn.Module, c: TargetConfig) -> None:
    """Parameters of a Gated DeltaNet mixer, as attributes of the block, to keep the GGUF names."""
    kd, vd = c.k_heads * c.state, c.v_heads * c.state
    block.attn_qkv = Linear(c.n_embd, 2 * kd + vd)
    block.attn_gate = Linear(c.n_embd, vd)
    block.ssm_conv1d = Weight(torch.empty(2 * kd + vd, c.conv).uniform_(-0.5, 0.5))
    block.ssm_alpha = Linear(c.n_embd, c.v_heads)
    block.ssm_beta = Linear(c.n_embd, c.v_heads)
    # softplus(dt) is spread evenly in logarithm over 0.001 .. 0.1
    block.ssm_dt = Bias(torch.empty(c.v_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp().expm1().log())
    block.ssm_a_log = nn.Parameter(torch.empty(c.v_heads).uniform_(1, 16).log())
    block.ssm_norm = Weight(torch.ones(c.state))
    block.ssm_out = Linear(vd, c.n_embd)


class Block(nn.Module):
    def __init__(self, c: TargetConfig, index: int) -> None:
        super().__init__()
        self.c = c
        self.is_recurrent = c.recurrent(index)
        self.attn_norm = Weight(torch.ones(c.n_embd))
        self.post_attention_norm = Weight(torch.ones(c.n_embd))
        self.ffn_gate = Linear(c.n_embd, c.n_ff)
        self.ffn_up = Linear(c.n_embd, c.n_ff)
        self.ffn_down = Linear(c.n_ff, c.n_embd)
        if self.is_recurrent:
            add_recurrent(self, c)
        else:
            self.attn_q = Linear(c.n_embd, 2 * c.n_head * c.head_dim)
            self.attn_k = Linear(c.n_embd, c.n_head_kv * c.head_dim)
            self.attn_v = Linear(c.n_embd, c.n_head_kv * c.head_dim)
            self.attn_output = Linear(c.n_head * c.head_dim, c.n_embd)
            self.attn_q_norm = Weight(torch.ones(c.head_dim))
            self.attn_k_norm = Weight(torch.ones(c.head_dim))

    # -- pieces shared by the parallel and the one-token form; x is [..., n_embd] --

    def gdn_parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projection before convolution, z gate, log decay g and beta (F32)."""
        a = softplus(self.ssm_alpha(x).float() + self.ssm_dt.bias)
        return self.attn_qkv(x), self.attn_gate(x), -self.ssm_a_log.exp() * a, torch.sigmoid(self.ssm_beta(x).float())

    def gdn_split(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.c
        kd = c.k_heads * c.state
        q, k, v = u.split([kd, kd, c.v_heads * c.state], -1)
        q = unit(q.unflatten(-1, (c.k_heads, c.state)), c.eps)
        k = unit(k.unflatten(-1, (c.k_heads, c.state)), c.eps)
        return q, k, v.unflatten(-1, (c.v_heads, c.state)).float()

    def gdn_finish(self, o: Tensor, z: Tensor) -> Tensor:
        y = rms(o, self.ssm_norm.weight, self.c.eps) * F.silu(z.float()).unflatten(-1, (self.c.v_heads, self.c.state))
        return self.ssm_out(y.flatten(-2).to(z.dtype))

    def attention_parts(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated q and k, v, and the output gate; heads on the axis before the last."""
        c = self.c
        qg = self.attn_q(x).unflatten(-1, (c.n_head, 2 * c.head_dim))
        q, gate = qg[..., : c.head_dim], qg[..., c.head_dim :]
        k = self.attn_k(x).unflatten(-1, (c.n_head_kv, c.head_dim))
        v = self.attn_v(x).unflatten(-1, (c.n_head_kv, c.head_dim))
        q = rope(rms(q, self.attn_q_norm.weight, c.eps), cos, sin)
        k = rope(rms(k, self.attn_k_norm.weight, c.eps), cos, sin)
        return q, k, v, gate

    def ffn(self, h: Tensor) -> Tensor:
        x = rms(h, self.post_attention_norm.weight, self.c.eps)
        return h + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))

    # -- a whole sequence --

    def mix_recurrent(self, x: Tensor) -> Tensor:
        c = self.c
        m, z, g, beta = self.gdn_parts(x)
        t = m.shape[1]
        padded = F.pad(m, (0, 0, c.conv - 1, 0)).float()
        w = self.ssm_conv1d.weight
        u = F.silu(sum(padded[:, j : j + t] * w[:, j] for j in range(c.conv)))
        q, k, v = self.gdn_split(u)
        extra = -t % CHUNK
        if extra:
            q, k, v = (F.pad(y, (0, 0, 0, 0, 0, extra)) for y in (q, k, v))
            g, beta = F.pad(g, (0, 0, 0, extra)), F.pad(beta, (0, 0, 0, extra))
        with torch.autocast(x.device.type, enabled=False):
            o = gdn_chunked(q, k, v, g, beta)[:, :t]
        return self.gdn_finish(o, z)

    def mix_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.c
        q, k, v, gate = self.attention_parts(x, cos, sin)
        r = c.n_head // c.n_head_kv
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        o = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True).transpose(1, 2)
        return self.attn_output((o * torch.sigmoid(gate.float()).to(o.dtype)).flatten(-2))

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = rms(h, self.attn_norm.weight, self.c.eps)
        y = self.mix_recurrent(x) if self.is_recurrent else self.mix_attention(x, cos, sin)
        return self.ffn(h + y)


class Target(nn.Module):
    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.token_embd = Weight(torch.randn(c.n_vocab, c.n_embd) * 0.5)
        self.blk = nn.ModuleList([Block(c, i) for i in range(c.n_layer)])
        self.output_norm = Weight(torch.ones(c.n_embd))
        self.output = Linear(c.n_embd, c.n_vocab)
        for name, p in self.named_parameters():
            if p.dim() == 2 and "conv1d" not in name and "token_embd" not in name:
                closing = any(s in name for s in ("ffn_down", "attn_output", "ssm_out"))
                std = 0.0 if closing or name == "output.weight" else 0.5 / math.sqrt(p.shape[1])
                nn.init.normal_(p, std=std)

    def hidden(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Stream after the last layer [B,T,D], and the streams entering the layers ``taps``."""
        position = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rope_tables(position, self.c.n_rot, self.c.rope_base)
        h = F.embedding(ids, self.token_embd.weight)
        seen: dict[int, Tensor] = {}
        for i, block in enumerate(self.blk):
            seen[i] = h
            h = block(h, cos, sin)
        return h, [seen[i] for i in taps]

    def logits(self, h: Tensor) -> Tensor:
        return self.output(rms(h, self.output_norm.weight, self.c.eps))

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids)[0])

    # -- names and values as the GGUF file holds them --

    def gguf_tensors(self) -> dict[str, Tensor]:
        out = {}
        for name, p in self.state_dict().items():
            out[name.replace("ssm_a_log", "ssm_a")] = -p.float().exp() if name.endswith("ssm_a_log") else p.float()
        return out

    def load_gguf_tensors(self, tensors: dict[str, Tensor]) -> None:
        own = {}
        for name in self.state_dict():
            source = tensors[name.replace("ssm_a_log", "ssm_a")].float()
            own[name] = (-source).log() if name.endswith("ssm_a_log") else source
        self.load_state_dict(own)


class Stepper:
    """One-token decoding of a fixed batch; all rows are at the same position.

    ``recurrence`` is ``gdn_step`` or a compiled form of it: it moves nearly all of the bytes.
    """

    def __init__(
        self,
        model: Target,
        batch: int,
        length: int,
        cache_type: torch.dtype,
        recurrence: Callable[..., tuple[Tensor, Tensor]] = gdn_step,
    ) -> None:
        c, dev = model.c, model.token_embd.weight.device
        self.model, self.length, self.recurrence, self.position = model, length, recurrence, 0
        channels = 2 * c.k_heads * c.state + c.v_heads * c.state
        rec = [i for i in range(c.n_layer) if c.recurrent(i)]
        full = [i for i in range(c.n_layer) if not c.recurrent(i)]
        self.state = {i: torch.zeros(batch, c.v_heads, c.state, c.state, device=dev) for i in rec}
        self.window = {i: torch.zeros(batch, c.conv - 1, channels, device=dev) for i in rec}
        shape = (batch, c.n_head_kv, length, c.head_dim)
        self.k = {i: torch.zeros(shape, device=dev, dtype=cache_type) for i in full}
        self.v = {i: torch.zeros(shape, device=dev, dtype=cache_type) for i in full}
        self.cos, self.sin = rope_tables(torch.arange(length, device=dev), c.n_rot, c.rope_base)

    def mix(self, i: int, block: Block, x: Tensor) -> Tensor:
        c = block.c
        if block.is_recurrent:
            m, z, g, beta = block.gdn_parts(x)
            window = torch.cat([self.window[i], m.float()[:, None]], 1)  # [B,conv,channels]
            u = F.silu((window * block.ssm_conv1d.weight.T).sum(1))
            self.window[i] = window[:, 1:]
            q, k, v = block.gdn_split(u)
            r = c.v_heads // c.k_heads
            o, self.state[i] = self.recurrence(q.repeat(1, r, 1), k.repeat(1, r, 1), v, g, beta, self.state[i])
            return block.gdn_finish(o, z)
        at = self.position
        q, k, v, gate = block.attention_parts(x, self.cos[at], self.sin[at])
        self.k[i][:, :, at] = k.to(self.k[i].dtype)
        self.v[i][:, :, at] = v.to(self.v[i].dtype)
        keys, values = self.k[i][:, :, : at + 1], self.v[i][:, :, : at + 1]
        r = c.n_head // c.n_head_kv
        qs = q.unflatten(1, (c.n_head_kv, r)).to(keys.dtype)  # query head h reads kv head h // r
        p = ((qs @ keys.transpose(-1, -2)).float() / math.sqrt(c.head_dim)).softmax(-1)
        o = (p.to(values.dtype) @ values).flatten(1, 2)
        return block.attn_output((o * torch.sigmoid(gate.float()).to(o.dtype)).flatten(-2).to(x.dtype))

    def step(self, ids: Tensor) -> Tensor:
        """Logits [B,V] (F32) after tokens ``ids`` [B]; advances the position."""
        h = F.embedding(ids, self.model.token_embd.weight)
        for i, block in enumerate(self.model.blk):
            h = block.ffn(h + self.mix(i, block, rms(h, block.attn_norm.weight, block.c.eps)))
        self.position += 1
        return self.model.logits(h).float()
