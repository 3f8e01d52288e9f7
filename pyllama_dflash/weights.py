"""GGUF tensors as device tensors: mapped where the device reads host memory, uploaded piece by piece elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._native import ffi
from .ggml import Backend, Tensor, TensorSet, Type
from .gguf_file import GGUFFile, TensorInfo
from .models.metadata import TensorSpec

_PIECE = 16 << 20


class WeightStore:
    """The weights of one file on one device.

    First the model asks for its tensors with :meth:`get`, then :meth:`load` brings the data. Matrices keep the file's
    type; vectors become F32, since ggml multiplies and adds in F32.
    """

    def __init__(self, file: GGUFFile, backend: Backend) -> None:
        self.file = file
        self.backend = backend
        capacity = len(file.tensors) + 1
        self._stored = TensorSet(backend, capacity)
        self._converted = TensorSet(backend, capacity)
        self._places: list[tuple[Tensor, TensorInfo]] = []
        self._vectors: list[tuple[Tensor, TensorInfo]] = []
        self._stacks: list[tuple[Tensor, list[TensorInfo]]] = []
        self._by_name: dict[str, Tensor] = {}
        self._mapping: Any = None

    def get(self, spec: TensorSpec) -> Tensor | None:
        """The tensor for `spec`, None when it is optional and absent. Data comes with :meth:`load`."""
        info = spec.find(self.file)
        if info is None:
            return None
        if info.name in self._by_name:
            return self._by_name[info.name]
        kind = Type(info.type)
        if spec.kind == "vector" and kind != Type.F32:
            tensor = self._converted.new(info.name, Type.F32, *info.shape)
            self._vectors.append((tensor, info))
        else:
            tensor = self._stored.new(info.name, kind, *info.shape)
            self._places.append((tensor, info))
        if tensor.nbytes != info.nbytes and tensor.type == kind:
            raise self.file.error("size disagrees with the type", info.name, info.nbytes, tensor.nbytes)
        self._by_name[info.name] = tensor
        return tensor

    def stack(self, name: str, matrices: Sequence[Tensor]) -> Tensor | None:
        """A copy of matrices [K, M_i] of the file as one, [K, sum M_i], the first on top; None if types or K differ.

        One product then does the work of several on the same input.
        """
        width, kind = matrices[0].shape[0], matrices[0].type
        if any(m.shape[0] != width or m.type != kind for m in matrices):
            return None
        infos = [self.file.tensors[m.name] for m in matrices]
        stacked = self._converted.new(name, kind, width, sum(m.shape[1] for m in matrices))
        self._stacks.append((stacked, infos))
        return stacked

    def load(self, progress: bool | None = None) -> None:
        """Bring the data. `progress` shows a bar; None = only on a terminal."""
        self._mapping = self.file.mapping()
        if self.backend.maps_host_memory:
            if self._places:
                buffer = self.backend.wrap_host_memory(self._mapping, len(self._mapping))
                self._stored.map(buffer, self._mapping, [(tensor, info.offset) for tensor, info in self._places])
        else:
            self._upload(progress)
        self._converted.allocate(weights=True)
        for tensor, info in self._vectors:
            tensor.set(_as_f32(self._bytes(info), Type(info.type)))
        for tensor, infos in self._stacks:
            offset = 0
            for info in infos:
                tensor.set(self._bytes(info), offset)
                offset += info.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of weights the model uses."""
        return sum(info.nbytes for _, info in self._places) + self._converted.nbytes

    def close(self) -> None:
        """Release device memory and the mapping. Idempotent; the file itself stays open."""
        self._stored.close()
        self._converted.close()
        if self._mapping is not None:
            ffi.release(self._mapping)
            self._mapping = None

    def _bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        return np.frombuffer(ffi.buffer(self._mapping), np.uint8, info.nbytes, info.offset)

    def _upload(self, progress: bool | None) -> None:
        from tqdm import tqdm

        self._stored.allocate(weights=True)
        total = sum(info.nbytes for _, info in self._places)
        hidden = not progress if progress is not None else not sys.stderr.isatty()
        name = Path(self.file.path).name
        with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=hidden, leave=False) as bar:
            for tensor, info in self._places:
                data = self._bytes(info)
                for start in range(0, info.nbytes, _PIECE):
                    piece = data[start : start + _PIECE]
                    tensor.set(piece, start)
                    bar.update(piece.nbytes)


def _as_f32(raw: NDArray[np.uint8], kind: Type) -> NDArray[np.float32]:
    if kind == Type.F16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
