"""Images and sound that are sent with a question, and conversations with them in files."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pace.checkpoints.files import read_whole
from pace.llm.processors.prompts import NOUNS, MediaPart, PromptEncoder
from pace.naming import counted
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.schemas.media import MAGIC, RequestMedia, media_type_of


def attach(kind: str, text: str, encoder: PromptEncoder, tokenizer: Any) -> tuple[MediaPart, str]:
    """Reads a file of this kind ("image" or "audio") whose path the user typed. Returns the part of a message, and its
    size in words. Later changes of the file have no effect.

    Raises ValueError for a kind that the model does not take, and for a file that cannot be decoded. Raises OSError if
    there is no such file."""
    encoder.check_kind(MediaPart(kind, None))
    path = _path_of(text)
    part = MediaPart(kind, read_whole(path, Limits.media_bytes), where=path.name)
    media_type = media_type_of(part.source)
    if media_type is None or not media_type.startswith(f"{kind}/"):
        types = ", ".join(name.removeprefix(f"{kind}/") for name in MAGIC if name.startswith(f"{kind}/"))
        raise ValueError(f"{path} has no {NOUNS[kind]} in a known format; these are {types}")
    prompt = encoder.encode(encoder.processors[kind].placeholder, [part], tokenizer)
    return part, counted(prompt.media[0].media.num_tokens, "token")


def with_media(media: Sequence[MediaPart], text: str) -> str | list[Any]:
    """The content of a message."""
    return [*media, {"type": "text", "text": text}] if media else text


def to_saved(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with media in the form of OpenAI's API, as data that JSON can hold."""
    return [
        {**message, "content": [_saved_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def from_saved(messages: Any) -> Any:
    """The reverse of `to_saved`; other messages stay as they are. Raises ValueError for parts that are unknown."""
    if not isinstance(messages, list):
        return messages
    reader = RequestMedia(Limits(images=Limits.messages, clips=Limits.messages))
    try:
        return [
            {**message, "content": reader.content(message["content"], f"messages[{index}].content", True)}
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            else message
            for index, message in enumerate(messages)
        ]
    except ApiError as error:
        raise ValueError(str(error)) from None


def _saved_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, MediaPart):
        return part
    media_type, data = media_type_of(part.source), base64.b64encode(part.source).decode()
    if part.kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    return {"type": "input_audio", "input_audio": {"data": data, "format": media_type.removeprefix("audio/")}}


def _path_of(text: str) -> Path:
    """A path as it is, or with quotes and backslashes, as terminals paste the path of a dropped file."""
    path = Path(text).expanduser()
    with suppress(ValueError):
        words = shlex.split(text)
        if not path.exists() and len(words) == 1:
            return Path(words[0]).expanduser()
    return path
