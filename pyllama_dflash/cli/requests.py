"""What `generate` is asked to do: prompts from arguments, files and stdin, or requests from a file of JSON lines.

All of it is read and checked before any model is opened.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, RequestError
from ..sampling import SamplingParams, is_unicode

_PARAMETERS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True)
class Request:
    """One text to make. `id` is the one that was given, else the number of the prompt or of its line."""

    id: str | int
    prompt: str | list[int]
    params: SamplingParams


def read(args: argparse.Namespace) -> list[Request]:
    """The requests, at least one. RequestError for a bad parameter or prompt, FileError for a bad file or line."""
    params = SamplingParams(
        temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        repetition_penalty=args.repeat_penalty, presence_penalty=args.presence_penalty,
        logit_bias=dict(args.logit_bias), max_tokens=args.n_predict, stop=tuple(args.stop),
        ignore_eos=args.ignore_eos, width=args.width,
    )  # fmt: skip
    if args.jsonl is not None:
        return _json_lines(args.jsonl, params)
    return [Request(number, _checked(text), params) for number, text in enumerate(_texts(args), 1)]


# -- prompts -----------------------------------------------------------------------------------------------------------


def _texts(args: argparse.Namespace) -> Iterator[str]:
    if args.file:
        yield from map(_text, args.file)
    elif args.prompt:
        yield from (_text(prompt) if prompt == "-" else prompt for prompt in args.prompt)
    elif sys.stdin is None or sys.stdin.isatty():
        raise RequestError("prompt", "none", "it as an argument, with -f or --jsonl FILE, or on stdin")
    else:
        yield _text("-")


def _text(source: str) -> str:
    """The prompt in a file or stdin. One line end at its end belongs to the file, not to the prompt."""
    try:
        text = _bytes(source, "the prompt").decode()
    except UnicodeDecodeError as error:
        raise FileError(_name(source), f"not UTF-8 at byte {error.start}") from None
    return text[: len(text) - (2 if text.endswith("\r\n") else text.endswith("\n"))]


def _bytes(source: str, what: str) -> bytes:
    try:
        return (sys.stdin.buffer.read() if sys.stdin else b"") if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise FileError(_name(source), f"{what} cannot be read: {error.strerror}") from error


def _name(source: str) -> str:
    return "stdin" if source == "-" else source


def _checked(text: str) -> str:
    if not text:
        raise RequestError("prompt", "an empty text", "at least one character")
    return text


# -- JSON lines --------------------------------------------------------------------------------------------------------


def _json_lines(source: str, defaults: SamplingParams) -> list[Request]:
    """A request of each line that is not blank. FileError names the file, the line and the field."""
    requests = []
    for number, line in enumerate(_bytes(source, "the requests").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(_fields(line), number, defaults))
        except ValueError as error:
            raise FileError(_name(source), str(error), f"line {number}") from None
    if not requests:
        raise FileError(_name(source), "no request in it", expected="a JSON object a line")
    return requests


def _fields(line: bytes) -> dict[str, Any]:
    """The object of a line. ValueError when it is none."""
    try:
        found = json.loads(line.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("a JSON object expected")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice}: given twice")
    return found


def _request(fields: dict[str, Any], number: int, defaults: SamplingParams) -> Request:
    """What a line asks for; parameters that it does not name are those of the command line."""
    for name, value in fields.items():
        if name not in ("id", "prompt", *_PARAMETERS):
            raise RequestError(name, value, f"one of id, prompt, {', '.join(_PARAMETERS)}")
    given = {name: value for name, value in fields.items() if name in _PARAMETERS}
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    return Request(_id(fields.get("id", number)), _prompt(fields), defaults.replaced(**given))


def _id(value: object) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and is_unicode(value):
        return value
    raise RequestError("id", ascii(value), "text or a whole number")


def _prompt(fields: dict[str, Any]) -> str | list[int]:
    value = fields.get("prompt")
    if isinstance(value, str) and is_unicode(value):
        return _checked(value)
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return value
    shown = ascii(value) if "prompt" in fields else "nothing"
    raise RequestError("prompt", shown, "text or a list of token ids, not empty")


def _biases(value: Any) -> Any:
    """The names of a JSON object are text: here they are token ids. What is no object is left to SamplingParams."""
    if not isinstance(value, dict):
        return value
    for name in value:
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and str(int(name)) == name):
            raise RequestError("logit_bias", ascii(name), "token ids as names")
    return {int(name): bias for name, bias in value.items()}
