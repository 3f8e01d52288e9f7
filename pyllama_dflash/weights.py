"""GGUF tensors as device tensors: mapped where the device reads host memory, uploaded piece by piece elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._native import ffi
from .ggml import Backend, Tensor, TensorSet, Type
from .gguf_file import GGUFFile, TensorInfo
from .models.tensor_table import TensorSpec

_PIECE = 16 << 20
_logger = logging.getLogger(__name__)


class WeightStore:
    """The weights of one file on one device.

    First the model asks for its tensors with :meth:`join` and :meth:`get`, then :meth:`load` brings the data. Matrices
    keep the file's type; vectors become F32, since ggml multiplies and adds in F32.
    """

    def __init__(self, file: GGUFFile, backend: Backend) -> None:
        self.file = file
        self.backend = backend
        capacity = 2 * len(file.tensors) + 1  # every tensor, and those joined from two or more
        with contextlib.ExitStack() as stack:
            self._stored = TensorSet(backend, capacity)
            stack.callback(self._stored.close)
            self._converted = TensorSet(backend, capacity)
            stack.pop_all()
        self._places: list[tuple[Tensor, TensorInfo]] = []
        self._vectors: list[tuple[Tensor, TensorInfo]] = []
        self._copies: list[tuple[Tensor, list[TensorInfo]]] = []
        self._by_name: dict[str, Tensor] = {}
        self._mapping: Any = None

    def __contains__(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.file.tensors

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
            self._by_name[info.name] = tensor
        else:
            tensor = self._stored.new(info.name, kind, *info.shape)
            self._place(tensor, info)
        return tensor

    def _place(self, tensor: Tensor, info: TensorInfo) -> None:
        if tensor.nbytes != info.nbytes:
            raise self.file.error("size disagrees with the type", info.name, info.nbytes, tensor.nbytes)
        self._places.append((tensor, info))
        self._by_name[info.name] = tensor

    def join(self, specs: Sequence[TensorSpec]) -> Tensor | None:
        """Matrices [K, M_i] that :meth:`get` was not asked for yet as one, [K, sum M_i], the first on top.

        One product then does the work of several on the same input. No memory is added: `get` gives windows on it.
        None on devices that map the file, where tensors lie as the file has them, and for types that differ.
        """
        if self.backend.maps_host_memory:
            return None
        infos = [info for spec in specs if (info := spec.find(self.file)) is not None]
        names, types = " + ".join(info.name for info in infos), {info.type_name for info in infos}
        if len(types) != 1:
            _logger.info("%s: separate products, types %s", names, ", ".join(sorted(types)))
            return None
        kind, width = Type(infos[0].type), infos[0].shape[0]
        heights = [info.shape[1] for info in infos]
        whole, first = self._stored.new(names, kind, width, sum(heights)), 0
        for info, height in zip(infos, heights, strict=True):
            self._place(self._stored.rows(info.name, whole, first, height), info)
            first += height
        return whole

    def copy(self, name: str, matrices: Sequence[Tensor]) -> Tensor | None:
        """A copy of matrices [K, M_i] of the file as one, [K, sum M_i], the first on top; None if types or K differ.

        For matrices that are joined with others already.
        """
        width, kind = matrices[0].shape[0], matrices[0].type
        if any(m.shape[0] != width or m.type != kind for m in matrices):
            return None
        infos = [self.file.tensors[m.name] for m in matrices]
        copied = self._converted.new(name, kind, width, sum(m.shape[1] for m in matrices))
        self._copies.append((copied, infos))
        return copied

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
        for tensor, infos in self._copies:
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
