"""From files to a target and its draft on one device, or an exception with nothing left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from .ggml import Backend, DeviceInfo, choose_device
from .gguf_file import GGUFFile
from .models import dflash, qwen35
from .models.dflash_weights import append_parts
from .models.pair import check_pair
from .round import Models
from .tokenizer import Tokenizer
from .weights import WeightStore

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Loaded:
    """Everything an engine holds; `resources` closes it in reverse order of opening."""

    models: Models
    tokenizer: Tokenizer
    backend: Backend
    device: DeviceInfo
    device_reason: str
    weight_bytes: int
    resources: contextlib.ExitStack


def load(
    target: Path, draft: Path | None, device: str, threads: int | None, progress: bool | None,
    accept: Callable[[qwen35.Qwen35Params], object] | None = None,
) -> Loaded:  # fmt: skip
    """Open, check and place a target and, if given, its draft. Files and pair are checked before any weight moves.

    So is what the caller asks of the target: `accept` raises if it cannot be had.
    """
    with contextlib.ExitStack() as stack:
        target_file = stack.enter_context(GGUFFile(target))
        params = qwen35.Qwen35Params.from_file(target_file)
        if accept is not None:
            accept(params)
        draft_file, draft_params = None, None
        if draft is not None:
            draft_file = stack.enter_context(GGUFFile(draft))
            draft_params = dflash.DFlashParams.from_file(draft_file)
            check_pair(params, target_file, draft_params, draft_file)
        info, reason = choose_device(device)
        tokenizer = Tokenizer(target)
        stack.callback(tokenizer.close)
        backend = Backend(info, threads)
        stack.callback(backend.close)
        store = WeightStore(target_file, backend)
        stack.callback(store.close)
        weights = qwen35.bind(params, store)
        store.load(progress)
        size, draft_weights = store.nbytes, None
        if draft_file is not None and draft_params is not None:
            draft_store = WeightStore(draft_file, backend)
            stack.callback(draft_store.close)
            draft_weights = dflash.bind(draft_params, draft_store)
            if parts := append_parts(draft_weights):
                draft_weights = replace(draft_weights, append=draft_store.copy("append", parts))
            draft_store.load(progress)
            size += draft_store.nbytes
        models = Models(params, weights, draft_params, draft_weights)
        return Loaded(models, tokenizer, backend, info, reason, size, stack.pop_all())
