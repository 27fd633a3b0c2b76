"""Applies a tokenizer's chat template to messages, and reports why it fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pace.llm.chat.tools import Tool

logger = logging.getLogger("pace")


class TemplateRefusal(ValueError):
    """Raised if a chat template rejects a conversation, leaves a part of it out, or is invalid. The message names its
    file."""

    def __init__(self, file: str, reason: str) -> None:
        self.reason = reason
        """The message without the file, for recipients who should not see the path."""
        super().__init__(f"{file}: {reason}")


class Rendering:
    """Renders messages that are already in the template's form."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

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
