"""The command line: `pyllama-dflash generate | info | doctor | bench`.

Options are spelled as llama.cpp's tools spell them.  An error is one line on stderr and exit code 2; Ctrl-C ends with
130, a reader that closes the pipe with 141; `info` on a pair that does not fit, and `generate` when some of several
requests failed, with 1.  Whatever is heavy is imported inside the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from .. import __version__
from ..errors import DflashError

PROGRAM = "pyllama-dflash"
DOES_NOT_FIT = SOME_FAILED = 1
ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141


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
        args.given = sys.argv[1:] if argv is None else list(argv)
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

    _generate_arguments(command("generate", "continue prompts; the text of a single one goes to stdout as it comes"))
    info = command("info", "what a model file holds and needs; of two files also whether they fit together")
    info.add_argument("files", nargs="+", metavar="FILE", help="a target or a draft; at most one of each")
    info.add_argument("-c", "--ctx-size", type=int, metavar="N", help="context of the memory plan")
    info.set_defaults(run=_info)
    doctor = command("doctor", "backends found, the device that would be used, and why")
    doctor.add_argument("--device", default="auto", metavar="NAME", help="as for generate (default: auto)")
    doctor.set_defaults(run=_doctor)
    _bench_arguments(
        command("bench", "speed with many requests at once, in brackets; beside a stock server if there is")
    )
    return parser


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("prompt", nargs="*", help="a text to continue; '-' or nothing: read it from stdin")
    parser.add_argument("-f", "--file", action="append", default=[], metavar="FILE", help="a file that holds a prompt")
    parser.add_argument("--jsonl", metavar="FILE", help="requests as JSON objects, one a line ('-': stdin)")
    models = parser.add_argument_group("models")
    models.add_argument("-m", "--model", metavar="FILE", help="target GGUF (default: the pair that ships)")
    models.add_argument("-md", "--model-draft", metavar="FILE", help="draft GGUF")
    models.add_argument("--no-draft", action="store_true", help="decode plainly: the same text, slower")
    models.add_argument("-c", "--ctx-size", type=int, metavar="N", help="positions of a prompt and its text together")
    models.add_argument("-np", "--parallel", type=int, metavar="N", help="requests at once (default: up to 8)")
    models.add_argument("--pool", type=int, metavar="N", help="positions of all at once (default: -c for each)")
    models.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads (default: all CPUs)")
    models.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, gpu or a device's name")
    text = parser.add_argument_group("text")
    text.add_argument("-n", "--n-predict", type=int, default=128, metavar="N", help="longest text (default: 128)")
    text.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature (default: 0, greedy)")
    text.add_argument("--top-k", type=int, default=0, metavar="N", help="of the N likeliest only (default: 0, off)")
    text.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest P only (default: 1, off)")
    text.add_argument("--min-p", type=float, default=0.0, metavar="P", help="at least P of the best (default: 0, off)")
    text.add_argument("--repeat-penalty", type=float, default=1.0, metavar="X", help="of tokens seen (default: 1, off)")
    text.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="the same, subtracted (0: off)")
    text.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID(+/-)BIAS",
        help="add to a token's logit, like 15043+1 or 29905-inf (repeatable)",
    )  # fmt: skip
    text.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="same seed, same text (default: 0)")
    text.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    text.add_argument("--ignore-eos", action="store_true", help="go on behind the end token")
    text.add_argument("--width", type=int, metavar="N", help="most rows a round (default: by what is accepted)")
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FILE", help="results as JSON, one a line; '-' for stdout")
    output.add_argument("--json", action="store_true", help="the same on stdout, with prompt and models")
    output.add_argument("--no-display-prompt", action="store_true", help="print the continuation without the prompt")
    output.add_argument("--progress", action="store_true", help="a bar for several prompts, terminal or not")
    output.add_argument("--stats", action="store_true", help="speed and acceptance on stderr")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_bench)
    add = parser.add_argument
    add("-m", "--model", required=True, metavar="FILE", help="target GGUF")
    add("-md", "--model-draft", metavar="FILE", help="draft GGUF")
    add(
        "--lanes",
        type=_numbers,
        default=(1, 2, 4, 8),
        metavar="N,N",
        help="requests at once, each for itself (1,2,4,8)",
    )
    add("--waves", type=int, default=10, metavar="N", help="waves a number of lanes, with prompts of their own (10)")
    add("-n", "--n-predict", type=int, default=128, metavar="N", help="forced tokens a request (128)")
    add("--prompts", default="random", metavar="WHAT", help="random, humaneval or a JSONL file with prompts (random)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="length of random prompts (128)")
    add("-s", "--seed", type=int, default=0, metavar="N", help="of random prompts (0)")
    add("--width", type=_width, metavar="N", help="rows a round of ours, or adaptive (default: the draft's block)")
    add("--other", type=_width, default=1, metavar="N", help="the setting between ours' halves (1: plain steps)")
    add("--stock", metavar="WHERE", help="a llama-server too: its URL, or the program, which is run on the same files")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, gpu or a device's name")
    add("--kv-type", default="f16", metavar="TYPE", help="of keys and values: f16, f32 or q8_0 (f16)")
    add("-t", "--threads", type=int, metavar="N", help="CPU threads (default: all CPUs)")
    add("--json", metavar="FILE", help="write the record")
    add("--report", metavar="FILE", help="write the report, Markdown, which is printed too")
    add("--png", metavar="FILE", help="write a picture")


def _numbers(text: str) -> tuple[int, ...]:
    """N,N,..."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not numbers with commas between them: {text!r}") from None


def _width(text: str) -> int | str:
    """A whole number, or adaptive."""
    try:
        return text if text == "adaptive" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"neither a whole number nor adaptive: {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    """TOKEN_ID+BIAS or TOKEN_ID-BIAS."""
    parts = re.fullmatch(r"([0-9]{1,10})([+-][0-9a-zA-Z.+-]+)", text)
    try:
        if parts:
            return int(parts[1]), float(parts[2])
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"not TOKEN_ID+BIAS or TOKEN_ID-BIAS: {text!r}")


# -- the commands ------------------------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    for one, other, what in (
        (args.no_draft, args.model_draft, "--no-draft and -md exclude each other"),
        (args.prompt, args.file, "a prompt and -f exclude each other"),
        (args.prompt or args.file, args.jsonl is not None, "--jsonl and a prompt or -f exclude each other"),
        ([*args.prompt, *args.file].count("-") > 1, True, "stdin ('-') can be read once only"),
    ):
        if one and other:
            raise _Usage(f"generate: {what}")
    from .generate import run

    return SOME_FAILED if run(args) else 0


def _info(args: argparse.Namespace) -> int:
    from .info import report

    text, fits = report(args.files, args.ctx_size)
    print(text)
    return 0 if fits else DOES_NOT_FIT


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import report

    print(report(args.device))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from .bench import run

    run(args)
    return 0
