"""A strict applier for unified diffs that change existing files.

Strict means: every context and removed line must match byte for byte, at the stated line or at exactly one other
place. There is no fuzz, so a patch either applies as written or stops the build; and neither `git` nor `patch` has to
be installed. Created, deleted and renamed files are refused: files wholly ours are mirrored, not patched in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch that cannot be read or does not apply; the text names file, hunk, expected and found."""


@dataclass
class Hunk:
    """One change: `old` lines, found at 1-based line `start`, become `new` lines. Lines keep their line ends."""

    start: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


def parse(patch: bytes) -> dict[str, list[Hunk]]:
    """Path (relative, without the a/ b/ prefixes) -> hunks in file order."""
    files: dict[str, list[Hunk]] = {}
    lines = patch.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        if lines[at].startswith((b"new file mode", b"deleted file mode", b"rename ", b"copy ", b"GIT binary patch")):
            raise PatchError(f"line {at + 1}: only changes of existing text files are allowed")
        if not lines[at].startswith(b"--- "):
            at += 1
            continue
        if at + 1 >= len(lines) or not lines[at + 1].startswith(b"+++ "):
            raise PatchError(f"line {at + 2}: expected '+++ b/PATH' after '---'")
        path = _path(lines[at + 1], at + 2)
        if _path(lines[at], at + 1) != path:
            raise PatchError(f"line {at + 1}: the two file names differ")
        at, hunks = _hunks(lines, at + 2)
        if not hunks:
            raise PatchError(f"line {at + 1}: no hunk for {path}")
        files.setdefault(path, []).extend(hunks)
    if not files:
        raise PatchError("no file in it")
    return files


def apply(original: bytes, hunks: list[Hunk], path: str) -> bytes:
    """`original` with all hunks applied, in order; raises PatchError naming the first one that does not fit."""
    lines = original.splitlines(keepends=True)
    shift = 0  # how far this file has moved from the line numbers the patch states
    floor = 0  # hunks may not overlap or go backwards
    for number, hunk in enumerate(hunks, 1):
        at = _find(lines, hunk, hunk.start - 1 + shift, floor, f"{path}: hunk {number} of {len(hunks)}")
        lines[at : at + len(hunk.old)] = hunk.new
        floor = at + len(hunk.new)
        shift = at - (hunk.start - 1) + len(hunk.new) - len(hunk.old)
    return b"".join(lines)


def _path(line: bytes, number: int) -> str:
    name = line[4:].split(b"\t")[0].strip().decode("utf-8", "replace")
    if name == "/dev/null" or name[:2] not in ("a/", "b/") or ".." in name.split("/"):
        raise PatchError(f"line {number}: expected a/PATH or b/PATH of an existing file, found {name!r}")
    return name[2:]


def _hunks(lines: list[bytes], at: int) -> tuple[int, list[Hunk]]:
    """Hunks from line index `at` on; returns the index after them."""
    hunks: list[Hunk] = []
    while at < len(lines) and (head := _HUNK.match(lines[at])):
        n_old, n_new = int(head[2] or 1), int(head[4] or 1)
        hunk, stated = Hunk(int(head[1])), at + 1
        at += 1
        last: list[list[bytes]] = []
        while at < len(lines) and (len(hunk.old) < n_old or len(hunk.new) < n_new or lines[at][:1] == b"\\"):
            kind, text = lines[at][:1], lines[at][1:]
            if kind == b"\\":  # "\ No newline at end of file" belongs to the line above
                for side in last:
                    side[-1] = side[-1].rstrip(b"\r\n")
            elif kind in (b" ", b"-", b"+", b"\n"):
                last = [hunk.old] if kind == b"-" else [hunk.new] if kind == b"+" else [hunk.old, hunk.new]
                for side in last:
                    side.append(text if kind != b"\n" else b"\n")  # editors strip the blank of an empty context line
            else:
                break
            at += 1
        if (len(hunk.old), len(hunk.new)) != (n_old, n_new):
            found = f"{len(hunk.old)} and {len(hunk.new)}"
            raise PatchError(f"line {stated}: the hunk states {n_old} old and {n_new} new lines, it has {found}")
        if not hunk.old:
            raise PatchError(f"line {stated}: a hunk needs at least one context or removed line")
        hunks.append(hunk)
    return at, hunks


def _find(lines: list[bytes], hunk: Hunk, stated: int, floor: int, what: str) -> int:
    """Index at which the hunk's old lines stand: the stated one, else the only other one."""
    size = len(hunk.old)
    if stated >= floor and lines[stated : stated + size] == hunk.old:
        return stated
    places = [i for i in range(floor, len(lines) - size + 1) if lines[i : i + size] == hunk.old]
    if len(places) == 1:
        return places[0]
    if places:
        raise PatchError(f"{what} fits at {len(places)} places (lines {', '.join(str(p + 1) for p in places[:4])}, …)")
    for offset, wanted in enumerate(hunk.old):
        found = lines[stated + offset] if 0 <= stated + offset < len(lines) else b"(end of file)"
        if found != wanted:
            raise PatchError(
                f"{what} does not apply: line {stated + offset + 1} expected {_show(wanted)}, found {_show(found)}"
            )
    raise PatchError(f"{what} overlaps the hunk before it")


def _show(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace").strip()[:80])
