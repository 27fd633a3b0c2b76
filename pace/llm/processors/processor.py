"""What every processor of images or sound does, and the processors of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pace.media.media import Media, MediaSpan
from pace.naming import counted

if TYPE_CHECKING:
    import numpy as np

NOUNS = {"image": "images", "audio": "sound"}
"""Kinds of media, and what messages call them."""
SINGLE = {"image": "image", "audio": "clip"}
"""What messages call one of them."""
MEDIA_LISTS = {"images": "image", "audio": "audio"}
"""Names of lists of media in prompts and calls, and the kind of the media in each."""


class MediaProcessor(Protocol):
    """Prepares media of one kind for a model's tower."""

    kind: ClassVar[str]
    """"image" or "audio"."""
    placeholder: ClassVar[str]
    """Text of one medium in a prompt before its expansion, such as "<|vision_start|><|image_pad|><|vision_end|>"."""
    token: ClassVar[str]
    """The special token in `placeholder` that is repeated for every row of the tower, such as "<|image_pad|>"."""

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes and prepares one medium. `max_tokens` lowers the checkpoint's own limit.

        Raises MediaError for a medium that cannot be read or shrunk to the limits. Raises TypeError for another kind of
        object, and ImportError that names the extra to install."""
        ...

    def count_tokens(self, source: Any, max_tokens: int | None = None) -> int:
        """`prepare(source, max_tokens).num_tokens`, from the header and without decoding."""
        ...

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """One or more media in the arrays of the checkpoint's processor in transformers: names, shapes, dtypes and
        bits of its `backend="pil"`."""
        ...


@dataclass(frozen=True)
class Processors:
    """The processors of one model."""

    image: MediaProcessor | None = None
    audio: MediaProcessor | None = None

    @property
    def of_kind(self) -> dict[str, MediaProcessor]:
        """Kind -> processor, for the kinds that the model takes."""
        return {processor.kind: processor for processor in (self.image, self.audio) if processor is not None}

    def check_kind(self, kind: str) -> None:
        """Raises ValueError if the model does not take media of that kind."""
        if kind not in self.of_kind:
            raise ValueError(f"this model takes no {NOUNS[kind]}")

    def __call__(self, images: Any = None, audio: Any = None) -> dict[str, np.ndarray]:
        """Prepares images and clips, one or a list of each, with the checkpoint's own limits of tokens.

        Returns the arrays of the checkpoint's processor in transformers. Raises ValueError if there is nothing to
        prepare or the model does not take it."""
        arrays: dict[str, np.ndarray] = {}
        for (name, kind), sources in zip(MEDIA_LISTS.items(), (images, audio)):
            if sources is None:
                continue
            self.check_kind(kind)
            sources = list(sources) if isinstance(sources, (list, tuple)) else [sources]
            if not sources:
                raise ValueError(f"{name} is an empty list; give at least one or leave {name} out")
            processor = self.of_kind[kind]
            arrays |= processor.arrays([processor.prepare(source) for source in sources])
        if not arrays:
            raise ValueError("the processor needs images=[...] or audio=[...]")
        return arrays

    def expand(self, text: str, media: Sequence[Media]) -> str:
        """The text with each placeholder token repeated as often as its medium has tokens.

        Raises ValueError for a kind that the model does not take, and unless the text has one placeholder for each
        medium of a kind. The text may hold more of them if a user typed one."""
        for medium in media:
            self.check_kind(medium.kind)
        for kind, processor in self.of_kind.items():
            counts = [medium.num_tokens for medium in media if medium.kind == kind]
            pieces = text.split(processor.token)
            check_count(processor, len(pieces) - 1, len(counts))
            text = pieces[0] + "".join(processor.token * count + piece for count, piece in zip(counts, pieces[1:]))
        return text

    def locate(self, tokens: Sequence[int], media: Sequence[Media], token_ids: Mapping[str, int]) -> list[MediaSpan]:
        """Finds the tokens of each medium in the ids of an expanded text, in order of their places. `token_ids` has the
        id of each kind's placeholder token. Raises what `place_media` raises."""
        spans: list[MediaSpan] = []
        for kind, processor in self.of_kind.items():
            own = [medium for medium in media if medium.kind == kind]
            spans += place_media([tokens], own, token_ids[kind], kind, processor.token)[0]
        return sorted(spans, key=lambda span: span.start)


def place_media(
    rows: Sequence[Sequence[int]], media: Sequence[Media], placeholder: int, kind: str, name: str = ""
) -> list[list[MediaSpan]]:
    """Finds the media of one kind in rows of tokens: the runs of `placeholder`, in order. `name` is its text, for
    errors. Raises ValueError unless the media need this number of placeholders, without a gap within one."""
    name = name or f"of id {placeholder}"
    places = [(index, at) for index, row in enumerate(rows) for at, token in enumerate(row) if token == placeholder]
    needed = sum(medium.num_tokens for medium in media)
    if len(places) != needed:
        prompts = "the prompt has" if len(rows) == 1 else "the prompts have"
        raise ValueError(
            f"{prompts} {counted(len(places), 'token')} {name}, but {counted(len(media), SINGLE[kind])} must have "
            f"{needed}; a prompt may not have this token otherwise"
        )
    found: list[list[MediaSpan]] = [[] for _ in rows]
    first = 0
    for number, medium in enumerate(media):
        (row, start), last = places[first], places[first + medium.num_tokens - 1]
        if last != (row, start + medium.num_tokens - 1):
            raise ValueError(
                f"{SINGLE[kind]} {number} needs {counted(medium.num_tokens, 'token')} {name} in a row; those from "
                f"token {start} of prompt {row} on have others between them"
            )
        found[row].append(MediaSpan(start, medium))
        first += medium.num_tokens
    return found


def check_count(processor: MediaProcessor, found: int, given: int) -> None:
    if found != given:
        raise ValueError(
            f"the prompt has {counted(found, 'placeholder')} {processor.token} for "
            f"{counted(given, SINGLE[processor.kind])}; it needs one for each, and the text may not hold "
            f"{processor.token} otherwise"
        )
