"""Train the byte-level BPE, and turn documents into token files.

The split before BPE is the one that GGUF files announce as ``tokenizer.ggml.pre = qwen35``, so any reader of the
exported files cuts text the same way.  All 256 bytes are in the vocabulary: nothing is ever unknown.

Token files are little-endian ``uint16``; every document is followed by ``<|im_end|>``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from corpus import read_documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS, MASK = "<|endoftext|>", "<|im_end|>", "<|mask|>"
SPECIAL = [PAD, EOS, MASK]  # ids 0, 1, 2
PAD_ID, EOS_ID, MASK_ID = 0, 1, 2
SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(documents: list[str], size: int) -> Tokenizer:
    """Byte-level BPE of ``size`` entries, the special tokens first."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tok.train_from_iterator(documents, trainer)
    return tok


def encode(tok: Tokenizer, documents: list[str], batch: int = 1024) -> np.ndarray:
    """All documents as one uint16 array, each closed by EOS."""
    parts: list[np.ndarray] = []
    for i in range(0, len(documents), batch):
        for e in tok.encode_batch_fast(documents[i : i + batch], add_special_tokens=False):
            parts.append(np.asarray([*e.ids, EOS_ID], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="what", required=True)
    t = sub.add_parser("train")
    t.add_argument("documents", type=Path, nargs="+")
    t.add_argument("--out", type=Path, required=True, help="tokenizer.json")
    t.add_argument("--size", type=int, default=8192)
    t.add_argument("--sample", type=int, default=60_000_000, help="characters of text to learn from")
    e = sub.add_parser("encode")
    e.add_argument("documents", type=Path, nargs="+")
    e.add_argument("--tokenizer", type=Path, required=True)
    e.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    documents = [d for p in a.documents for d in read_documents(p) if d]
    if a.what == "train":
        random.Random(1).shuffle(documents)
        total, sample = 0, []
        for d in documents:
            if total < a.sample:
                sample.append(d)
                total += len(d)
        tok = train(sample, a.size)
        tok.save(str(a.out))
        print(f"{tok.get_vocab_size()} entries from {total} characters")
        return
    tok = Tokenizer.from_file(str(a.tokenizer))
    ids = encode(tok, documents)
    ids.tofile(a.out)
    each = sum(map(len, documents)) / len(ids)
    print(f"{a.out.name}: {len(documents)} documents, {len(ids)} tokens, {each:.2f} characters each")


if __name__ == "__main__":
    main()
