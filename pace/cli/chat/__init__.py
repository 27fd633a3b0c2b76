"""`pace chat`: a conversation, turn by turn, at a terminal or from a pipe (one line is one turn)."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing

from pace.cli.arguments import add_model_arguments, add_sampling_arguments, load_model, sampling_config
from pace.cli.chat.commands import Commands, check_settings
from pace.cli.chat.conversation import Conversation
from pace.cli.chat.terminal import Pipe, Said, Terminal, once, read_said
from pace.llm.chat import read_tools


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help="the system prompt: what the model is told before the conversation"
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        type=_tools,
        help="tools that the model may call: a JSON list, as OpenAI's API has it. A call is shown, and what you type next "
        "is its result",
    )
    parser.add_argument(
        "--no-history",
        dest="history",
        action="store_false",
        help="do not keep what is typed at a terminal for the next run",
    )
    parser.set_defaults(parser=parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = sampling_config(arguments)
        check_settings(config)
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))
    with Terminal(arguments.history) if sys.stdin.isatty() else Pipe() as source, once():
        with source.loading(arguments.model):
            model = load_model(arguments)
            conversation = Conversation(model, config, arguments.system, arguments.tools, _notice)
        commands = Commands(conversation, _notice)
        while not commands.is_over and (said := _next(source)):
            _take(said, source, conversation, commands)
    return 0


def _next(source: Terminal | Pipe) -> Said | None:
    """What is said next; None at the end of the input."""
    while True:
        try:
            return read_said(source)
        except KeyboardInterrupt:
            if not source.is_interactive:
                raise
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            return None
        except ValueError as error:
            if not source.is_interactive:
                raise
            _tell(error)


def _take(said: Said, source: Terminal | Pipe, conversation: Conversation, commands: Commands) -> None:
    """Obeys a command, or writes the answer to what was said. What is wrong is one line; Ctrl-C stops an answer."""
    try:
        with source.answering():
            pieces = commands.obey(said.text) if said.is_command else conversation.answer(said.text)
            with closing(pieces):
                _write(pieces)
    except KeyboardInterrupt:
        print(" [stopped]", flush=True)
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        _tell(error)


def _tell(error: Exception) -> None:
    print(f"pace: error: {error}", file=sys.stderr)


def _write(pieces) -> None:
    """An answer as it comes, and a newline where there is one."""
    is_empty = True
    for piece in pieces:
        print(piece, end="", flush=True)
        is_empty = False
    if not is_empty:
        print(flush=True)


def _notice(text: str) -> None:
    """On stderr, so that stdout holds the answers and nothing else."""
    print(text, file=sys.stderr, flush=True)


def _tools(path: str) -> list:
    try:
        with open(path, encoding="utf-8") as file:
            tools = json.load(file)
        read_tools(tools)
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} holds no tools ({error}); give a file with a JSON list") from None
    return tools
