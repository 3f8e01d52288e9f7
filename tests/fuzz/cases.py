"""One case: a mutated file through everything that opens files, and when it is taken, through some of what uses it."""

from __future__ import annotations

import random
from pathlib import Path

from tiny_pair import TinyPair

from pyllama_dflash import DeviceError, Engine, FileError, RequestError
from pyllama_dflash.gguf_file import GGUFFile
from pyllama_dflash.models.dflash import DFlashParams
from pyllama_dflash.models.pair import check_pair
from pyllama_dflash.models.qwen35 import Qwen35Params
from pyllama_dflash.tokenizer import Tokenizer

from .mutate import mutated, take_apart

SMALL = {
    "n_vocab": 260, "n_embd": 32, "n_ff": 32, "n_layer": 2, "interval": 2, "n_head": 2, "n_head_kv": 1, "head_dim": 16,
    "rope_dims": 8, "n_k_heads": 1, "n_v_heads": 2, "state_size": 16, "context": 64, "draft_layers": 1,
    "draft_heads": 2, "draft_kv_heads": 1, "draft_head_dim": 16, "top_k": 4, "taps": (1,),
}  # fmt: skip
TARGETS = ({}, {"recurrent": "bool", "tied": True}, {"mtp": True, "recurrent": "i32", "embedding": "F16"})
DRAFTS = ({}, {"dflash2": False, "window": 0}, {"other_spelling": True, "codebooks": "F16", "draft_sections": False})
_TEXT = "def f(x):\n    return 'é' + x  # 1234\0"


class Cases:
    """The cases of a seed, each the same whenever and wherever it is run. Files are written into `folder`.

    One in `every` of the files that are taken is loaded with its weights and generates a few tokens.
    """

    def __init__(self, seed: int, folder: Path, every: int = 100) -> None:
        self._seed = seed
        self._every = every
        self._path = folder / "mutated.gguf"
        self._target, self._draft = TinyPair(**SMALL).write(folder, "good")
        self._bases = [
            take_apart(pair.write(folder, "base")[i].read_bytes())
            for i, variants in enumerate((TARGETS, DRAFTS))
            for pair in (TinyPair(**{**SMALL, **options}) for options in variants)
        ]
        self._good = GGUFFile(self._target)
        self._params = Qwen35Params.from_file(self._good)

    def content(self, case: int) -> bytes:
        """The file of a case."""
        return mutated(self._random(case), self._bases[case % len(self._bases)])

    def run(self, case: int) -> str:
        """Why the file was refused, or "" if it was taken. Any other exception is a fault of ours."""
        self._path.write_bytes(self.content(case))
        is_draft = case % len(self._bases) >= len(TARGETS)
        try:
            self._open_draft() if is_draft else self._open_target()
            if self._random(-case).randrange(self._every) == 0:
                self._generate(is_draft)
        except FileError as error:
            return error.reason
        return ""

    def close(self) -> None:
        """Close what is open."""
        self._good.close()

    def _random(self, case: int) -> random.Random:
        return random.Random(f"{self._seed}/{case}")

    def _open_target(self) -> None:
        with GGUFFile(self._path) as file:
            Qwen35Params.from_file(file)
            with Tokenizer(file) as tokenizer:
                tokenizer.decode(tokenizer.encode(_TEXT, parse_special=True), special=True)
                tokenizer.decode(range(tokenizer.n_vocab))

    def _open_draft(self) -> None:
        with GGUFFile(self._path) as file:
            check_pair(self._params, self._good, DFlashParams.from_file(file), file)

    def _generate(self, is_draft: bool) -> None:
        """Weights may be any bits: text or an error about the device, nothing else."""
        pair = (self._target, self._path) if is_draft else (self._path, self._draft)
        try:
            with Engine.load(*pair, device="cpu", n_ctx=32, threads=1, progress=False) as engine:
                engine.generate([1, 2, 3], max_tokens=4)
                if not is_draft:
                    engine.tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
        except (DeviceError, RequestError):  # logits that are no numbers; n_ctx; a template that fails
            pass
