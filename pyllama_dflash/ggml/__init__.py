"""Devices, buffers, tensors and a graph builder over ggml.

Shapes are ggml's: the first number varies fastest.  Every shape and type is checked here, before ggml sees it, so that
no assertion of ggml's can be reached from Python; what does not fit raises :class:`ShapeError`.
"""

from .devices import Backend, DeviceInfo, choose_device, list_devices
from .graph import Graph
from .tensors import ShapeError, Tensor, TensorSet, Type

__all__ = [
    "Backend",
    "DeviceInfo",
    "Graph",
    "ShapeError",
    "Tensor",
    "TensorSet",
    "Type",
    "choose_device",
    "list_devices",
]
