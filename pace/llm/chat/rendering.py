"""Applies a tokenizer's chat template to messages, and reports why it fails."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pace.llm.chat.tools import Tool
from pace.llm.processors.processor import MediaProcessor
from pace.llm.processors.prompts import MediaPart

logger = logging.getLogger("pace")


class TemplateRefusal(ValueError):
    """Raised if a chat template rejects a conversation, leaves a part of it out, or is invalid. The message names its
    file."""

    def __init__(self, file: str, reason: str) -> None:
        self.reason = reason
        """The message without the file, for recipients who should not see the path."""
        super().__init__(f"{file}: {reason}")


class Rendering:
    """Renders messages that are already in the template's form, and makes content in this form."""

    def __init__(self, tokenizer: Any, processors: Mapping[str, MediaProcessor]) -> None:
        """`processors` are those of the kinds of media that the model takes."""
        self.processors = processors
        self._tokenizer = tokenizer
        self._in_parts: dict[str, bool] = {}
        """True for roles whose content must be a list of parts."""
        self._media_in_parts: dict[str, bool] = {}
        """True for kinds of media that the template shows as parts."""

    def text(self, messages: list[dict[str, Any]], tools: Sequence[Tool], options: Mapping[str, Any]) -> str:
        """Renders messages. Raises TemplateRefusal."""
        given = {"tools": [tool.for_template() for tool in tools]} if tools else self._no_tools
        return self._apply(messages, given | dict(options))

    def attempt(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = ()) -> str:
        """Renders messages; "" if the template rejects them."""
        try:
            return self.text(messages, tools, {"add_generation_prompt": True})
        except TemplateRefusal:
            return ""

    def message(self, role: str, *pieces: str | MediaPart) -> dict[str, Any]:
        """Returns a message with texts and media. Media are parts without their sources, or placeholders in the text if
        the template does not show such parts."""
        shown: list[str | dict[str, str]] = []
        for piece in pieces:
            if isinstance(piece, str):
                shown.append(piece)
            else:
                in_parts = self._takes_media(piece.kind)
                shown.append({"type": piece.kind} if in_parts else self.processors[piece.kind].placeholder)
        texts = [piece for piece in shown if isinstance(piece, str)]
        if len(texts) == len(shown):
            return plain_message(role, "".join(texts), self._takes_parts(role))
        content = [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in shown]
        return {"role": role, "content": content}

    def shows(self, role: str, in_parts: bool) -> bool:
        """True if the template shows a message of this role."""
        probe = plain_message(role, "zq_text", in_parts)
        question = probe if role == "user" else self.message("user", "zq_question")
        talks = (
            [[probe]]
            if role == "user"
            else [[probe, question]]
            if role == "system"
            else [[question, probe], [question, probe, question]]
        )
        return any(re.search(r"(?<!['\"]text['\"]: ['\"])zq_text", self.attempt(talk)) for talk in talks)

    def _takes_parts(self, role: str) -> bool:
        """True if the template shows a message of this role only if its content is a list of parts."""
        if role not in self._in_parts:
            self._in_parts[role] = not self.shows(role, False) and self.shows(role, True)
        return self._in_parts[role]

    def _takes_media(self, kind: str) -> bool:
        """True if the template shows a part of this kind by its placeholder, next to a text."""
        if kind not in self._media_in_parts:
            content = [{"type": kind}, {"type": "text", "text": "zq_text"}]
            shown = self.attempt([{"role": "user", "content": content}])
            self._media_in_parts[kind] = shown.count(self.processors[kind].marker) == 1 and "zq_text" in shown
        return self._media_in_parts[kind]

    @property
    def file(self) -> str:
        """Path of the template."""
        path = Path(getattr(self._tokenizer, "name_or_path", None) or "")
        names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
        found = [path / name for name in names if (path / name).is_file()]
        return str(found[0] if found else path if path.is_file() else "the tokenizer's chat_template")

    @cached_property
    def _no_tools(self) -> dict[str, Any]:
        """Options for a conversation without tools. Some templates iterate over the tools even if there are none."""
        for options in ({}, {"tools": []}):
            for in_parts in (False, True):
                with contextlib.suppress(TemplateRefusal):
                    self._apply([plain_message("user", "zq_question", in_parts)], options)
                    return options
        return {}

    def _apply(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template may raise anything
            raise TemplateRefusal(self.file, _reason(error)) from error


def plain_message(role: str, text: str, in_parts: bool) -> dict[str, Any]:
    """Returns a message with its text as a string, or as a list of one part."""
    return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}


@lru_cache(maxsize=64)
def log_moved_instructions(file: str, template: str) -> None:
    """Warns, once per template, that instructions do not stay where a client put them."""
    logger.warning(
        "%s: the chat template does not support all system messages where they are: they are joined at the beginning "
        "of the conversation, or put into turns of the user",
        file,
    )


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno} of the chat template is not Jinja: {error.message}"
    kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # the template's own error
    return f"the chat template refuses these messages: {kind}{error}"
