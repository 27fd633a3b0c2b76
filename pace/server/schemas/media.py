"""Images and sound in the content of messages, in the forms of all supported APIs. All that can be refused without
decoding is refused here, in the order of cost. Errors name the place, and show nothing of the data."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pace.llm.processors.prompts import NOUNS, MediaPart
from pace.naming import shown
from pace.server.errors import invalid, unsupported
from pace.server.limits import Limits

Content = str | list[dict[str, Any] | MediaPart]
"""Content of a message in the template's terms: a text, or parts of type text and media."""

MAGIC: dict[str, Callable[[bytes], bool]] = {
    "image/png": lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"),
    "image/jpeg": lambda data: data.startswith(b"\xff\xd8\xff"),
    "image/gif": lambda data: data.startswith((b"GIF87a", b"GIF89a")),
    "image/webp": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP",
    "audio/wav": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WAVE",
    "audio/mp3": lambda data: (
        data.startswith(b"ID3") or (data[0] == 0xFF and data[1:2] != b"" and data[1] & 0xE6 == 0xE2)
    ),
    "audio/flac": lambda data: data.startswith(b"fLaC"),
}
"""Media types, and the check of the first bytes of such a file."""
SAME = {"image/jpg": "image/jpeg"}
"""A usual misspelling."""
IMAGE_TYPES = tuple(name for name in MAGIC if name.startswith("image/"))
ANY_IMAGE = "image"
"""The media type in Qwen's own examples; the first bytes say which image it is."""
AUDIO_FORMATS = tuple(name.removeprefix("audio/") for name in MAGIC if name.startswith("audio/"))
DETAILS = {None: "auto", "auto": "auto", "low": "low", "high": "high", "original": "high"}
"""Values of `detail`. Images keep their size in "high", up to the server's limit, and so they do in "original"."""
TEXTS = ("text", "input_text", "output_text")
REFUSED = {
    **dict.fromkeys(("file", "input_file", "document", "container_upload"), "files are not supported as input"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video is not supported as input"),
    **dict.fromkeys(("image_embeds", "audio_embeds", "prompt_embeds"), "embeddings are not supported as input"),
    **dict.fromkeys(("audio_url", "audio"), "send sound as input_audio"),
}
"""Types of parts that are refused by name."""
_DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+|image)(?:;[a-z0-9-]+=[^;,\s]*)*;base64,", re.IGNORECASE)
"""A media type, parameters, which have no effect, and the word that says that base64 follows."""
MAX_HEAD = 256
"""Maximum number of characters before the base64 of a data: URL."""


class RequestMedia:
    """Counts the images and clips of a request, and reads them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counts: Counter[str] = Counter()

    def content(
        self, content: Any, place: str, takes_media: bool, separator: str = "", max_parts: int | None = None
    ) -> Content:
        """Returns the content of a message: its joined text, or its parts if it has media. `separator` is put between
        texts. `max_parts` overrides the limit. Raises ApiError."""
        max_parts = self._limits.parts if max_parts is None else max_parts
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise invalid(place, f"must be a string or a list of parts, got {shown(content)}")
        if len(content) > max_parts:
            raise invalid(place, f"may have at most {max_parts} parts, got {len(content)}")
        parts = [self._part(part, f"{place}[{index}]", takes_media) for index, part in enumerate(content)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return separator.join(texts)
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts if part != ""]

    def _part(self, part: Any, place: str, takes_media: bool) -> str | MediaPart:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in TEXTS and isinstance(part.get("text"), str):
            return part["text"]
        if isinstance(kind, str) and kind in REFUSED:
            raise unsupported(place, f"the part is of type {kind}: {REFUSED[kind]}")
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise invalid(
                place, f'is of type {shown(kind)}; send text as {{"type": "text", "text": ...}}, or an image or sound'
            )
        medium = "audio" if kind == "input_audio" else "image"
        if not takes_media:
            raise invalid(place, f"is of type {kind}: only messages of the user and of tools may have {NOUNS[medium]}")
        self._counts[medium] += 1
        maximum = self._limits.clips if medium == "audio" else self._limits.images
        if self._counts[medium] > maximum:
            raise invalid(place, f"is one of more than {maximum} {NOUNS[medium]}, the maximum of a request")
        media_type, data, detail = reader(part, place)
        return MediaPart(medium, self._decode(media_type, data, place), detail, place)

    def _decode(self, media_type: str, data: str, place: str) -> bytes:
        """Returns the bytes of base64 text. Their number follows from its length, so that nothing larger is decoded."""
        num_bytes = len(data) // 4 * 3 - data[-2:].count("=")
        if num_bytes > self._limits.media_bytes:
            raise invalid(place, f"has {num_bytes} bytes; the maximum is {self._limits.media_bytes}")
        try:
            if len(data) % 4 or data[:-2].endswith("="):  # b64decode ignores = beyond the end
                raise ValueError
            found = base64.b64decode(data, validate=True)
        except ValueError:
            raise invalid(
                place, "is not base64: its letters are A-Z, a-z, 0-9, + and /, without spaces, and = fills it to fours"
            ) from None
        if not found:
            raise invalid(place, "has no data")
        types = IMAGE_TYPES if media_type == ANY_IMAGE else (media_type,)
        if not any(MAGIC[name](found[:16]) for name in types):
            raise invalid(place, f"is not {' or '.join(types)}, as its first bytes show")
        return found


def media_type_of(data: bytes) -> str | None:
    """Returns the media type that the first bytes of a file show; None if it is unknown."""
    return next((name for name, matches in MAGIC.items() if data and matches(data[:16])), None)


def texts_of(content: Any) -> list[str]:
    """The texts of a message's content."""
    if not isinstance(content, list):
        return [content or ""]
    return [part["text"] for part in content if isinstance(part, dict)]


