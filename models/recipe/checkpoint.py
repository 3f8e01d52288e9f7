"""Checkpoints that travel in small pieces.

Matrices are stored as BF16 in two byte planes: the low bytes (mantissa, incompressible) as they are, the high bytes
(sign and exponent) compressed.  Everything else is F32.  The container is cut into parts of a given size.
"""

from __future__ import annotations

import json
import lzma
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAGIC = b"CKPT1\0\0\0"


def save(prefix: Path, tensors: dict[str, Tensor], config: dict[str, object], part_bytes: int = 15 << 20) -> list[Path]:
    """Write ``prefix.0``, ``prefix.1``, ...; returns the paths."""
    entries: list[dict[str, object]] = []
    high: list[bytes] = []
    low: list[bytes] = []
    full: list[bytes] = []
    for name, t in tensors.items():
        t = t.detach().cpu().contiguous()
        half = t.dim() >= 2 and t.numel() > 4096
        entries.append({"name": name, "shape": list(t.shape), "half": half})
        if half:
            planes = t.to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1, 2)
            low.append(planes[:, 0].tobytes())
            high.append(planes[:, 1].tobytes())
        else:
            full.append(t.float().numpy().tobytes())
    packed = lzma.compress(b"".join(high), preset=1)
    lows, fulls = b"".join(low), b"".join(full)
    header = json.dumps({"config": config, "tensors": entries, "sizes": [len(packed), len(lows), len(fulls)]}).encode()
    blob = MAGIC + struct.pack("<Q", len(header)) + header + packed + lows + fulls
    paths = []
    for i in range(0, len(blob), part_bytes):
        path = prefix.with_name(f"{prefix.name}.{len(paths)}")
        path.write_bytes(blob[i : i + part_bytes])
        paths.append(path)
    return paths


def load(prefix: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Join the parts of ``prefix``; returns F32 tensors and the stored configuration."""
    blob = b""
    n = 0
    while (path := prefix.with_name(f"{prefix.name}.{n}")).exists():
        blob += path.read_bytes()
        n += 1
    if blob[:8] != MAGIC:
        raise ValueError(f"{prefix}.0: not a checkpoint")
    size = struct.unpack("<Q", blob[8:16])[0]
    header = json.loads(blob[16 : 16 + size])
    n_packed, n_low, n_full = header["sizes"]
    if len(blob) != 16 + size + n_packed + n_low + n_full:
        raise ValueError(f"{prefix}: a part is missing or cut short")
    at = 16 + size
    high = np.frombuffer(lzma.decompress(blob[at : at + n_packed]), np.uint8)
    low = np.frombuffer(blob[at + n_packed : at + n_packed + n_low], np.uint8)
    full = np.frombuffer(blob[at + n_packed + n_low :], np.float32)
    tensors: dict[str, Tensor] = {}
    i = j = 0
    for e in header["tensors"]:
        count = int(np.prod(e["shape"]))
        if e["half"]:
            planes = np.stack([low[i : i + count], high[i : i + count]], 1)
            tensors[e["name"]] = torch.from_numpy(planes.reshape(-1)).view(torch.bfloat16).float().reshape(e["shape"])
            i += count
        else:
            tensors[e["name"]] = torch.from_numpy(full[j : j + count].copy()).reshape(e["shape"])
            j += count
    return tensors, header["config"]
