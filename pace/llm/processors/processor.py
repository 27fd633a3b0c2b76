"""What every processor of images or sound does, and the processors of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from pace.media.media import Layout, Media, MediaSpan
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
    """The special token that is repeated for every row of the tower, such as "<|image_pad|>"."""
    marker: ClassVar[str]
    """The part of `placeholder` that the text of a `Layout` replaces; often `token`."""

    @property
    def least_tokens(self) -> int:
        """Tokens that every medium has at least, however small it is made."""
        return 1

    def among(self, num_images: int) -> MediaProcessor:
        """Returns the processor for each image of a prompt with this number of images, from 1 on."""
        return self

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        """Decodes and prepares one medium. `max_tokens` lowers the checkpoint's own limit.

        Raises MediaError for a medium that cannot be read or shrunk to the limits. Raises TypeError for another kind of
        object, and ImportError that names the extra to install."""
        ...

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        """The text of a medium in a prompt, from the header and without decoding. Its runs are those of
        `prepare(source, max_tokens)`."""
        ...

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """One or more media in the arrays of the checkpoint's processor in transformers: names, shapes, dtypes and
        bits of its `backend="pil"`."""
        ...


class Placed(Protocol):
    """A medium whose tokens are found in a prompt."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def runs(self) -> tuple[int, ...]: ...


class Expanded(Placed, Protocol):
    """A medium whose marker is replaced by a text."""

    @property
    def kind(self) -> str: ...

    @property
    def layout(self) -> Layout: ...


AnyPlaced = TypeVar("AnyPlaced", bound=Placed)
AnyExpanded = TypeVar("AnyExpanded", bound=Expanded)


class Run(NamedTuple, Generic[AnyPlaced]):
    """A run of placeholders in a prompt, as in `MediaSpan`."""

    start: int
    medium: AnyPlaced
    first: int
    length: int


@dataclass(frozen=True)
class Processors:
    """The processors of one model."""

    image: MediaProcessor | None = None
    audio: MediaProcessor | None = None
    missing: str = ""
    """Why a model that may take media takes none, and what to do; empty otherwise."""

    @property
    def of_kind(self) -> dict[str, MediaProcessor]:
        """Kind -> processor, for the kinds that the model takes."""
        return {processor.kind: processor for processor in (self.image, self.audio) if processor is not None}

    def check_kind(self, kind: str) -> None:
        """Raises ValueError if the model does not take media of that kind."""
        if kind not in self.of_kind:
            raise ValueError(self.refusal(kind))

    def refusal(self, kind: str, model: str = "this model") -> str:
        """The message for media of a kind that the model does not take."""
        return f"{model} takes no {NOUNS[kind]}" + (f": {self.missing}" if self.missing else "")

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

    def expand(self, text: str, media: Sequence[Expanded]) -> str:
        """The text with each marker replaced by the text of its medium's layout.

        Raises ValueError for a kind that the model does not take, and unless the text has one marker for each medium of
        a kind. The text may hold more of them if a user typed one."""
        for medium in media:
            self.check_kind(medium.kind)
        for kind, processor in self.of_kind.items():
            texts = [medium.layout.text for medium in media if medium.kind == kind]
            pieces = text.split(processor.marker)
            check_count(processor, len(pieces) - 1, len(texts))
            text = pieces[0] + "".join(own + piece for own, piece in zip(texts, pieces[1:]))
        return text

    def locate(
        self, tokens: Sequence[int], media: Sequence[AnyExpanded], token_ids: Mapping[str, int]
    ) -> list[Run[AnyExpanded]]:
        """Finds the tokens of each medium in the ids of an expanded text, in order of their places. `token_ids` has the
        id of each kind's placeholder token. Raises what `find_runs` raises."""
        runs: list[Run[AnyExpanded]] = []
        for kind, processor in self.of_kind.items():
            own = [medium for medium in media if medium.kind == kind]
            runs += find_runs([tokens], own, token_ids[kind], kind, processor.token)[0]
        return sorted(runs, key=lambda run: run.start)


def place_media(
    rows: Sequence[Sequence[int]], media: Sequence[Media], placeholder: int, kind: str
) -> list[list[MediaSpan]]:
    """Finds the media of one kind in rows of tokens. Raises what `find_runs` raises."""
    found = find_runs(rows, media, placeholder, kind)
    return [[MediaSpan(run.start, run.medium, run.first, length=run.length) for run in row] for row in found]


def find_runs(
    rows: Sequence[Sequence[int]], media: Sequence[AnyPlaced], placeholder: int, kind: str, name: str = ""
) -> list[list[Run[AnyPlaced]]]:
    """Finds the media of one kind in rows of tokens: the runs of `placeholder`, in order. `name` is its text, for
    errors. Raises ValueError unless the media need this number of placeholders, without a gap within a run."""
    name = name or f"of id {placeholder}"
    places = [(index, at) for index, row in enumerate(rows) for at, token in enumerate(row) if token == placeholder]
    needed = sum(medium.num_tokens for medium in media)
    if len(places) != needed:
        prompts = "the prompt has" if len(rows) == 1 else "the prompts have"
        raise ValueError(
            f"{prompts} {counted(len(places), 'token')} {name}, but {counted(len(media), SINGLE[kind])} must have "
            f"{needed}; a prompt may not have this token otherwise"
        )
    found: list[list[Run[AnyPlaced]]] = [[] for _ in rows]
    next_place = 0
    for number, medium in enumerate(media):
        first = 0
        home = places[next_place][0]
        for length in medium.runs:
            (row, start), last = places[next_place], places[next_place + length - 1]
            if row != home or last != (row, start + length - 1):
                raise ValueError(
                    f"{SINGLE[kind]} {number} needs {counted(length, 'token')} {name} in a row; those from token "
                    f"{start} of prompt {row} on have others between them"
                )
            found[row].append(Run(start, medium, first, length))
            first += length
            next_place += length
    return found


def check_count(processor: MediaProcessor, found: int, given: int) -> None:
    if found != given:
        raise ValueError(
            f"the prompt has {counted(found, 'placeholder')} {processor.marker} for "
            f"{counted(given, SINGLE[processor.kind])}; it needs one for each, and the text may not hold "
            f"{processor.marker} otherwise"
        )
