"""Derives guidance's chat templates from any template of transformers.

guidance writes a conversation turn by turn, with text before and after each content; a Jinja template renders it as a
whole. So conversations with marked contents are rendered. The text between two marks is split into the end of one turn
and the start of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from guidance.chat import ChatTemplate, UnsupportedRoleException

USUALLY_AFTER = {"user": "assistant", "assistant": "user", "tool": "assistant"}
"""The assumed previous role of a turn, if it is unknown."""
UP_TO = {"user": ["user"], "system": ["system"]}
"""Role -> roles of a conversation that ends with it, for `_up_to`. For the assistant a question comes before it; for
any other role, a question and an answer."""


class DerivedTemplate(ChatTemplate):
    """The template of one tokenizer, as a class made by `derive`."""

    template_str: str
    turns: Turns

    def get_role_start(self, role_name: str, **kwargs: Any) -> str:
        return self.start(role_name, USUALLY_AFTER.get(role_name))

    def get_role_end(self, role_name: str | None = None) -> str:
        return "" if role_name is None else self.turns.end(role_name)

    def start(self, role: str, previous: str | None) -> str:
        """Returns the text before the content of `role`, after a turn of `previous`, or at the beginning if that is
        None. Raises UnsupportedRoleException for a role that the template does not support."""
        if previous is None:
            text = self.turns.opening(role)
        else:
            text = self.turns.start(role, previous)
            if text is None and (usual := USUALLY_AFTER.get(role)) is not None:
                text = self.turns.start(role, usual)
        if text is None:
            raise UnsupportedRoleException(role, self)
        return text


def derive(tokenizer: Any, hidden_start: str = "") -> type[DerivedTemplate] | None:
    """Makes the template of a tokenizer; None if the tokenizer has no template. `hidden_start` is removed from the
    beginning."""
    source = getattr(tokenizer, "chat_template", None)
    if source is None:
        return None
    source = source if isinstance(source, str) else source.get("default", next(iter(source.values())))
    attributes = {"template_str": source, "turns": Turns(tokenizer, hidden_start)}
    return type("DerivedTemplate", (DerivedTemplate,), attributes)


class Turns:
    """Text around turns in a tokenizer's template; None if the template cannot render it. Each text is computed
    once."""

    def __init__(self, tokenizer: Any, hidden_start: str) -> None:
        self._tokenizer = tokenizer
        self._hidden_start = hidden_start
        self._known: dict[tuple[str, ...], str | None] = {}

    def opening(self, role: str) -> str | None:
        """Text before a first turn of this role."""
        return self._once(lambda: self._opening(role), "opening", role)

    def start(self, role: str, previous: str) -> str | None:
        """Text between the end of a turn of `previous` and the content of `role`."""
        between = self._between(previous, role)
        return None if between is None else between[len(self.end(previous)) :]

    def end(self, role: str) -> str:
        """Text after the content of a turn, independent of the next turn. It is "" if it depends on the next turn,
        which then includes it."""
        return self._once(lambda: self._end(role), "end", role)

    def _between(self, previous: str, role: str) -> str | None:
        return self._once(lambda: self._find_between(previous, role), "between", previous, role)

    def _once(self, find: Callable[[], str | None], *key: str) -> str | None:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _opening(self, role: str) -> str | None:
        pieces = self._pieces([role]) or self._pieces([role, "user"])
        return pieces and pieces[0]

    def _find_between(self, previous: str, role: str) -> str | None:
        """Text between the contents of two turns. An assistant's turn begins with the generation prompt."""
        roles = _up_to(previous)
        if role != "assistant":
            pieces = self._pieces([*roles, role]) or self._pieces([*roles, role, "assistant"])
            return pieces and pieces[len(roles)]
        begun, over = self._pieces(roles, begin_answer=True), self._pieces(roles)
        if begun is not None and begun != over:
            return begun[-1]
        shown = self._pieces([*roles, role])
        return shown and shown[-2]

    def _end(self, role: str) -> str:
        following = {"system": ["user", "assistant"], "assistant": ["user"]}.get(role, ["assistant"])
        betweens = [text for other in following if (text := self._between(role, other)) is not None]
        pieces = self._pieces(_up_to(role))
        tail = "" if pieces is None else pieces[-1]  # some templates reject a lone system prompt
        return tail if all(text.startswith(tail) for text in betweens) else ""

    def _pieces(self, roles: Sequence[str], begin_answer: bool = False) -> list[str] | None:
        """Renders a conversation of these roles and returns the text around the contents, one more piece than roles.
        None if the template raises or does not show each content once."""
        marks = [f"zq{index}content" for index in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin_answer)
        except Exception:  # a template may raise anything for an unexpected conversation
            return None
        pieces = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found or mark in text:
                return None
            pieces.append(before)
        pieces[0] = pieces[0].removeprefix(self._hidden_start)
        return [*pieces, text]


def _up_to(role: str) -> list[str]:
    return UP_TO.get(role, ["user", "assistant"] if role == "assistant" else ["user", "assistant", role])
