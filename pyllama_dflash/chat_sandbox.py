"""Renders templates from strangers: run by :mod:`.chat_template` as a process of its own, one line in, one line out.

Here a template has no way to Python's insides, files or the network (Jinja's immutable sandbox), and its output has a
limit. What it may take of memory and of the processor's time the system counts, whatever Jinja, a filter or a method of
a string makes of it; past that the process is gone (exit code ENOMEM, or a signal), and nothing else is.

The names are those of Hugging Face's templates: `raise_exception`, `strftime_now`, the filter `tojson`, the tag
`generation`, loop controls, blocks that swallow the line they stand on.
"""

from __future__ import annotations

import datetime
import errno
import functools
import json
import math
import os
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser


class _Refused(jinja2.TemplateError):
    """Raised by the template itself, or because of a limit."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.globals.pop("lipsum")
    return environment


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # Jinja's parser and Python's compiler meet foreign code here
        line = getattr(error, "lineno", None)
        raise _Refused(f"{error}{f' in line {line}' if line else ''}") from error


def _rendered(source: str, variables: dict[str, Any], most: int) -> str:
    parts, size = [], 0
    for part in _compiled(source).generate(variables):
        size += len(part)
        if size > most:
            raise _Refused(f"the output passes {most} characters")
        parts.append(part)
    return "".join(parts)


def _answer(source: str, variables: dict[str, Any], most: int) -> dict[str, str]:
    """The text, or why there is none."""
    try:
        return {"text": _rendered(source, variables, most)}
    except MemoryError:
        raise
    except Exception as error:  # anything can come out of foreign code
        return {"error": f"{error}" if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"}


def _allow(seconds: float) -> None:
    """So much more of the processor's time: should nobody be there to end the process, the system does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main(memory: int, most: int, seconds: float) -> None:
    """Answer requests until there are no more. `memory` bytes of address space, `most` characters of output."""
    _environment()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        while line := sys.stdin.buffer.readline():
            _allow(seconds)
            source, variables = json.loads(line)
            answer = json.dumps(_answer(source, variables, most), ensure_ascii=False)
            sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass") + b"\n")
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(errno.ENOMEM)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
