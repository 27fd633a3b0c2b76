"""Converts the inputs of `generate` to lists of token ids, and removes padding."""

from __future__ import annotations

import logging
import numbers
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pace.llm.processors.processor import MEDIA_LISTS, NOUNS, place_media
from pace.llm.processors.prompts import NO_MEDIA, MediaPart, Prompt, PromptEncoder
from pace.media.media import Media, MediaSpan
from pace.naming import check_text, shown

logger = logging.getLogger("pace")

_IGNORED_KEYS = frozenset(
    {"token_type_ids", "special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping", "position_ids"}
)
"""Other keys that tokenizers return; none of them changes what a causal model computes for these tokens."""
_OF_VIDEO = ("pixel_values_videos", "video_grid_thw", "video_second_per_grid", "second_per_grid_ts")
_OF_MEDIA = (
    "mm_token_type_ids", "pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids", "image_sizes",
    "batch_num_images", "spatial_shapes", "input_features", "input_features_mask", "feature_attention_mask", *_OF_VIDEO,
)  # fmt: skip
"""Keys that transformers' processors add for models that take images, sound or video."""
_KINDS = (
    "a string, a list of strings, a list of token ids, a list of such lists, an integer tensor [S] or [B, S], "
    "or a tokenizer's output with input_ids and attention_mask"
)


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call."""

    rows: list[list[int]]
    """Token ids without padding."""
    given: Tensor | None
    """int64 `[B, S]`, padding included, if the caller gave a tensor; None if the rows must be padded on the left."""
    media: list[tuple[MediaSpan, ...]] | None = None
    """The images and sound of each row; None if there are none."""

    def padded(self, pad_token: int) -> Tensor:
        """int64 `[B, S]`: the caller's tensor, or the rows padded on the left to the longest."""
        if self.given is not None:
            return self.given
        width = max(map(len, self.rows))
        return torch.tensor([[pad_token] * (width - len(row)) + row for row in self.rows], dtype=torch.int64)


class MediaReader(Protocol):
    """What inputs need of a tower."""

    kind: str
    input_names: tuple[str, ...]
    placeholder: int

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]: ...


