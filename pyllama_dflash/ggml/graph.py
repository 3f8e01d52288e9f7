"""A graph that is built once, keeps its inputs and allocator, and runs as often as its data changes."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

from .._native import ffi, lib
from ..errors import DeviceError, EngineClosed
from . import logs
from .devices import Backend
from .dflash_ops import DflashOps
from .tensors import ShapeError, Tensor, TensorSet, Type, new_context

_NO_COMPUTE = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


class Graph(DflashOps):
    """Nodes, inputs, allocator and backend as one object with an explicit close.

    Inputs live in a buffer of their own, so they keep their values between runs. Nodes with effects (writes into
    caches and states) run in the order in which :meth:`effect` was called for them.
    """

    def __init__(self, backend: Backend, max_nodes: int = 4096, max_inputs: int = 32) -> None:
        self.backend = backend
        self.max_nodes = max_nodes
        self._inputs = TensorSet(backend, max_inputs)
        self._context = new_context(2 * max_nodes, lib.ggml_graph_overhead_custom(max_nodes, False))
        self._graph = lib.ggml_new_graph_custom(self._context, max_nodes, False)
        self._allocator: Any = None
        self._made = 0

    # -- building ----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True once the graph's memory is gone."""
        return self._context is None

    @property
    def context(self) -> Any:
        """The native context new nodes go to."""
        if self._context is None:
            raise EngineClosed("graph used after it was closed")
        if self._made >= 2 * self.max_nodes - 1:
            raise ShapeError(f"graph has more than {2 * self.max_nodes} tensors")
        return self._context

    def wrap(self, ptr: Any) -> Tensor:
        """A handle on a new node."""
        self._made += 1
        return Tensor(ptr, self)

    def input(self, name: str, kind: Type, *shape: int) -> Tensor:
        """A tensor the caller fills before runs; it keeps its value."""
        tensor = self._inputs.new(name, kind, *shape)
        lib.ggml_set_input(tensor.ptr)
        return tensor

    def effect(self, node: Tensor) -> Tensor:
        """Run `node` (and what it needs) behind everything scheduled so far."""
        lib.ggml_build_forward_expand(self._graph, node.ptr)
        return node

    def output(self, node: Tensor, name: str) -> Tensor:
        """Schedule `node` and keep its memory readable after the run."""
        lib.ggml_set_output(node.ptr)
        lib.ggml_set_name(node.ptr, name.encode()[:63])
        return self.effect(node)

    def computes(self, node: Tensor) -> bool:
        """Whether the device that the graph is for computes `node`."""
        return self.backend.supports(node)

    def build(self) -> None:
        """Check every node against the device and allocate. Call once, after the last output."""
        if self._allocator is not None:
            raise ShapeError("graph is built already")
        for i in range(lib.ggml_graph_n_nodes(self._graph)):
            node = lib.ggml_graph_node(self._graph, i)
            if _op_name(node) not in _NO_COMPUTE and not lib.ggml_backend_supports_op(self.backend.ptr, node):
                shapes = [list(Tensor(s, self).shape) for s in node.src if s != ffi.NULL]
                raise DeviceError(f"{self.backend.device.name} does not compute {_op_name(node)} on {shapes}")
        self._inputs.allocate()
        self._allocator = lib.ggml_gallocr_new(self.backend.buffer_type)
        if not lib.ggml_gallocr_alloc_graph(self._allocator, self._graph):
            raise DeviceError(f"{self.backend.device.name}: no memory for a graph: {logs.native_log_tail()}")

    # -- running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Compute all nodes. The GIL is free meanwhile."""
        if self._allocator is None:
            raise ShapeError("graph is not built")
        status = lib.ggml_backend_graph_compute(self.backend.ptr, self._graph)
        if status != lib.GGML_STATUS_SUCCESS:
            raise DeviceError(f"{self.backend.device.name}: compute failed ({status}): {logs.native_log_tail()}")

    @property
    def nodes(self) -> Counter[str]:
        """How many nodes of each op the graph has; our own go by their sub-op."""
        graph = self._graph
        return Counter(_op_name(lib.ggml_graph_node(graph, i)) for i in range(lib.ggml_graph_n_nodes(graph)))

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
        if self._context is not None:
            lib.ggml_free(self._context)
            self._context = None

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _op_name(node: Any) -> str:
    name = str(ffi.string(lib.ggml_op_name(node.op)).decode())
    if name != "DFLASH":
        return name
    return "dflash." + str(ffi.string(lib.ggml_dflash_op_name(lib.ggml_dflash_get_op(node))).decode())
