"""Self-checks of the target's math; run by the training scripts before they spend time, or alone.

* chunked recurrence against the token-by-token one, values and gradients, with keys that are nearly alike;
* one-token decoding against the parallel forward.
"""

from __future__ import annotations

import argparse

import torch
from target import Stepper, Target, TargetConfig, gdn_chunked, gdn_naive, unit
from torch import Tensor


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def check_chunked(device: str) -> float:
    """Largest relative difference of output and gradients between the chunked and the naive recurrence."""
    torch.manual_seed(0)
    b, t, hk, hv, s = 2, 192, 2, 4, 128
    base = torch.randn(1, 1, hk, s, device=device)
    q = unit(torch.randn(b, t, hk, s, device=device) + base, 1e-6).requires_grad_()
    k = unit(torch.randn(b, t, hk, s, device=device) * 0.3 + base, 1e-6).requires_grad_()
    v = torch.randn(b, t, hv, s, device=device, requires_grad=True)
    g = (-torch.rand(b, t, hv, device=device) * 0.3).requires_grad_()
    beta = torch.rand(b, t, hv, device=device).requires_grad_()
    inputs = (q, k, v, g, beta)
    seed = torch.randn(b, t, hv, s, device=device)
    fast = gdn_chunked(*inputs)
    fast_grads = torch.autograd.grad((fast * seed).sum(), inputs)
    slow = gdn_naive(q.repeat(1, 1, hv // hk, 1), k.repeat(1, 1, hv // hk, 1), v, g, beta)
    slow_grads = torch.autograd.grad((slow * seed).sum(), inputs)
    return max([relative(fast, slow), *(relative(x, y) for x, y in zip(fast_grads, slow_grads, strict=True))])


@torch.no_grad()
def check_step(model: Target, ids: Tensor) -> float:
    """Relative difference of logits between decoding ``ids`` [B,T] one by one and all at once."""
    stepper = Stepper(model, ids.shape[0], ids.shape[1], torch.float32)
    one = torch.stack([stepper.step(ids[:, i]) for i in range(ids.shape[1])], 1)
    return relative(one, model(ids).float())


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", default="cpu")
    a = ap.parse_args()
    print("chunked against naive:", check_chunked(a.device))
    torch.manual_seed(0)
    c = TargetConfig(n_vocab=256, n_embd=256, n_ff=256, n_layer=4)
    model = Target(c).to(a.device)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.add_(torch.randn_like(p) * 0.05)
    ids = torch.randint(0, c.n_vocab, (2, 150), device=a.device)
    print("step against parallel:", check_step(model, ids))


if __name__ == "__main__":
    main()
