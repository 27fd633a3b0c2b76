"""The command `pace`: runs a sub-command, and turns an exception into one line on stderr and an exit code.

A sub-command is a module of this package with `add_arguments(parser)` and `run(arguments) -> exit code`, and one line
in `COMMANDS`. The module is imported when the sub-command is called, so `pace --help` does not import torch.

Exit codes: 0 success; 1 failure, with the reason on stderr; 2 wrong command line; 130 stopped by Ctrl-C; 141 broken
pipe.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import gc
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType

from pace import __version__
from pace.cli.options_in_messages import OptionsInLog, option, rewrite
from pace.llm.aliases import SAMPLING_ADVICE

COMMANDS = {
    "generate": ("pace.cli.generate", "continue a text, or answer one question"),
    "chat": ("pace.cli.chat", "talk with a model, turn by turn"),
    "embed": ("pace.cli.embed", "print the vectors of texts, or rank texts by a query"),
    "transcribe": ("pace.cli.transcribe", "write down what is said in a file of sound"),
    "serve": ("pace.cli.serve", "serve a model over HTTP: the APIs of OpenAI and Anthropic, and a chat page"),
    "batch": ("pace.cli.batch", "answer a file of requests, in the form of OpenAI's batches"),
    "bench": ("pace.cli.bench", "measure the speed of a model on this machine, or of a server"),
    "eval": ("pace.cli.eval", "measure how well a model predicts a text (perplexity), also next to another model"),
    "plan": ("pace.cli.plan", "predict memory and speed of a model without loading it"),
    "quantize": ("pace.cli.quantize", "write an int8 or int4 checkpoint, calibrated on a text"),
    "cache": ("pace.cli.cache", "list and remove the packed copies of weights, from which models open at once"),
    "env": ("pace.cli.environment", "show what pace found on this machine, what it chose, and why"),
}
"""Maps the name of a sub-command to its module and its line in `pace --help`."""

DEBUG_HELP = "print the log, and the traceback of an error"
EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141


class Literal(str):
    """A word after `--`: never an option, even if it begins with a dash."""


class OneLineErrorParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line, without the usage. Options may stand between positionals."""

    advice = ""
    """Advice for a command line with too many positionals."""

    def parse_words(self, argv: list[str]) -> argparse.Namespace:
        """Parses a command line. Words after `--` are taken literally."""
        end = argv.index("--") if "--" in argv else len(argv)
        return self.parse_intermixed_args([*argv[:end], *map(Literal, argv[end + 1 :])])

    def _parse_optional(self, arg_string: str):
        return None if isinstance(arg_string, Literal) else super()._parse_optional(arg_string)

    def error(self, message: str):
        message = rewrite(message + self._advice(message), _finder(self))
        self.exit(2, f"pace: error: {message} (see: {self.prog} --help)\n")

    def _advice(self, message: str) -> str:
        """Returns the advice for an unknown option or command in `message`: the right option for one of another tool,
        else a similar name. If nothing is unknown, returns `advice`."""
        unknown = re.match(
            r"unrecognized arguments: (--[\w-]+)|.*invalid choice: '(.*?)' \(choose from (.*)\)", message
        )
        if unknown is None:
            return f"; {self.advice}" if self.advice and message.startswith("unrecognized arguments: ") else ""
        others = SAMPLING_ADVICE.get((unknown[1] or "").strip("-").replace("-", "_"), "").replace(" of LLMModel", "")
        if others.partition(" ")[0] in {action.dest for action in self._actions}:
            return f"; {others}"
        known = re.findall(r"[^\s,']+", unknown[3]) if unknown[3] else self._option_string_actions
        word = unknown[1] or unknown[2]
        near = [longer for longer in known if longer.startswith(word)] or difflib.get_close_matches(word, known, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (default: the arguments of the process) and returns the exit code.

    Raises: SystemExit for `--help` and usage errors, like argparse."""
    argv = sys.argv[1:] if argv is None else argv
    top = _top_parser().parse_args(argv or ["--help"])
    parser = OneLineErrorParser(prog=f"pace {top.command}", allow_abbrev=False)
    try:
        module_name, parser.description = COMMANDS[top.command]
        module = _import(module_name)
        module.add_arguments(parser)
        parser.add_argument("--debug", action="store_true", help=DEBUG_HELP)
        # Not `top.arguments`: argparse has dropped a first `--` from it, and with it the fact that the rest is literal.
        arguments = parser.parse_words(argv[argv.index(top.command) + 1 :])
        if "named_model" in arguments:
            from pace.cli.arguments import settle_model, settle_quantization

            settle_model(parser, arguments)
            settle_quantization(parser, arguments)
        top.debug |= arguments.debug
        _show_log(logging.DEBUG if top.debug else logging.WARNING, parser)
        return module.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout again at exit; give it a file that accepts the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if _has_interrupt(error):
            return EXIT_INTERRUPTED
        if top.debug:
            raise
        print(f"pace: error: {rewrite(_describe(error), _finder(parser))}", file=sys.stderr)
        return EXIT_FAILED


def _import(module: str) -> ModuleType:
    """Imports a sub-command, and torch with it. Garbage collection is off meanwhile, and skips the imported objects
    later."""
    if module in sys.modules:
        return sys.modules[module]
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _top_parser() -> argparse.ArgumentParser:
    parser = OneLineErrorParser(
        prog="pace",
        description="Run language models of Hugging Face and GGUF files on the CPU.",
        epilog="commands:\n"
        + "\n".join(f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items())
        + "\n\n`pace COMMAND --help` explains the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pace {__version__}")
    parser.add_argument("--debug", action="store_true", help=DEBUG_HELP)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the options of the command")
    return parser


@functools.cache
def _loading_parser() -> OneLineErrorParser:
    """A parser with the options that load a model. An error message may recommend one that the command itself lacks."""
    from pace.cli.arguments import add_loading_arguments

    parser = OneLineErrorParser()
    add_loading_arguments(parser)
    return parser


def _finder(parser: argparse.ArgumentParser) -> Callable[[str, bool | None], str | None]:
    """Returns `option` for the options of this command, then for those that load a model."""
    return lambda name, flag: option(parser, name, flag) or option(_loading_parser(), name, flag)


def _show_log(level: int, parser: argparse.ArgumentParser) -> None:
    """Prints log records of the library from `level` upwards on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(OptionsInLog(_finder(parser)))
    logger = logging.getLogger("pace")
    logger.handlers = [handler]
    logger.setLevel(level)


def _has_interrupt(error: BaseException | None) -> bool:
    """True if an error comes from Ctrl-C: a library that is being imported may raise an ImportError instead."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _has_interrupt(error.__cause__ or error.__context__)
    )


def _describe(error: Exception) -> str:
    """Returns the library's message for the user; for an unforeseen exception, its type as well."""
    if isinstance(error, (ValueError, TypeError, NotImplementedError, MemoryError, ImportError)) and str(error):
        return str(error)
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {error} (`--debug` shows where; please report it)"
