"""Numbers for the model card, from the exported files: held-out loss of the target, acceptance of the pair."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import prompts as prompt_source
import torch
from acceptance import measure
from corpus import read_documents
from gguf_io import load_draft, load_target
from tokenizer import encode
from tokenizers import Tokenizer
from train_target import held_out_loss


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", type=Path, required=True)
    ap.add_argument("--draft", type=Path)
    ap.add_argument("--tokenizer", type=Path, required=True)
    ap.add_argument("--held-out", type=Path, required=True, help="held-out documents")
    ap.add_argument("--prompts", type=Path, help="JSON list of prompts")
    ap.add_argument("--rows", type=int, default=64, help="windows of the held-out text for the loss")
    ap.add_argument("--length", type=int, default=1024)
    ap.add_argument("--measure-prompts", type=int, default=64)
    ap.add_argument("--measure-tokens", type=int, default=128)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--jobs", type=int, default=2)
    a = ap.parse_args()
    amp = a.device.startswith("cuda")
    tok = Tokenizer.from_file(str(a.tokenizer))
    target = load_target(a.target).to(a.device).requires_grad_(False)
    documents = read_documents(a.held_out)
    stream = torch.from_numpy(encode(tok, documents).astype("int32")).to(a.device)
    loss = held_out_loss(target, stream, a.length, a.rows, amp)
    report: dict[str, object] = {
        "loss": loss,
        "bits_per_character": loss / math.log(2) * len(stream) / sum(map(len, documents)),
    }
    if a.draft:
        draft = load_draft(a.draft).to(a.device)
        cut = prompt_source.build(documents, a.tokenizer, 2, 2, 160, a.jobs)[: a.measure_prompts]
        report["held_out"] = measure(draft, target, cut, a.measure_tokens, draft.c.top_k, amp, a.device)
        if a.prompts:
            more = [tok.encode(p, add_special_tokens=False).ids for p in json.loads(a.prompts.read_text())]
            report["prompts"] = measure(draft, target, more, a.measure_tokens, draft.c.top_k, amp, a.device)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
