"""Prompts with images and sound: from a text and its media to token ids, and the media among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pace.llm.processors.processor import NOUNS, MediaProcessor, Processors, Run
from pace.media.media import Layout, Media, MediaError, MediaSpan

LOW_DETAIL_TOKENS = 256
"""Maximum tokens of an image with `detail` "low", unless every image of the model has more."""
DETAILS = ("auto", "low", "high")


@dataclass(frozen=True, eq=False)
class MediaPart:
    """An image or a clip of sound in a message or a prompt, as the caller gave it."""

    kind: str
    """ "image" or "audio"."""
    source: Any = field(repr=False)
    """What the processor takes: bytes, a path, a PIL image, samples."""
    detail: str = "auto"
    """ "low" for at most LOW_DETAIL_TOKENS tokens, "auto" or "high"."""
    where: str = ""
    """Its place in the request, such as `messages[1].content[0]`."""


class MediaPartError(ValueError):
    """An image or a clip that a prompt cannot have. The message names its place."""

    def __init__(self, part: MediaPart, problem: str) -> None:
        self.place = part.where
        super().__init__(f"{part.where}: {problem}" if part.where else problem)


@dataclass(frozen=True, eq=False)
class CountedMedia:
    """A medium whose header is read, and nothing else."""

    part: MediaPart
    processor: MediaProcessor
    max_tokens: int | None
    layout: Layout
    _prepared: list[Media] = field(default_factory=list, init=False, repr=False)

    @property
    def kind(self) -> str:
        return self.part.kind

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def runs(self) -> tuple[int, ...]:
        return self.layout.runs

    @property
    def prepared(self) -> Media:
        """The medium, decoded when this is first asked for. Raises MediaPartError, TypeError, OSError."""
        if not self._prepared:  # a cached_property of Python 3.11 decodes one medium of the process at a time
            with _errors_of(self.part):
                media = self.processor.prepare(self.part.source, self.max_tokens)
                if media.runs != self.runs:
                    raise MediaError(f"it has {media.num_tokens} tokens, and its header said {self.num_tokens}")
            self._prepared.append(media)
        return self._prepared[0]


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and the media among them."""

    tokens: list[int]
    runs: tuple[Run[CountedMedia], ...] = ()
    """The runs of placeholders, in order of positions."""

    @property
    def counted(self) -> list[CountedMedia]:
        """The media, in order of positions."""
        return [run.medium for run in self.runs if not run.first]

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """The prepared media. Decodes those that no call has decoded yet, and raises what `CountedMedia.prepared`
        raises."""
        return tuple(MediaSpan(run.start, run.medium.prepared, run.first, length=run.length) for run in self.runs)

    def beginning(self, num_tokens: int) -> Prompt:
        """The first tokens, at most this number, so that no medium is cut."""
        start = 0
        for run in self.runs:
            start = start if run.first else run.start
            if start < num_tokens < run.start + run.length:
                num_tokens = start
        return Prompt(self.tokens[:num_tokens], tuple(run for run in self.runs if run.start < num_tokens))


class PromptEncoder:
    """Turns texts and media into prompts of one model. Thread-safe.

    Without processors, it is that of a model for text: it takes no media."""

    def __init__(
        self,
        processors: Processors = Processors(),  # noqa: B008 (frozen)
        tokenizer: Any = None,
        max_image_tokens: int | None = None,
        kinds: Iterable[str] | None = None,
    ) -> None:
        """`processors` are those of the model, and `kinds` what prompts may have; None for all. `max_image_tokens`
        limits the tokens of an image, which is made smaller; None for the checkpoint's own limit. Raises ValueError for
        a tokenizer without the placeholder of a processor."""
        self.all = processors
        """The model's processors. Texts may not have the placeholders of kinds that are not taken either."""
        taken = {kind: one for kind, one in processors.of_kind.items() if kinds is None or kind in kinds}
        self.processors = taken
        """The processor of each kind of media that is taken."""
        self.max_image_tokens = max_image_tokens
        self._ids = {kind: id_of(one.token, tokenizer) for kind, one in processors.of_kind.items()}

    def encode(self, text: str, parts: Sequence[MediaPart], tokenizer: Any, add_special_tokens: bool = True) -> Prompt:
        """Returns the tokens of a text, with the marker of each medium expanded. Sizes come from headers: nothing is
        decoded.

        The text must have one marker for each medium, those of a kind in the order of `parts`. Raises ValueError
        for another number of them, since a user may have typed one. Raises MediaPartError, TypeError and OSError for
        media that cannot be read."""
        num_images = sum(part.kind == "image" for part in parts)
        media = [self._count(part, num_images) for part in parts]
        text = self.all.expand(text, media)
        tokens = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if not media and all(number not in tokens for number in self._ids.values()):
            return Prompt(tokens)
        return Prompt(tokens, tuple(self.all.locate(tokens, media, self._ids)))

    def check_ids(self, tokens: Iterable[int]) -> None:
        """Raises ValueError for placeholders in a prompt of token ids, where they would have no media."""
        kind = next((kind for kind, number in self._ids.items() if number in tokens), None)
        if kind is not None:
            raise ValueError(
                f"the prompt has the token id {self._ids[kind]}, a placeholder of {NOUNS[kind]}, without media; give "
                "the prompt as text, with its media"
            )

    def check_kind(self, part: MediaPart, model: str = "this model") -> None:
        """Raises MediaPartError for a kind of media that is not taken."""
        if part.kind not in self.all.of_kind:
            raise MediaPartError(part, self.all.refusal(part.kind, model))
        if part.kind not in self.processors:
            raise MediaPartError(part, f"{model} takes {NOUNS[part.kind]}, but it was started without them")

    def _count(self, part: MediaPart, num_images: int) -> CountedMedia:
        self.check_kind(part)
        processor, max_tokens = self.processors[part.kind], None
        if part.kind == "image":
            processor = processor.among(num_images)
            low = max(LOW_DETAIL_TOKENS, processor.least_tokens)
            limits = [self.max_image_tokens, low if part.detail == "low" else None]
            max_tokens = min((limit for limit in limits if limit is not None), default=None)
        with _errors_of(part):
            return CountedMedia(part, processor, max_tokens, processor.layout(part.source, max_tokens))


NO_MEDIA = PromptEncoder()
"""The encoder of a model for text."""


def id_of(token: str, tokenizer: Any) -> int:
    """The id of a placeholder. Raises ValueError for a tokenizer without it."""
    number = None if tokenizer is None else tokenizer.convert_tokens_to_ids(token)
    if number is None or number == getattr(tokenizer, "unk_token_id", None):
        raise ValueError(f"the tokenizer has no token {token}, the placeholder of this model's images or sound")
    return number


@contextmanager
def _errors_of(part: MediaPart) -> Iterator[None]:
    """Adds the place of a medium to errors about it."""
    try:
        yield
    except MediaError as error:
        raise MediaPartError(part, str(error)) from None
    except (TypeError, ImportError) as error:
        raise type(error)(f"{part.where}: {error}" if part.where else str(error)) from error
