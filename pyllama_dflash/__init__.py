"""DFlash2 speculative decoding of GGUF models, with exactly the text that plain decoding would have given."""

from .engine import Engine
from .errors import DeviceError, DflashError, EngineClosed, FileError, PairError, RequestError
from .result import Chunk, Result, Timings
from .sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "DeviceError",
    "DflashError",
    "Engine",
    "EngineClosed",
    "FileError",
    "PairError",
    "RequestError",
    "Result",
    "SamplingParams",
    "Timings",
]
