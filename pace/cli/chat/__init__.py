"""`pace chat`: a conversation at a terminal, or from a pipe (one line is one turn)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing

from pace.cli.arguments import (
    add_adapter_arguments,
    add_media_arguments,
    add_model_arguments,
    load_adapters,
    open_llm,
)
from pace.cli.chat.commands import Commands, check_settings
from pace.cli.chat.conversation import Conversation
from pace.cli.chat.kept import KeptConversation, check_folder
from pace.cli.chat.screen import Screen
from pace.cli.chat.terminal import Pipe, Terminal, ended_by_signals, once, read_said
from pace.cli.sampling import add_sampling_arguments, sampling_config
from pace.llm.chat import read_tools


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system prompt, such as 'Answer in one word.'")
    parser.add_argument(
        "--tools",
        metavar="FILE",
        type=_tools,
        help="tools that the model may call: a file with a JSON list, in the form of OpenAI's API. A call is shown, "
        "and what you type next is its result",
    )
    parser.add_argument(
        "--session",
        metavar="FILE",
        help="go on with the conversation in FILE, and write it there at the end, with what the model has computed: a "
        "long text is not read again. FILE may be new",
    )
    add_media_arguments(parser, "show the model an image with the first question, like /image; may be repeated")
    parser.add_argument(
        "--no-history",
        dest="history",
        action="store_false",
        help="do not save what you type at a terminal for the next run",
    )
    parser.advice = "for one question and its answer: pace generate --chat MODEL PROMPT"
    parser.set_defaults(parser=parser)
    add_model_arguments(parser)
    add_adapter_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = sampling_config(arguments)
        check_settings(config)
        if arguments.session is not None and arguments.system is not None and os.path.exists(arguments.session):
            raise ValueError(
                f"--system {arguments.system!r:.60} does not work with {arguments.session}, which has a conversation "
                "with its own system prompt; leave it out, or begin another file"
            )
        if arguments.session is not None:
            check_folder(arguments.session)
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))
    screen = Screen()
    with ended_by_signals(), Terminal(arguments.history) if sys.stdin.isatty() else Pipe() as source, once():
        with source.loading(arguments.model):
            model = open_llm(arguments, is_chat=True)
            conversation = Conversation(model, config, arguments.system, arguments.tools, screen.notice)
            conversation.adapter = load_adapters(model, arguments)
            keep: Callable[[], None] = lambda: None
            if arguments.session is not None:
                keep = KeptConversation(arguments.session, model, conversation, screen.notice).write
        commands = Commands(conversation, screen.notice)
        for kind, paths in (("image", arguments.image), ("audio", arguments.audio)):
            for path in paths:
                commands.attach(kind, path)
        try:
            _talk(source, screen, conversation, commands)
        finally:
            keep()
    return 0


def _talk(source: Terminal | Pipe, screen: Screen, conversation: Conversation, commands: Commands) -> None:
    """Takes turns until the user leaves, or the input ends."""
    while not commands.is_over:
        try:
            _turn(source, screen, conversation, commands)
        except KeyboardInterrupt:
            if not source.is_interactive:
                raise
            screen.notice("\n(/exit or Ctrl-D leaves)")
        except EOFError:
            break


def _turn(source: Terminal | Pipe, screen: Screen, conversation: Conversation, commands: Commands) -> None:
    """Reads one command or message, and runs it or writes the answer. An error is printed as one line; Ctrl-C stops the
    answer. Raises EOFError at the end of the input."""
    try:
        said = read_said(source)
    except ValueError as error:
        screen.notice(f"pace: error: {error}")
        return
    try:
        with source.answering():
            pieces = commands.obey(said.text) if said.is_command else conversation.answer(said.text)
            with closing(pieces):
                for piece in pieces:
                    screen.write(piece)
    except KeyboardInterrupt:
        screen.write(" [stopped]")
    except BrokenPipeError:
        raise
    except (ImportError, MemoryError, NotImplementedError, OSError, TypeError, ValueError) as error:
        screen.notice(f"pace: error: {error}")
    screen.end_line()


def _tools(path: str) -> list:
    try:
        with open(path, encoding="utf-8") as file:
            tools = json.load(file)
        read_tools(tools)
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} holds no tools ({error}); give a file with a JSON list") from None
    return tools
