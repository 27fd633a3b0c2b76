"""What every processor of images or sound does, and the processors of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pace.media.media import Media, MediaSpan
from pace.naming import counted

if TYPE_CHECKING:
    import numpy as np


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
            raise ValueError(f"this model takes no {'images' if kind == 'image' else kind}")

    def __call__(self, images: Any = None, audio: Any = None) -> dict[str, np.ndarray]:
        """Prepares images and clips, one or a list of each, with the checkpoint's own limits of tokens.

        Returns the arrays of the checkpoint's processor in transformers. Raises ValueError if there is nothing to
        prepare or the model does not take it."""
        arrays: dict[str, np.ndarray] = {}
        for kind, name, sources in (("image", "images", images), ("audio", "audio", audio)):
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
        """Finds the tokens of each medium in the ids of an expanded text, in order of their places.

        `token_ids` has the id of each kind's placeholder token. Raises ValueError unless the runs of an id are the
        media of its kind, one after the other."""

        spans = []
        for kind, processor in self.of_kind.items():
            places = [place for place, token in enumerate(tokens) if token == token_ids[kind]]
            own = [medium for medium in media if medium.kind == kind]
            check_tokens(processor, len(places), own)
            begin = 0
            for medium in own:
                end = begin + medium.num_tokens
                if places[end - 1] - places[begin] != medium.num_tokens - 1:
                    raise ValueError(
                        f"the {medium.num_tokens} tokens {processor.token} from {places[begin]} on are of one medium, "
                        "but other tokens are between them"
                    )
                spans.append(MediaSpan(places[begin], medium))
                begin = end
        return sorted(spans, key=lambda span: span.start)


def media_text(processor: MediaProcessor, number: int) -> str:
    """A number of media in words, such as "2 images"."""
    return counted(number, "clip" if processor.kind == "audio" else processor.kind)


def check_count(processor: MediaProcessor, found: int, given: int) -> None:
    if found != given:
        raise ValueError(
            f"the prompt has {counted(found, 'placeholder')} {processor.token} for {media_text(processor, given)}; "
            f"it needs one for each, and the text may not hold {processor.token} otherwise"
        )


def check_tokens(processor: MediaProcessor, found: int, media: Sequence[Media]) -> None:
    needed = sum(medium.num_tokens for medium in media)
    if found != needed:
        raise ValueError(
            f"the prompt has {counted(found, 'token')} {processor.token}, but {media_text(processor, len(media))} "
            f"must have {needed}; the text may not hold {processor.token} otherwise"
        )