def with_keywords(inputs: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Takes the tensors of `generate(**processor(...))` out of keyword arguments. Returns the inputs, and the other
    arguments. Raises TypeError for inputs in both forms, or in neither."""
    names = fields.keys() & {"input_ids", "attention_mask", "token_type_ids", *_OF_MEDIA}
    if not names and inputs is None:
        raise TypeError(f"inputs must be {_KINDS}; none are given")
    if names and inputs is not None:
        raise TypeError(
            f"inputs are given twice: as the first argument, and as {', '.join(sorted(names))}; give the tokenizer's "
            "output as it is: generate(inputs)"
        )
    rest = {name: value for name, value in fields.items() if name not in names}
    return {name: fields[name] for name in fields if name in names} or inputs, rest


def read_prompts(
    inputs: Any,
    tokenizer: Any,
    vocab_size: int,
    towers: Sequence[MediaReader] = (),
    model_name: str = "this model",
    encoder: PromptEncoder = NO_MEDIA,
) -> Prompts:
    """Reads prompts in any form that `LLMModel.generate` takes. A mapping may hold the arrays of `towers`, those of the
    model named `model_name`. `encoder` is the model's.

    Raises TypeError for another kind of object. Raises ValueError for an empty batch or prompt, for ids outside
    `0 .. vocab_size - 1`, and for text without a tokenizer. Also for a mask of another shape, with a hole, or all 0.
    Also for media that the model does not take, or that do not match their placeholders.
    """
    if isinstance(inputs, (str, Prompt)) or is_media_prompt(inputs):
        inputs = [inputs]
    if isinstance(inputs, Mapping):
        of_media = {name: inputs[name] for name in _OF_MEDIA if inputs.get(name) is not None}
        prompts = _from_mapping({name: value for name, value in inputs.items() if name not in _OF_MEDIA})
        media = _read_media(prompts.rows, of_media, towers, model_name, encoder.all.missing)
        prompts = replace(prompts, media=media)
    elif _is_array(inputs):
        prompts = _from_tensor(_tensor(inputs), None)
    elif isinstance(inputs, (list, tuple)):
        prompts = _from_list(list(inputs), tokenizer, encoder)
    else:
        raise TypeError(f"inputs must be {_KINDS}; got {type(inputs).__name__}")
    if prompts.media:
        prompts = replace(prompts, rows=[_held(*each, vocab_size) for each in zip(prompts.rows, prompts.media)])
    _check_rows(prompts.rows, vocab_size)
    for index, row in enumerate(prompts.rows):
        if not (prompts.media and prompts.media[index]):
            encoder.check_ids(row)
    return prompts


def _read_media(
    rows: list[list[int]], inputs: dict[str, Any], towers: Sequence[MediaReader], model_name: str, missing: str
) -> list[tuple[MediaSpan, ...]] | None:
    """Reads the arrays of towers, and finds the place of each medium in the rows. `missing` is that of `Processors`."""
    if videos := [name for name in inputs if name in _OF_VIDEO]:
        raise ValueError(f"{videos[0]}: video is not supported as input, so leave it out")
    known = {name for tower in towers for name in tower.input_names} | {"mm_token_type_ids"}
    if refused := [name for name in inputs if name not in known]:
        kind = NOUNS["audio" if "feature" in refused[0] else "image"]
        advice = f"leave out {refused[0]}" + (f"; {missing}" if missing else "")
        raise ValueError(f"{model_name} takes no {kind}: it was loaded without a tower, so {advice}")
    places: list[list[MediaSpan]] = [[] for _ in rows]
    for tower in towers:
        media = tower.read_inputs(inputs) if any(name in inputs for name in tower.input_names) else []
        if media and tower.placeholder < 0:
            raise ValueError(
                f"config.json has no {tower.kind}_token_id, and {model_name} was loaded without a tokenizer that has "
                "it: give one, or add the field"
            )
        for placed, found in zip(places, place_media(rows, media, tower.placeholder, tower.kind)):
            placed += found
    found = [tuple(sorted(placed, key=lambda span: span.start)) for placed in places]
    return found if any(found) else None


def held_token(placeholder: int, vocab_size: int) -> int:
    """The token that sequences have for a placeholder: itself, or 0 if the model has no embedding for it."""
    return placeholder if placeholder < vocab_size else 0


def _held(row: list[int], media: tuple[MediaSpan, ...], vocab_size: int) -> list[int]:
    """The row with the tokens that sequences have for its placeholders."""
    row = list(row)
    for span in media:
        row[span.start : span.end] = [held_token(row[span.start], vocab_size)] * span.length
    return row


def _from_list(items: list[Any], tokenizer: Any, encoder: PromptEncoder = NO_MEDIA) -> Prompts:
    if not items:
        raise ValueError("inputs is an empty list: there is no prompt to continue; give at least one")
    if all(isinstance(item, (str, Prompt)) or is_media_prompt(item) for item in items):
        read = [_read(item, f"inputs[{index}]", tokenizer, encoder) for index, item in enumerate(items)]
        media = [prompt.media for prompt in read] if any(prompt.runs for prompt in read) else None
        return Prompts([prompt.tokens for prompt in read], None, media)
    items = [item.tolist() if _is_array(item) else item for item in items]
    if all(_is_token(item) for item in items):
        return Prompts([[int(item) for item in items]], None)
    for index, row in enumerate(items):
        if not isinstance(row, (list, tuple)) or not all(_is_token(token) for token in row):
            raise TypeError(f"inputs must be {_KINDS}; item {index} of the list is {row!r:.100}")
    return Prompts([[int(token) for token in row] for row in items], None)


def is_media_prompt(item: Any) -> bool:
    """True for a dict of a text and its media."""
    return isinstance(item, Mapping) and "prompt" in item


def _read(item: Any, place: str, tokenizer: Any, encoder: PromptEncoder) -> Prompt:
    """Reads a text, or a dict with its `prompt` and its media."""
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        return encode(item, (), tokenizer, encoder)
    return encode(*read_media_prompt(item, place), tokenizer, encoder)


def read_media_prompt(item: Mapping[str, Any], place: str) -> tuple[str, list[MediaPart]]:
    """Reads a dict with a text as `prompt`, and its `images` and `audio`. `place` names it in errors. Raises TypeError
    and ValueError."""
    unknown = [str(key) for key in item if key not in ("prompt", *MEDIA_LISTS)]
    if unknown:
        raise ValueError(f"{place} holds {', '.join(unknown)}; a dict has a prompt, and images or audio")
    if not isinstance(item["prompt"], str):
        raise TypeError(
            f"{place}.prompt must be a text with a placeholder for each image and clip; got {shown(item['prompt'])}"
        )
    parts = []
    for name, kind in MEDIA_LISTS.items():
        given = item.get(name)
        if given is not None and not isinstance(given, (list, tuple)):
            raise TypeError(f"{place}.{name} must be a list; got {type(given).__name__}")
        parts += [MediaPart(kind, one, where=f"{place}.{name}[{at}]") for at, one in enumerate(given or ())]
    return item["prompt"], parts


def _from_mapping(inputs: Mapping) -> Prompts:
    if "input_ids" not in inputs:
        raise ValueError(f"a mapping of inputs must hold input_ids; got {', '.join(map(str, inputs)) or 'nothing'}")
    unknown = [str(key) for key in inputs if key not in _IGNORED_KEYS | {"input_ids", "attention_mask"}]
    if unknown:
        raise ValueError(
            f"inputs hold {', '.join(unknown)}, which pace does not take; give only input_ids and attention_mask"
        )
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if _is_array(ids):
        return _from_tensor(_tensor(ids), None if mask is None else _tensor(mask))
    if not isinstance(ids, (list, tuple)) or any(isinstance(item, str) for item in ids):
        raise TypeError(f"input_ids must be token ids: an integer tensor, a list, or a list of lists; got {ids!r:.100}")
    prompts = _from_list(list(ids), tokenizer=None)
    return prompts if mask is None else _masked(prompts.rows, mask)


def _masked(rows: list[list[int]], mask: Any) -> Prompts:
    """Applies a mask to rows of ids; both may be ragged."""
    masks = mask.tolist() if _is_array(mask) else mask
    if not isinstance(masks, (list, tuple)):
        raise TypeError(f"attention_mask must be a tensor or a list of the shape of input_ids, got {mask!r:.100}")
    masks = [row.tolist() if _is_array(row) else row for row in masks]
    if len(rows) == 1 and not any(isinstance(row, (list, tuple)) for row in masks):
        masks = [masks]
    if [len(row) for row in rows] != [len(row) if isinstance(row, (list, tuple)) else None for row in masks]:
        raise ValueError("attention_mask must have the shape of input_ids: their rows have different lengths")
    if len({len(row) for row in rows}) == 1:
        return _from_tensor(torch.tensor(rows), torch.tensor(masks))
    return Prompts(
        [_keep(torch.tensor(row), torch.tensor(kept), index) for index, (row, kept) in enumerate(zip(rows, masks))],
        None,
    )


def _from_tensor(ids: Tensor, mask: Tensor | None) -> Prompts:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(
            f"token ids must be integers, got a tensor of {ids.dtype}; convert it with .long() if it holds whole ids"
        )
    if ids.dim() not in (1, 2):
        raise ValueError(f"token ids must have the shape [S] or [B, S], got {list(ids.shape)}")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have the shape of input_ids, {list(ids.shape)}; got {list(mask.shape)}")
    if ids.numel() == 0:
        raise ValueError(f"token ids of shape {list(ids.shape)} hold no token; a prompt needs at least one")
    ids = ids.reshape(-1, ids.shape[-1]).to("cpu", torch.int64)
    if mask is None:
        return Prompts(ids.tolist(), ids.clone())
    mask = mask.reshape(ids.shape).to("cpu")
    return Prompts([_keep(row, kept, index) for index, (row, kept) in enumerate(zip(ids, mask))], ids.clone())


def _keep(ids: Tensor, mask: Tensor, index: int) -> list[int]:
    """The ids where the mask is 1; these must be contiguous."""
    kept = mask.nonzero().view(-1).tolist()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"attention_mask must hold 0 and 1 only; row {index} does not")
    if not kept:
        raise ValueError(f"attention_mask of row {index} is all 0: the prompt is empty")
    if kept[-1] - kept[0] + 1 != len(kept):
        raise ValueError(
            f"attention_mask of row {index} has a hole: 1s must be one run, with padding to its left or right"
        )
    return ids[kept[0] : kept[-1] + 1].tolist()


def encode(
    text: str, parts: Sequence[MediaPart], tokenizer: Any, encoder: PromptEncoder, add_special_tokens: bool = True
) -> Prompt:
    """Reads a text and the media for its placeholders. Raises ValueError without a tokenizer, and what
    `PromptEncoder.encode` raises."""
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so it takes token ids; give tokenizer_name_or_path to use text")
    check_text(text)
    prompt = encoder.encode(text, parts, tokenizer, add_special_tokens)
    warn_of_second_bos(text, prompt.tokens, tokenizer)
    return prompt


_warned: weakref.WeakSet[Any] = weakref.WeakSet()
"""Tokenizers that were already warned about."""


def warn_of_second_bos(text: str, tokens: list[int], tokenizer: Any) -> None:
    """Warns if the prompt's text begins with a BOS token and the tokenizer adds another one; once for each tokenizer.
    The tokens are not changed."""
    name, bos = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if not name or not text.startswith(name) or tokens[:2] != [bos, bos] or tokenizer in _warned:
        return
    num_written = 1
    while text.startswith(name, num_written * len(name)):
        num_written += 1
    if tokens[: num_written + 1] == [bos] * (num_written + 1):
        _warned.add(tokenizer)
        logger.warning(
            "the prompt begins with %d %s tokens: its text begins with %s, and the tokenizer adds one. Models are "
            "trained on one: leave it out of the text, or give token ids",
            num_written + 1,
            name,
            name,
        )


def _is_token(item: Any) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)


def _is_array(item: Any) -> bool:
    """True for a tensor, and for arrays of numpy and other libraries."""
    return isinstance(item, Tensor) or hasattr(item, "__array__")


def _tensor(array: Any) -> Tensor:
    try:
        return torch.as_tensor(array)
    except TypeError as error:
        raise TypeError(f"inputs must be {_KINDS}; got an array of something else ({error})") from None


def _check_rows(rows: list[list[int]], vocab_size: int) -> None:
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"prompt {index} is empty: the model needs at least one token to continue; give it a beginning-of-text "
                f"token"
            )
        worst = min(row) if min(row) < 0 else max(row)
        if not 0 <= worst < vocab_size:
            raise ValueError(f"prompt {index} holds the token id {worst}; this model's ids are 0 to {vocab_size - 1}")
