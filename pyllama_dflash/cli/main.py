"""The command line: `pyllama-dflash generate | info | doctor`.

Options are spelled as llama.cpp's tools spell them.  An error is one line on stderr and exit code 2; Ctrl-C ends with
130, a reader that closes the pipe with 141; `info` on a pair that does not fit with 1.  Whatever is heavy is imported
inside the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from . import __version__
from .errors import DflashError, FileError, RequestError

if TYPE_CHECKING:
    from .engine import Engine
    from .result import Result
    from .sampling import SamplingParams

PROGRAM = "pyllama-dflash"
DOES_NOT_FIT, ERROR, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


class _Usage(Exception):
    """Arguments that cannot be parsed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage text."""
        command = self.prog.removeprefix(PROGRAM).strip()
        raise _Usage(f"{command}: {message}" if command else message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(argv)
        _log_to_stderr(args.verbose)
        _write_utf8(sys.stdout)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; there is nobody left to read it.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        if debug:
            raise
        print(f"{PROGRAM}: error: {_one_line(error)}", file=sys.stderr)
        return ERROR


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (DflashError, _Usage, OSError, ImportError)):
        return text
    return f"{type(error).__name__}: {text} (unexpected; --debug shows where)"


def _log_to_stderr(verbose: int) -> None:
    if verbose:
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("pyllama_dflash").setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


def _write_utf8(stream: TextIO) -> None:
    """Generated text is Unicode, whatever the locale says."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="replace")


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Text from GGUF models by DFlash2 speculative decoding.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    common = _Parser(add_help=False)
    common.add_argument("-v", "--verbose", action="count", default=0, help="native log lines on stderr (-vv: all)")
    common.add_argument("--debug", action="store_true", help="a traceback when something fails")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common], allow_abbrev=False)

    _generate_arguments(command("generate", "continue a prompt; the text goes to stdout as it comes"))
    info = command("info", "what a model file holds and needs; of two files also whether they fit together")
    info.add_argument("files", nargs="+", metavar="FILE", help="a target or a draft; at most one of each")
    info.add_argument("-c", "--ctx-size", type=int, metavar="N", help="context of the memory plan")
    info.set_defaults(run=_info)
    doctor = command("doctor", "backends found, the device that would be used, and why")
    doctor.add_argument("--device", default="auto", metavar="NAME", help="as for generate (default: auto)")
    doctor.set_defaults(run=_doctor)
    return parser


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("prompt", nargs="?", help="the text to continue; '-' or nothing: read it from stdin")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file ('-': stdin)")
    models = parser.add_argument_group("models")
    models.add_argument("-m", "--model", metavar="FILE", help="target GGUF (default: the pair that ships)")
    models.add_argument("-md", "--model-draft", metavar="FILE", help="draft GGUF")
    models.add_argument("--no-draft", action="store_true", help="decode plainly: the same text, slower")
    models.add_argument("-c", "--ctx-size", type=int, metavar="N", help="positions of prompt and text together")
    models.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads (default: all CPUs)")
    models.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, gpu or a device's name")
    text = parser.add_argument_group("text")
    text.add_argument("-n", "--n-predict", type=int, default=128, metavar="N", help="longest text (default: 128)")
    text.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature (default: 0, greedy)")
    text.add_argument("--top-k", type=int, default=0, metavar="N", help="of the N likeliest only (default: 0, off)")
    text.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest P only (default: 1, off)")
    text.add_argument("--min-p", type=float, default=0.0, metavar="P", help="at least P of the best (default: 0, off)")
    text.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="same seed, same text (default: 0)")
    text.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    text.add_argument("--ignore-eos", action="store_true", help="go on behind the end token")
    output = parser.add_argument_group("output")
    output.add_argument("--no-display-prompt", action="store_true", help="print the continuation without the prompt")
    output.add_argument("--stats", action="store_true", help="speed and acceptance on stderr")
    output.add_argument("--json", action="store_true", help="one JSON object instead of the text")


# -- generate ----------------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    from .sampling import SamplingParams

    params = SamplingParams(
        temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        max_tokens=args.n_predict, stop=tuple(args.stop), ignore_eos=args.ignore_eos,
    )  # fmt: skip
    for one, other, what in (
        (args.no_draft, args.model_draft, "--no-draft and -md exclude each other"),
        (args.prompt, args.file, "a prompt and -f exclude each other"),
    ):
        if one and other:
            raise _Usage(f"generate: {what}")
    target, draft = _models(args)
    prompt = _prompt(args)
    from .engine import Engine

    with Engine.load(target, draft, device=args.device, n_ctx=args.ctx_size, threads=args.threads) as engine:
        if args.json:
            result = engine.generate(prompt, params)
            print(json.dumps(_report(engine, target, draft, prompt, result), ensure_ascii=False))
        else:
            result = _stream(engine, prompt, params, echo=not args.no_display_prompt)
        if args.stats:
            print(_stats(engine, result), file=sys.stderr)
    return 0


