"""Chat templates: Jinja source that comes with a model file, and is therefore run like code from a stranger.

It runs in Jinja's immutable sandbox, which gives it no way to Python's insides.  Beyond that the source, the output,
loop ranges and every string or list made by an operator, a block, `join`, `replace` or `indent` are limited in size,
and the rendering in time; filters and methods that pad or format to a width are not offered.  Not limited: what one
single step makes of a structure that holds the same large part many times.

The names are those of Hugging Face's templates: `raise_exception`, `strftime_now`, the filter `tojson`, the tag
`generation`, loop controls, blocks that swallow the line they stand on.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context

from .errors import RequestError

MAX_SOURCE = 1 << 20
MAX_VALUE = 1 << 22
MAX_OUTPUT = 1 << 24
MAX_SECONDS = 5.0
MAX_INDENT = 64

_SIZED = (str, bytes, list, tuple)
_NO_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "truncate", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill")


class _TooSlow(BaseException):
    """Not an Exception, so that nothing between the tick that raises it and us takes it for its own."""


class _Refused(jinja2.TemplateError):
    """Raised by the template itself, or because of a limit."""


def _limited(size: int, what: str) -> None:
    if size > MAX_VALUE:
        raise _Refused(f"{what} would make more than {MAX_VALUE} characters or items")


def _joined(values: Iterable[Any], between: str = "") -> str:
    parts = [str(value) for value in values]
    _limited(sum(map(len, parts)) + len(between) * len(parts), "joining")
    return between.join(parts)


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    _limited(len(text) + text.count(old) * len(new), "replace")
    return text.replace(old, new, -1 if count is None else count)


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b` through the environment's checked concatenation."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(_joined)
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the sandbox, without the methods that pad."""
        return not (isinstance(obj, str) and attr in _NO_METHODS) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """The sandbox would hand out `str.format` before it asks whether that is safe."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call, where a string's `join` and `replace` are the checked ones."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            return _joined(args[0], owner)
        if isinstance(owner, str) and name == "replace":
            return _replaced(owner, *args)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operator, unless its result could be huge."""
        sizes = [len(v) if isinstance(v, _SIZED) else 0 for v in (left, right)]
        numbers = [v for v in (left, right) if isinstance(v, int)]
        if operator == "+":
            _limited(sum(sizes), "+")
        elif operator == "*" and numbers:
            _limited(sum(sizes) * max(numbers), "*")
        elif operator == "**" or (operator == "%" and isinstance(left, (str, bytes))):
            raise _Refused(f"the operator {operator} is not offered")
        if any(abs(n) >= 1 << 256 for n in numbers):
            raise _Refused("a number became too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_eval_context
def _join_filter(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(filters.make_attrgetter(context.environment, attribute), value)
    return _joined(items, str(d))


def _indent_filter(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    if size > MAX_INDENT:
        raise _Refused(f"an indent of {size} is more than {MAX_INDENT}")
    _limited(len(s) + s.count("\n") * size, "indent")
    return filters.do_indent(s, width, first, blank)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_INDENT:
        raise _Refused("too long a time format")
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    if indent is not None and not 0 <= int(indent) <= MAX_INDENT:
        raise _Refused(f"an indent of {indent} is not in 0..{MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
    for name in _NO_FILTERS:
        del environment.filters[name]
    ours: dict[str, Callable[..., Any]] = {
        "tojson": _tojson, "join": _join_filter, "replace": _replaced, "indent": _indent_filter,
    }  # fmt: skip
    environment.filters.update(ours)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.globals.pop("lipsum")
    return environment


class ChatTemplate:
    """One template. `variables` are there in every rendering (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE:
            raise _failure(f"{len(self.source)} characters, at most {MAX_SOURCE} are taken")
        try:
            return _environment().from_string(self.source)
        except Exception as error:  # Jinja's parser and Python's compiler meet foreign code here
            line = getattr(error, "lineno", None)
            raise _failure(f"{error}{f' in line {line}' if line else ''}") from error

    def render(self, **variables: Any) -> str:
        """The prompt text.

        Raises:
            RequestError: the template is not Jinja, fails, complains about its input, or passes a limit.
        """
        template = self._template
        parts, size = [], 0
        try:
            with _Deadline(MAX_SECONDS):
                for part in template.generate({**self._variables, **variables}):
                    size += len(part)
                    if size > MAX_OUTPUT:
                        raise _Refused(f"the output passes {MAX_OUTPUT} characters")
                    parts.append(part)
        except _TooSlow:
            raise _failure(f"it did not end within {MAX_SECONDS:g} s") from None
        except Exception as error:  # anything can come out of foreign code
            raise _failure(f"{error}" if isinstance(error, _Refused) else f"{type(error).__name__}: {error}") from error
        return "".join(parts)


class _Deadline:
    """Raises _TooSlow in this thread at the first line of Python, of a template too, that runs after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        end = time.monotonic() + self._seconds

        def tick(frame: FrameType, event: str, argument: Any) -> Any:
            if time.monotonic() > end:
                raise _TooSlow
            return tick

        self._before = sys.gettrace()
        sys.settrace(tick)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


def _failure(reason: str) -> RequestError:
    return RequestError("chat template", reason, "a template that renders these messages")
