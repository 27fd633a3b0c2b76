"""Items of a response's output, while they are generated. Their methods yield events: a name and its members."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

Events = Iterator[tuple[str, dict[str, Any]]]


class Item:
    """One item of the output: `begin`, any number of `add`, then `end`."""

    kind = ""
    id_prefix = ""

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All text added so far."""
        return "".join(self._texts)

    @property
    def place(self) -> dict[str, Any]:
        """Members that locate an event."""
        return {"item_id": self.id, "output_index": self.index}

    def members(self) -> dict[str, Any]:
        """Returns the members of the item's object in addition to its id, type and status."""
        raise NotImplementedError

    def object(self) -> dict[str, Any]:
        """Returns the item in its current state."""
        return {"id": self.id, "type": self.kind, "status": self.status, **self.members()}

    def begin(self) -> Events:
        yield "response.output_item.added", {"output_index": self.index, "item": self.object()}

    def add(self, text: str) -> Events:
        raise NotImplementedError

    def end(self, status: str) -> Events:
        self.status = status
        yield "response.output_item.done", {"output_index": self.index, "item": self.object()}


class TextItem(Item):
    """An item with one part of text."""

    part_kind = ""
    _has_part = False

    @property
    def place(self) -> dict[str, Any]:
        return {**super().place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        return {"type": self.part_kind, "text": self.text}

    def done(self) -> dict[str, Any]:
        """Returns the members of the event for the complete text."""
        return {"text": self.text}

    def members(self) -> dict[str, Any]:
        return {"content": [self.part()] if self._has_part else []}

    def begin(self) -> Events:
        yield from super().begin()
        self._has_part = True
        yield "response.content_part.added", {**self.place, "part": self.part()}

    def add(self, text: str) -> Events:
        self._texts.append(text)
        yield f"response.{self.part_kind}.delta", {**self.place, "delta": text}

    def end(self, status: str) -> Events:
        yield f"response.{self.part_kind}.done", {**self.place, **self.done()}
        yield "response.content_part.done", {**self.place, "part": self.part()}
        yield from super().end(status)


class MessageItem(TextItem):
    """The model's text, with log-probabilities if requested."""

    kind, part_kind, id_prefix = "message", "output_text", "msg_"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        return {**super().part(), "annotations": [], "logprobs": list(self._logprobs)}

    def done(self) -> dict[str, Any]:
        return {**super().done(), "logprobs": list(self._logprobs)}

    def members(self) -> dict[str, Any]:
        return {"role": "assistant", **super().members()}

    def take(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        """Adds text like `add`, without an event: the caller writes the delta itself, for speed."""
        self._texts.append(text)
        self._logprobs += logprobs


class ReasoningItem(TextItem):
    """The model's thoughts."""

    kind, part_kind, id_prefix = "reasoning", "reasoning_text", "rs_"

    def members(self) -> dict[str, Any]:
        return {"summary": [], **super().members()}


class CallItem(Item):
    """A function call. A call that was cut off is incomplete, and has no event for complete arguments."""

    kind, id_prefix = "function_call", "fc_"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self.is_whole = False
        self._call_id = call_id
        self._name = name

    def members(self) -> dict[str, Any]:
        return {"call_id": self._call_id, "name": self._name, "arguments": self.text}

    def add(self, text: str) -> Events:
        self._texts.append(text)
        yield "response.function_call_arguments.delta", {**self.place, "delta": text}

    def end(self, status: str) -> Events:
        if self.is_whole:
            yield "response.function_call_arguments.done", {**self.place, "arguments": self.text}
        yield from super().end("completed" if self.is_whole else "incomplete")