def joined(first: Content, second: Content, separator: str) -> Content:
    """Returns the contents of two messages as those of one, with `separator` between two texts."""
    if isinstance(first, str) and isinstance(second, str):
        return separator.join(filter(None, [first, second]))
    parts = [*_parts(first), *_parts(second)]
    at = len(_parts(first))
    if 0 < at < len(parts) and isinstance(parts[at - 1], dict) and isinstance(parts[at], dict):
        parts.insert(at, {"type": "text", "text": separator})
    return parts


def _parts(content: Content) -> list[dict[str, Any] | MediaPart]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


# -- the forms of each API: media type, base64 text and detail ---------------------------------------------------------


def _image_url(part: Mapping[str, Any], place: str) -> tuple[str, str, str]:
    """Reads OpenAI's forms: a URL, or an object with `url` and `detail`."""
    given, detail = part.get("image_url"), part.get("detail")
    if part.get("file_id") is not None:
        raise unsupported(place, "the image has a file_id, and files are not stored here; send it as a data: URL")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail")
    if not isinstance(given, str):
        raise invalid(place, "must have an image_url with the image as a data: URL")
    if not (detail is None or isinstance(detail, str)) or detail not in DETAILS:
        raise invalid(place, f"has the detail {shown(detail)}; it must be auto, low, high or original")
    return *_data_url(given, place), DETAILS[detail]


def _data_url(url: str, place: str) -> tuple[str, str]:
    form = f"send the image itself, as data:TYPE;base64,... with TYPE one of {', '.join(IMAGE_TYPES)}"
    scheme = url[:32].partition(":")[0].lower() if ":" in url[:32] else ""
    if scheme in ("http", "https", "ftp", "file"):
        what = "the path of a file" if scheme == "file" else "an address in the network"
        raise unsupported(place, f"the image is {what}, which this server does not read; {form}")
    found = _DATA_URL.match(url[:MAX_HEAD])
    if found is None:
        raise invalid(place, f"is not a data: URL in base64; {form}")
    media_type = SAME.get(found[1].lower(), found[1].lower())
    if media_type not in (*IMAGE_TYPES, ANY_IMAGE):
        raise invalid(place, f"has the media type {media_type[:40]}; {form}")
    return media_type, url[found.end() :]


def _anthropic_image(part: Mapping[str, Any], place: str) -> tuple[str, str, str]:
    """Reads Anthropic's image block."""
    source = part.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind in ("url", "file"):
        raise unsupported(
            place, f"the image has a source of type {kind}, which this server does not read; send it as base64"
        )
    if kind != "base64":
        raise invalid(place, "must have a source of type base64, with media_type and data")
    media_type, data = source.get("media_type"), source.get("data")
    if media_type not in IMAGE_TYPES:
        raise invalid(place, f"has the media_type {shown(media_type)}; it must be one of {', '.join(IMAGE_TYPES)}")
    if not isinstance(data, str):
        raise invalid(place, "must have its data as a string in base64")
    if part.get("transformations"):
        raise unsupported(place, "the image has transformations, which are not supported; send it as it should be seen")
    return media_type, data, "auto"


def _input_audio(part: Mapping[str, Any], place: str) -> tuple[str, str, str]:
    """Reads OpenAI's sound."""
    given = part.get("input_audio")
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
        raise invalid(place, "must have input_audio with data, a string in base64, and format")
    if (form := given.get("format")) not in AUDIO_FORMATS:
        raise invalid(place, f"has the format {shown(form)}; it must be one of {', '.join(AUDIO_FORMATS)}")
    return f"audio/{form}", given["data"], "auto"


_READERS: dict[str, Callable[[Mapping[str, Any], str], tuple[str, str, str]]] = {
    "image_url": _image_url,
    "input_image": _image_url,
    "image": _anthropic_image,
    "input_audio": _input_audio,
}
"""Types of parts with media, in chat and responses, and of blocks in messages."""
