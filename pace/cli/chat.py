"""`pace chat`: a conversation, turn by turn, at a terminal or from a pipe (one line is one turn)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pace.cli.arguments import add_model_arguments, add_sampling_arguments, load_model, sampling_config
from pace.llm.chat import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought, ToolCall, read_tools
from pace.llm.chat.template import ChatTemplate

if TYPE_CHECKING:
    from pace.llm import ChatOutput

HELP = """\
/system TEXT   start again, with TEXT as the system prompt (without TEXT: with none)
/reset         start again, with the same system prompt
/help          this
/exit          leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation. A line that starts with / is a command: to say
such a line to the model, put a space in front."""


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
    parser.set_defaults(parser=parser)
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = sampling_config(arguments)
        if config.num_return_sequences > 1:
            raise ValueError(
                f"--num-return-sequences {config.num_return_sequences}: a conversation goes on from one answer"
            )
        if config.num_beams > 1:
            raise ValueError(
                f"--num-beams {config.num_beams}: an answer is written as it comes, and beam search knows it at its end; `pace generate --chat` has beams"
            )
        for option, value in (("--logprobs", config.logprobs), ("--prompt-logprobs", config.prompt_logprobs)):
            if value is not None:
                raise ValueError(f"{option}: a conversation has no place for them; `pace generate --chat --json` has")
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))
    model = load_model(arguments)
    conversation = Conversation(model, config, arguments.system, arguments.tools)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{arguments.model}: /help for the commands", file=sys.stderr)
    for line in _lines(interactive):
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
        elif line.strip():
            _answer(conversation, line.strip())
    return 0


class Conversation:
    """The messages so far, and the model that continues them."""

    def __init__(self, model, config, system: str | None, tools: list | None = None):
        """Raises ValueError where the model has no chat template."""
        self.model, self.config, self.tools = model, config, tools
        ChatTemplate(model.tokenizer)
        self.restart(system)

    def restart(self, system: str | None) -> None:
        """Forgets what was said; `system` None means no system prompt."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []
        self.open_calls: list[ToolCall] = []
        """Calls whose results are awaited."""

    def answer(self, said: str) -> Iterator[str]:
        """Yields the answer in pieces. What was said is a question, or the result of the first open call; while another
        is open, there is no answer. It and the answer join the messages when the answer ends, is stopped by Ctrl-C or
        the iterator is closed; where the model cannot answer (the context is full, say), neither does."""
        call = self.open_calls[0] if self.open_calls else None
        message = {"role": "user", "content": said}
        if call is not None:
            message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}
        messages = [*self.messages, message]
        if len(self.open_calls) > 1:
            self.messages, self.open_calls = messages, self.open_calls[1:]
            return
        answer = self.model.chat(messages, self.config, tools=self.tools, stream=True)
        try:
            yield from map(_shown, answer)
        except (KeyboardInterrupt, GeneratorExit):
            answer.close()
            self._keep(messages, answer.output)
            raise
        self._keep(messages, answer.output)

    def _keep(self, messages: list[dict], output: ChatOutput) -> None:
        self.open_calls = output.tool_calls if output.finish_reason == "tool_calls" else []
        message = output.message if self.open_calls else {"role": "assistant", "content": output.text}
        self.messages = [*messages, message]


def _shown(event: Event) -> str:
    """A part of an answer as it is written to the screen."""
    match event:
        case Text(text):
            return text
        case Thought(text):
            print(text, end="", file=sys.stderr, flush=True)
        case CallBegins(index, _, name):
            return ("\n" if index else "") + f"{name}("
        case ArgumentsPiece(text=text):
            return text
        case CallEnds():
            return ")"
    return ""


def _tools(path: str) -> list:
    try:
        with open(path, encoding="utf-8") as file:
            tools = json.load(file)
        read_tools(tools)
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} holds no tools ({error}); give a file with a JSON list") from None
    return tools


def _answer(conversation: Conversation, question: str) -> None:
    try:
        for piece in conversation.answer(question):
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", flush=True)
    except ValueError as error:
        print(f"pace: error: {error}", file=sys.stderr)


def _command(conversation: Conversation, line: str) -> bool:
    """Obeys one line that starts with a slash; False where it means to leave. What it did is told on stderr, so that
    stdout holds the answers and nothing else."""
    name, _, text = line.partition(" ")
    if name == "/exit":
        return False
    if name == "/reset":
        conversation.restart(conversation.system)
        print("(a new conversation)", file=sys.stderr)
    elif name == "/system":
        conversation.restart(text.strip() or None)
        print(
            f"(a new conversation, {'with this' if conversation.system else 'without a'} system prompt)",
            file=sys.stderr,
        )
    elif name == "/help":
        print(HELP, file=sys.stderr)
    else:
        print(f"pace: error: no command {name}; /help lists them", file=sys.stderr)
    return True


def _lines(interactive: bool) -> Iterator[str]:
    """What the user types, line by line, without the newline, until the end of the input."""
    if not interactive:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    try:
        import readline  # noqa: F401  gives input() its line editing and history
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
