"""Commands of a conversation: lines that start with a slash."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from pace.cli.chat.attachments import attach, from_saved, to_saved
from pace.cli.chat.conversation import Conversation
from pace.cli.sampling import add_sampling_arguments, sampling_config
from pace.llm.configs import WITHOUT_EFFECT, SamplingConfig
from pace.llm.defaults import with_defaults
from pace.llm.processors.prompts import NOUNS

HELP = '''\
/system TEXT     start again, with TEXT as the system prompt (without TEXT: with none)
/reset           start again, with the same system prompt
/regen           answer the last question again
/set NAME VALUE  change a setting, such as temperature or max_tokens; without VALUE back to its default; alone: show
/stats           times and tokens of the last answer, and how full the context is
/save FILE       write the conversation: a JSON list of messages
/load FILE       take up a conversation that is written there
/image FILE      show the model an image with the next question; several commands show several (without FILE: none)
/audio FILE      the same with a clip of sound
/help            this
/exit            leave (so does Ctrl-D)
A text of several lines stands between """ and """; one that is pasted needs none. Ctrl-C stops an answer; what was said
so far stays in the conversation. What you type while an answer is written is asked next. A line that starts with /
and a word is a command: to say such a line to the model, put a space in front.'''
ALIASES = {"/bye": "/exit", "/quit": "/exit", "/clear": "/reset", "/?": "/help"}
"""Names of commands in other tools."""


class Commands:
    """The commands of one conversation."""

    def __init__(self, conversation: Conversation, notice: Callable[[str], None]) -> None:
        """`notice` is called with a message for the user after a command."""
        self.conversation, self.notice = conversation, notice
        self.is_over = False
        """True once the user has asked to leave."""
        self._known: set[Path] = set()
        """Files with a saved version of this conversation, which may be overwritten."""

    def obey(self, line: str) -> Iterator[str]:
        """Runs a line that starts with a slash; yields pieces of an answer if the command has one. Raises ValueError,
        TypeError or OSError if the command fails."""
        name, *rest = line.split(maxsplit=1)
        text = rest[0].strip() if rest else ""
        match ALIASES.get(name, name):
            case "/system":
                self._restart(text or None)
            case "/reset":
                self._restart(self.conversation.system)
            case "/regen":
                yield from self.conversation.answer_again()
            case "/set":
                self._set(text)
            case "/stats":
                self._stats()
            case "/save":
                self._save(text)
            case "/load":
                self._load(text)
            case "/image" | "/audio" as name:
                self.attach(name[1:], text)
            case "/help":
                self.notice(HELP)
            case "/exit":
                self.is_over = True
            case _:
                raise ValueError(f"there is no command {name}; /help lists the commands")

    def attach(self, kind: str, text: str) -> None:
        """Attaches a file of this kind to the next question. Without a path, removes what is attached. Raises what
        `attachments.attach` raises."""
        conversation = self.conversation
        if not text:
            conversation.attached = [part for part in conversation.attached if part.kind != kind]
            self.notice(f"(no {NOUNS[kind]} with the next question)")
            return
        part, size = attach(kind, text, conversation.encoder, conversation.model.tokenizer)
        conversation.attached.append(part)
        self.notice(f"({part.where}, {size}, is sent with the next question)")

    def _restart(self, system: str | None) -> None:
        self.conversation.restart(system)
        prompt = "the system prompt" if system else "no system prompt"
        self.notice(f"(a new conversation, with {prompt}{f' {system!r:.60}' if system else ''})")

    def _set(self, text: str) -> None:
        if text:
            name, *rest = text.split(maxsplit=1)
            config = self.conversation.config.copy()
            name = name.removeprefix("--").replace("-", "_")
            config.update({name: _read_setting(name, rest[0]) if rest else None})
            check_settings(config)
            self._settled(config).check_consistent(config.explicit_fields)
            self.conversation.config = config
        config = self.conversation.config
        given = [name for name in config.to_dict() if name in config.explicit_fields]
        self.notice(f"(set: {_listed(config, given)}; defaults: {self._defaults()})")

    def _defaults(self) -> str:
        """Sampling parameters that the user has not set, with the values they default to."""
        config, settled = self.conversation.config, self._settled(self.conversation.config)
        names = ("do_sample", *WITHOUT_EFFECT) if settled.do_sample else ("do_sample",)
        return _listed(settled, [name for name in names if name not in config.explicit_fields])

    def _settled(self, config: SamplingConfig) -> SamplingConfig:
        return with_defaults(config, self.conversation.model.generator.defaults, is_chat=True)

    def _stats(self) -> None:
        if self.conversation.last is None:
            raise ValueError("there is no answer yet")
        used, most = self.conversation.num_tokens, self.conversation.model.max_seq_len
        self.notice(
            f"{self.conversation.last.metrics}\ncontext: {used} of {most} tokens ({100 * used // most} %), "
            f"{len(self.conversation.messages)} messages"
        )

    def _save(self, text: str) -> None:
        if not text:
            raise ValueError("/save needs the name of a file: /save FILE")
        path = Path(text).expanduser().resolve()
        if path.exists() and path not in self._known:
            raise ValueError(f"{text} exists already; give another name")
        messages = json.dumps(to_saved(self.conversation.messages), ensure_ascii=False, indent=1)
        path.write_text(messages + "\n", encoding="utf-8")
        self._known.add(path)
        self.notice(f"({len(self.conversation.messages)} messages in {text})")

    def _load(self, text: str) -> None:
        if not text:
            raise ValueError("/load needs the name of a file: /load FILE")
        path = Path(text).expanduser().resolve()
        try:
            self.conversation.resume(from_saved(json.loads(path.read_text(encoding="utf-8"))))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{text} holds no conversation for this model: {error}") from None
        self._known.add(path)
        awaited = "".join(f"; the result of {call.name} comes next" for call in self.conversation.open_calls[:1])
        self.notice(f"({len(self.conversation.messages)} messages from {text}{awaited})")


def _listed(config: SamplingConfig, names: list[str]) -> str:
    """Settings and their values, as `/set` takes them."""
    values = ((name, getattr(config, name)) for name in names)
    texts = [f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in values]
    return ", ".join(texts) or "nothing"


def check_settings(config: SamplingConfig) -> None:
    """Raises ValueError for settings that a conversation does not support."""
    if config.num_return_sequences > 1:
        raise ValueError(
            f"num_return_sequences={config.num_return_sequences}: a conversation needs a single answer; leave it out"
        )
    if config.num_beams > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: answers are shown while they come, and beam search has none until its end; "
            "use `pace generate --chat`"
        )
    for name, value in (("logprobs", config.logprobs), ("prompt_logprobs", config.prompt_logprobs)):
        if value is not None:
            raise ValueError(f"{name}={value}: a conversation does not show them; use `pace generate --chat --json`")


class _Settings(argparse.ArgumentParser):
    """Reads settings like the command line."""

    def error(self, message: str):
        raise ValueError(message.removeprefix("argument --"))


def _read_setting(name: str, text: str):
    """Returns the value of a field of SamplingConfig from the text of its option; true or false for a flag. Raises
    TypeError for an unknown field, ValueError for a wrong value."""
    setattr(SamplingConfig(), name, None)  # raises for an unknown field
    parser = _Settings(add_help=False, prog="", allow_abbrev=False)
    add_sampling_arguments(parser)
    option = "--" + name.replace("_", "-")
    action = parser._option_string_actions.get(option)
    if action is None:
        raise ValueError(f"{name} can only be set from Python")
    if isinstance(action, argparse.BooleanOptionalAction):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false; got {text!r}")
        arguments = [option if text.lower() == "true" else f"--no-{option[2:]}"]
    else:
        arguments = [option, *shlex.split(text)] if action.nargs == "+" else [f"{option}={text}"]
    return getattr(sampling_config(parser.parse_args(arguments)), action.dest)
