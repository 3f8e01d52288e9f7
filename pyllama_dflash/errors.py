"""The exceptions of the package. Every message is one printable line."""

from __future__ import annotations

_MAX_TEXT = 160
_MAX_PART = 1 << 13  # more than the longest path; a file may have put millions of numbers into a value


def _printable(value: object) -> str:
    """`value` as text without line breaks, control characters or anything a terminal would interpret."""
    try:
        text = " ".join(str(value)[:_MAX_PART].split())
    except Exception:  # an int of more digits than Python writes, nesting it does not follow, a `__str__` that fails
        text = f"a value of type {type(value).__name__} that has no text"
    return "".join(c if c.isprintable() else "?" for c in text)


def _clipped(value: object) -> str:
    text = _printable(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


class DflashError(Exception):
    """Base of all errors of the package."""

    def __str__(self) -> str:
        return _printable(super().__str__())


class FileError(DflashError, ValueError):
    """A file that cannot be used: which file, which key or tensor in it, what was found and what was expected.

    `key`, `found` and `expected` are empty or None where they mean nothing (a file that does not exist has no key).
    """

    def __init__(self, file: str, reason: str, key: str = "", found: object = None, expected: object = None) -> None:
        super().__init__(file, reason, key, found, expected)
        self.file = file
        self.reason = reason
        self.key = key
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        parts = [_printable(part) for part in (self.file, self.key) if part]
        details = [_printable(self.reason)]
        if self.found is not None:
            details.append(f"found {_clipped(self.found)}")
        if self.expected is not None:
            details.append(f"expected {_clipped(self.expected)}")
        return ": ".join([*parts, "; ".join(details)])


class PairError(FileError):
    """A target and a draft, each valid, that do not belong together."""


class RequestError(DflashError, ValueError):
    """An argument outside its limits."""

    def __init__(self, name: str, value: object, limit: object) -> None:
        super().__init__(name, value, limit)
        self.name = name
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return f"{_printable(self.name)}: {_clipped(self.value)} given; expected {_clipped(self.limit)}"


class DeviceError(DflashError, RuntimeError):
    """A device, or its driver or memory, that fails."""


def no_memory(error: MemoryError) -> DeviceError:
    """What Python says when the host has no memory left, as an error of ours."""
    return DeviceError(f"no memory on the host: {str(error) or 'Python does not say for what'}")


class DeviceLost(DeviceError):
    """A computation that failed for another reason than memory: nobody knows what the device holds now. The engine that
    met it is closed and does not touch the device again."""


class EngineClosed(DflashError, RuntimeError):
    """Use of an engine, or of something it owned, after it was closed."""
