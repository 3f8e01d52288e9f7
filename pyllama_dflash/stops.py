"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string, however the text is cut into pieces.

    The first stop string is the one that is complete first; of those complete at the same character, the longest.  The
    end of the text that might become a stop string is held back until it cannot.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stops = tuple(stop)
        self._longest = max(map(len, self.stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string is complete; after that nothing is passed on."""
        if self.stopped:
            return "", True
        text = self._held + text
        # A stop string's first occurrence is also the one of it that ends first.
        found = [(at + len(s), at) for s in self.stops if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]], True
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What is still held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-n:]
            if any(s.startswith(end) for s in self.stops):
                return n
        return 0