def _models(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The files to load: the shipped target unless another is named, with the shipped draft for that target only."""
    target = Path(args.model) if args.model else None
    draft = Path(args.model_draft) if args.model_draft else None
    if target is None:
        from .pair_files import shipped

        target, shipped_draft = shipped()
        draft = draft or shipped_draft
    return target, None if args.no_draft else draft


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text. One line end at the end of a file or of stdin belongs to the file, not to the prompt."""
    source = args.file if args.file is not None else args.prompt if args.prompt == "-" else None
    if source is None and args.prompt is not None:
        text: str = args.prompt
    elif source not in (None, "-"):
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise FileError(source, f"the prompt cannot be read: {error.strerror}") from error
        text = _decoded(source, data)
    elif sys.stdin is None or (source is None and sys.stdin.isatty()):
        raise _Usage("generate: no prompt: give it as an argument, with -f FILE or on stdin")
    else:
        text = _decoded("stdin", sys.stdin.buffer.read())
    if not text:
        raise RequestError("prompt", "an empty text", "at least one character")
    return text


def _decoded(source: str, data: bytes) -> str:
    """UTF-8 without the line end at its end."""
    try:
        text = data.decode()
        return text[: len(text) - (2 if text.endswith("\r\n") else text.endswith("\n"))]
    except UnicodeDecodeError as error:
        raise FileError(source, f"not UTF-8 at byte {error.start}") from None


def _stream(engine: Engine, prompt: str, params: SamplingParams, *, echo: bool) -> Result:
    with contextlib.closing(engine.stream(prompt, params)) as chunks:
        try:
            _put(prompt if echo else "")
            for chunk in chunks:
                _put(chunk.text)
        finally:
            with contextlib.suppress(BrokenPipeError):
                _put("\n")
    assert engine.last_result is not None
    return engine.last_result


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(engine: Engine, target: Path, draft: Path | None, prompt: str, result: Result) -> dict[str, Any]:
    return {
        "model": str(target),
        "draft": None if draft is None else str(draft),
        "device": engine.device.name,
        "n_ctx": engine.n_ctx,
        "prompt": prompt,
        **result.to_dict(),
        "paths": engine.paths,
    }


def _stats(engine: Engine, result: Result) -> str:
    t, n = result.timings, len(result.tokens)
    lines = [
        f"device      {engine.device.name} ({engine.device.description})",
        f"prompt      {result.prompt_tokens} tokens in {t.prefill_s:.3f} s, first token after {t.first_token_s:.3f} s",
        f"text        {n} tokens in {t.decode_s:.3f} s, {result.tokens_per_second:.1f} tokens/s"
        f" (ended by: {result.finish_reason})",
        f"phases      draft {t.draft_s:.3f} s, verify {t.verify_s:.3f} s, host {t.host_s:.3f} s",
        f"rounds      {result.rounds}, {result.mean_accepted_length:.2f} tokens each",
    ]
    if engine.has_draft:
        accepted = " ".join(map(str, result.accepted_per_position))
        lines.append(f"accepted    {accepted} by position, {result.proposed} proposed")
    lines.append(f"ops         {_paths(engine.paths)}")
    return "\n".join(lines)


def _paths(paths: dict[str, dict[str, int]]) -> str:
    """Nodes of the graphs by the way they are computed, the ops named that have no kernel at times."""
    kernels = sum(uses.get("kernel", 0) for uses in paths.values())
    others = [f"{op} {n} {path}" for op, uses in paths.items() for path, n in uses.items() if path != "kernel"]
    return ", ".join([f"{kernels} nodes by kernels", *others])


# -- the other commands ------------------------------------------------------------------------------------------------


def _info(args: argparse.Namespace) -> int:
    from .cli_info import report

    text, fits = report(args.files, args.ctx_size)
    print(text)
    return 0 if fits else DOES_NOT_FIT


def _doctor(args: argparse.Namespace) -> int:
    from .cli_doctor import report

    print(report(args.device))
    return 0
