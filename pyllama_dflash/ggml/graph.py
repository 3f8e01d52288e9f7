"""A graph that is built once, keeps its inputs and allocator, and runs as often as its data changes."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._native import ffi, lib
from ..errors import DeviceError, DeviceLost, EngineClosed
from . import logs
from .devices import Backend
from .dflash_ops import DflashOps, PathName
from .tensors import ShapeError, Tensor, TensorSet, Type, new_context

_TENSORS_A_CONTEXT = 1024
_NO_COMPUTE = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


class Graph(DflashOps):
    """Nodes, inputs, allocator and backend as one object with an explicit close.

    Inputs live in a buffer of their own, so they keep their values between runs. Nodes with effects (writes into
    caches and states) run in the order in which :meth:`effect` was called for them.
    """

    def __init__(self, backend: Backend, max_nodes: int = 1 << 17, max_inputs: int = 64) -> None:
        self.backend = backend
        self.max_nodes = max_nodes
        self.paths: Counter[tuple[str, PathName]] = Counter()
        self.refusals: dict[str, str] = {}
        self.closed = False
        self._inputs = TensorSet(backend, max_inputs)
        self._contexts: list[Any] = []
        self._scheduled: list[Tensor] = []
        self._constants: list[tuple[Tensor, NDArray[np.float32]]] = []
        self._graph: Any = None
        self._allocator: Any = None
        self._made = 0

    # -- building ----------------------------------------------------------------------------------------------

    @property
    def context(self) -> Any:
        """The native context new nodes go to: another one whenever the last is nearly full."""
        if self.closed:
            raise EngineClosed("graph used after it was closed")
        if self._made >= self.max_nodes:
            raise ShapeError(f"graph has more than {self.max_nodes} tensors")
        if not self._contexts or not _has_room(self._contexts[-1]):
            self._contexts.append(new_context(_TENSORS_A_CONTEXT))
        return self._contexts[-1]

    def wrap(self, ptr: Any) -> Tensor:
        """A handle on a new node."""
        self._made += 1
        return Tensor(ptr, self)

    def input(self, name: str, kind: Type, *shape: int) -> Tensor:
        """A tensor the caller fills before runs; it keeps its value."""
        tensor = self._inputs.new(name, kind, *shape)
        lib.ggml_set_input(tensor.ptr)
        return tensor

    def constant(self, name: str, values: NDArray[np.float32]) -> Tensor:
        """An F32 tensor of these values, the same in every run."""
        tensor = self.input(name, Type.F32, *values.shape[::-1])
        self._constants.append((tensor, values))
        return tensor

    def effect(self, node: Tensor) -> Tensor:
        """Run `node` (and what it needs) behind everything scheduled so far."""
        self._scheduled.append(node)
        return node

    def output(self, node: Tensor, name: str) -> Tensor:
        """Schedule `node` and keep its memory readable after the run. Not for views: their memory is another node's."""
        lib.ggml_set_output(node.ptr)
        lib.ggml_set_name(node.ptr, name.encode()[:63])
        return self.effect(node)

    def computes(self, node: Tensor) -> bool:
        """Whether the device that the graph is for computes `node`."""
        return self.backend.supports(node)

    def build(self) -> None:
        """Order the nodes, check each against the device and allocate. Call once, after the last output."""
        if self._allocator is not None:
            raise ShapeError("graph is built already")
        self._inputs.allocate()
        for tensor, values in self._constants:
            tensor.set(values)
        size = 2 * self._made + _TENSORS_A_CONTEXT
        self._contexts.append(new_context(1, lib.ggml_graph_overhead_custom(size, False)))
        self._graph = lib.ggml_new_graph_custom(self._contexts[-1], size, False)
        for node in self._scheduled:
            lib.ggml_build_forward_expand(self._graph, node.ptr)
        for i in range(lib.ggml_graph_n_nodes(self._graph)):
            ptr = lib.ggml_graph_node(self._graph, i)
            if op_name(ptr) not in _NO_COMPUTE and not self.computes(Tensor(ptr, self)):
                shapes = [list(Tensor(s, self).shape) for s in ptr.src if s != ffi.NULL]
                raise DeviceError(f"{self.backend.device.name} does not compute {op_name(ptr)} on {shapes}")
        self._allocator = lib.ggml_gallocr_new(self.backend.buffer_type)
        if not lib.ggml_gallocr_alloc_graph(self._allocator, self._graph):
            raise DeviceError(f"{self.backend.device.name}: no memory for a graph: {logs.native_log_tail()}")

    # -- running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Compute all nodes. The GIL is free meanwhile. DeviceLost when it fails otherwise than for want of memory."""
        if self._allocator is None:
            raise ShapeError("graph is not built")
        status = lib.ggml_backend_graph_compute(self.backend.ptr, self._graph)
        if status != lib.GGML_STATUS_SUCCESS:
            failed = DeviceError if status == lib.GGML_STATUS_ALLOC_FAILED else DeviceLost
            raise failed(f"{self.backend.device.name}: compute failed ({status}): {logs.native_log_tail()}")

    @property
    def nodes(self) -> Counter[str]:
        """How many nodes of each op the built graph has; our own go by their sub-op."""
        if self._graph is None:
            raise ShapeError("graph is not built")
        graph = self._graph
        return Counter(op_name(lib.ggml_graph_node(graph, i)) for i in range(lib.ggml_graph_n_nodes(graph)))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for inputs and temporaries."""
        work = 0 if self._allocator is None else lib.ggml_gallocr_get_buffer_size(self._allocator, 0)
        return int(work) + self._inputs.nbytes

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self._allocator is not None:
            lib.ggml_gallocr_free(self._allocator)
            self._allocator = None
        self._inputs.close()
        self.closed = True
        self._graph = None
        self._scheduled.clear()
        while self._contexts:
            lib.ggml_free(self._contexts.pop())

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_room(context: Any) -> bool:
    """For the few tensors that one builder method makes; ggml aborts when a context is full."""
    return bool(lib.ggml_get_mem_size(context) - lib.ggml_used_mem(context) >= 8 * lib.ggml_tensor_overhead())


def op_name(node: Any) -> str:
    """Name of a native node's op; of our own `dflash.` and the sub-op."""
    name = str(ffi.string(lib.ggml_op_name(node.op)).decode())
    if name != "DFLASH":
        return name
    return "dflash." + str(ffi.string(lib.ggml_dflash_op_name(lib.ggml_dflash_get_op(node))).decode())
