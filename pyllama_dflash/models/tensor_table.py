"""How a model says which tensors it has.

A model's tensors are written down once, in its `bind` function, which asks a :class:`Source` for each by a
:class:`TensorSpec`. Binding with :class:`FileTensors` checks a file; binding with a source of device tensors makes the
weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from ..ggml.tensors import Type
from ..gguf_file import GGUFFile, TensorInfo
from .metadata import one_of

VECTOR_TYPES = frozenset({Type.F32, Type.F16, Type.BF16})
MATRIX_TYPES = frozenset(Type) - {Type.I32, Type.I64}

Kind = Literal["matrix", "vector"]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor a model asks for: its name, other spellings, shape (first varies fastest), and whether it may lack.

    A "matrix" is multiplied or gathered from and may be quantised; a "vector" is used element by element and is F32,
    F16 or BF16.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "matrix"
    required: bool = True
    also: tuple[str, ...] = ()

    def find(self, file: GGUFFile) -> TensorInfo | None:
        """The file's tensor, None if it is optional and missing; FileError if it does not fit."""
        info = next((file.tensors[n] for n in (self.name, *self.also) if n in file.tensors), None)
        if info is None:
            if self.required:
                raise file.error("tensor is missing", self.name, "nothing", f"{self.kind} {list(self.shape)}")
            return None
        if info.shape != _trimmed(self.shape):
            raise file.error("tensor has the wrong shape", info.name, list(info.shape), list(self.shape))
        types = MATRIX_TYPES if self.kind == "matrix" else VECTOR_TYPES
        if info.type not in types:
            expected = one_of(sorted(t.name for t in types))
            raise file.error("tensor type is not supported", info.name, info.type_name, expected)
        return info


@dataclass(frozen=True)
class Linear(Generic[T]):
    """A weight matrix [n_in, n_out] and, in some quantisation flows, a scalar [1] that multiplies its product."""

    weight: T
    scale: T | None = None


@dataclass(frozen=True)
class Stack(Generic[T]):
    """Matrices [n_in, m_i] of one input, and where there can be one, the matrix [n_in, sum m_i] of all their rows.

    With a `whole`, the weights of `parts` are windows on it. Multiply by the whole (:func:`.layers.products`): a device
    may rearrange a matrix that it multiplies by, and then its windows are no matrices any more.
    """

    parts: tuple[Linear[T], ...]
    whole: T | None


class Source(Protocol[T_co]):
    """Where a model's tensors come from."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def get(self, spec: TensorSpec) -> T_co | None:
        """The tensor for `spec`, None when it is optional and absent."""
        ...

    def join(self, specs: Sequence[TensorSpec]) -> T_co | None:
        """One matrix whose rows are those of the matrices `specs`, none of which was asked for yet: :meth:`get` gives
        windows on it from now on. None where there cannot be one."""
        ...


class Binder(Generic[T]):
    """Asks `source` for tensors; a required one that it does not have is an error of the source's maker."""

    def __init__(self, source: Source[T]) -> None:
        self._source = source

    def tensor(self, name: str, *shape: int, kind: Kind = "matrix", also: tuple[str, ...] = ()) -> T:
        """A required tensor."""
        found = self._source.get(TensorSpec(name, shape, kind, True, also))
        if found is None:
            raise LookupError(f"required tensor {name} was not bound")
        return found

    def optional(self, name: str, *shape: int, kind: Kind = "matrix", also: tuple[str, ...] = ()) -> T | None:
        """A tensor that may be missing."""
        return self._source.get(TensorSpec(name, shape, kind, False, also))

    def vector(self, name: str, *shape: int, also: tuple[str, ...] = ()) -> T:
        """A required tensor of an element-wise type."""
        return self.tensor(name, *shape, kind="vector", also=also)

    def linear(self, name: str, n_in: int, n_out: int, also: tuple[str, ...] = ()) -> Linear[T]:
        """`name`.weight [n_in, n_out] with its optional `name`.scale [1]."""
        return Linear(self.tensor(f"{name}.weight", n_in, n_out, also=also), self._scale(name))

    def optional_linear(self, name: str, n_in: int, n_out: int) -> Linear[T] | None:
        """Like :meth:`linear`, or None if there is no weight."""
        weight = self.optional(f"{name}.weight", n_in, n_out)
        return None if weight is None else Linear(weight, self._scale(name))

    def stack(self, n_in: int, *parts: tuple[str, int], optional: Sequence[tuple[str, int]] = ()) -> Stack[T]:
        """Several :meth:`linear` of one input, each (name, n_out); behind them those of `optional` that are there.

        A scale belongs to the rows of its part alone, so with one there is no whole.
        """
        there = [*parts, *(part for part in optional if f"{part[0]}.weight" in self._source)]
        scaled = any(f"{name}.scale" in self._source for name, _ in there)
        specs = [TensorSpec(f"{name}.weight", (n_in, n_out)) for name, n_out in there]
        whole = None if scaled else self._source.join(specs)
        return Stack(tuple(self.linear(name, n_in, n_out) for name, n_out in there), whole)

    def _scale(self, name: str) -> T | None:
        return self.optional(f"{name}.scale", 1, kind="vector")


class FileTensors:
    """The source that looks in the file; `used` are the names it has returned so far."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """See :class:`Source`."""
        return name in self._file.tensors

    def get(self, spec: TensorSpec) -> TensorInfo | None:
        """See :class:`Source`."""
        info = spec.find(self._file)
        if info is not None:
            self.used.add(info.name)
        return info

    def join(self, _specs: Sequence[TensorSpec]) -> TensorInfo | None:
        """Files hold tensors one by one."""
        return None


def refuse_unknown(file: GGUFFile, used: Collection[str], model: str) -> None:
    """A tensor nobody asked for means a model variant this code does not compute: FileError that names it."""
    for name in file.tensors:
        if name not in used:
            shape = list(file.tensors[name].shape)
            raise file.error(f"tensor is not part of a {model} model", name, shape, "no such tensor")


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
