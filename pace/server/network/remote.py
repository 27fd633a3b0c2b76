"""Images that a request names by URL."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pace.server.errors import invalid
from pace.server.schemas.media import IMAGE_TYPES, media_type_of


@dataclass(frozen=True)
class RemoteImage:
    """A part of a message with the URL of an image."""

    part: dict[str, Any]
    place: str
    url: str

    def put(self, data: bytes) -> None:
        """Puts the image itself in place of its URL. Raises ApiError for data that is not an image."""
        media_type = media_type_of(data)
        if media_type not in IMAGE_TYPES:
            raise invalid(self.place, f"is not an image in a known format; these are {', '.join(IMAGE_TYPES)}")
        text = base64.b64encode(data).decode()
        if self.part["type"] == "image":
            self.part["source"] = {"type": "base64", "media_type": media_type, "data": text}
            return
        url, given = f"data:{media_type};base64,{text}", self.part["image_url"]
        self.part["image_url"] = {**given, "url": url} if isinstance(given, Mapping) else url


def remote_images(request: Any) -> Iterator[RemoteImage]:
    """Yields the images with a URL in a request, in order. All that is wrong with the request is left to its schema."""
    for name in ("messages", "input"):
        items = getattr(request, name, None)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            for key in ("content", "output"):
                content = item.get(key) if isinstance(item, dict) else getattr(item, key, None)
                yield from _in_content(content, f"{name}[{index}].{key}")


def _in_content(content: Any, place: str) -> Iterator[RemoteImage]:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict):
            continue
        where = f"{place}[{index}]"
        if part.get("type") == "tool_result":
            yield from _in_content(part.get("content"), f"{where}.content")
        url = _url_of(part)
        if isinstance(url, str):
            yield RemoteImage(part, where, url)


def _url_of(part: dict[str, Any]) -> Any:
    if part.get("type") in ("image_url", "input_image") and part.get("file_id") is None:
        given = part.get("image_url")
        return given.get("url") if isinstance(given, Mapping) else given
    source = part.get("source") if part.get("type") == "image" else None
    return source.get("url") if isinstance(source, Mapping) and source.get("type") == "url" else None
