"""The command `pace`: finds the sub-command, runs it, and turns whatever goes wrong into one line and an exit code.

A sub-command is a module of this package with `add_arguments(parser)` and `run(arguments) -> exit code`, and one line
in `COMMANDS`. It is imported when it is called: `pace --help` imports no torch.

Exit codes: 0 done; 1 it failed, for a reason printed on stderr; 2 the command line is wrong; 130 stopped by Ctrl-C; 141
the reader of our output went away.
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

COMMANDS = {
    "generate": ("pace.cli.generate", "continue or answer one prompt"),
    "chat": ("pace.cli.chat", "talk with a model, turn by turn"),
    "serve": ("pace.cli.serve", "answer over HTTP, in the forms of OpenAI and Anthropic"),
    "batch": ("pace.cli.batch", "answer a file of requests in OpenAI's batch form"),
    "bench": ("pace.cli.bench", "how fast a model runs here, beside the machine's limits, or a server answers"),
    "eval": ("pace.cli.eval", "how well a model predicts a text, and how far it is from another model there"),
    "plan": ("pace.cli.plan", "what a model needs and how fast it would be, before it is loaded"),
    "quantize": ("pace.cli.quantize", "write a checkpoint in int8 or int4, calibrated on a text"),
    "cache": ("pace.cli.cache", "the packed copies of weights that open models at once: list and clear"),
    "env": ("pace.cli.environment", "what pace found on this machine, what it chose, and why"),
}
"""Name of the sub-command: the module that runs it, and its line in `pace --help`."""

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141


class Literal(str):
    """A word behind `--`: it is no option, whatever it begins with."""


class OneLineErrorParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage in front. Options may stand between words."""

    def parse_words(self, argv: list[str]) -> argparse.Namespace:
        """Parses the words of a command line, of which those behind `--` are taken literally."""
        end = argv.index("--") if "--" in argv else len(argv)
        return self.parse_intermixed_args([*argv[:end], *map(Literal, argv[end + 1 :])])

    def _parse_optional(self, arg_string: str):
        return None if isinstance(arg_string, Literal) else super()._parse_optional(arg_string)

    def error(self, message: str):
        message = rewrite(message, _finder(self)) + self._hint(message)
        self.exit(2, f"pace: error: {message} (see: {self.prog} --help)\n")

    def _hint(self, message: str) -> str:
        """The option that was meant by the first of those that there are not, "" where none is near."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = unknown and difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own) and returns the exit code; `--help` and usage errors
    raise SystemExit, as everywhere in argparse."""
    argv = sys.argv[1:] if argv is None else argv
    top = _top_parser().parse_args(argv or ["--help"])
    parser = OneLineErrorParser(prog=f"pace {top.command}", allow_abbrev=False)
    try:
        module_name, parser.description = COMMANDS[top.command]
        module = _import(module_name)
        module.add_arguments(parser)
        parser.add_argument("--debug", action="store_true", help="show the log of pace, and a traceback where it fails")
        # Not top.arguments: argparse has dropped a first `--` from there, which says that what follows is no option.
        arguments = parser.parse_words(argv[argv.index(top.command) + 1 :])
        if "named_model" in arguments:
            from pace.cli.arguments import settle_model

            settle_model(parser, arguments)
        top.debug |= arguments.debug
        _show_log(logging.DEBUG if top.debug else logging.WARNING, parser)
        return module.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if top.debug:
            raise
        print(f"pace: error: {rewrite(_describe(error), _finder(parser))}", file=sys.stderr)
        return EXIT_FAILED


def _import(module: str) -> ModuleType:
    """Imports a sub-command, torch with it: garbage is not looked for meanwhile, nor ever in what was imported."""
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
        description="Run Hugging Face causal language models on the CPU.",
        epilog="commands:\n"
        + "\n".join(f"  {name:10} {summary}" for name, (_, summary) in COMMANDS.items())
        + "\n\n`pace COMMAND --help` tells the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pace {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the log of pace, and a traceback where it fails")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the options of the command")
    return parser


@functools.cache
def _loading_parser() -> OneLineErrorParser:
    """The options of every command that loads a model: what one that does not may have to advise."""
    from pace.cli.arguments import add_loading_arguments

    parser = OneLineErrorParser()
    add_loading_arguments(parser)
    return parser


def _finder(parser: argparse.ArgumentParser) -> Callable[[str, bool | None], str | None]:
    """As `option`: of the command, else of those that load a model, which it may be advised to use."""
    return lambda name, flag: option(parser, name, flag) or option(_loading_parser(), name, flag)


def _show_log(level: int, parser: argparse.ArgumentParser) -> None:
    """The library is quiet; at the command line, what it has to say from `level` on goes to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(OptionsInLog(_finder(parser)))
    logger = logging.getLogger("pace")
    logger.handlers = [handler]
    logger.setLevel(level)


def _describe(error: Exception) -> str:
    """The message that the library wrote for the user; for an exception that it did not foresee, the type as well."""
    if isinstance(error, (ValueError, TypeError, NotImplementedError, MemoryError, ImportError)) and str(error):
        return str(error)
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {error} (`--debug` shows where; please report it)"
