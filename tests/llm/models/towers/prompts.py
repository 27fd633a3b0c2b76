"""Prompts with media, as processors make them: random text around placeholders, alone and as a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""The inputs with a column for each token."""


def prompt_around(media: Sequence[list[int]], seed: int, apart: int = 0) -> list[int]:
    """Random text with the tokens of media in it. The first is at the start or not, others are next to each other or
    apart. `apart`: the smallest number of tokens after one."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(7, 69, (count,), generator=generator).tolist()

    tokens = text(seed % 2 * 5)
    for number, of_medium in enumerate(media):
        tokens += of_medium + text(apart + 7 * (number % 2))
    return tokens + text(4)


def inputs_of_tokens(tokens: list[int]) -> dict[str, Tensor]:
    """The inputs of one prompt without media."""
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def together(prompts: Sequence[dict[str, Tensor]], pad_id: int = 0, pad_value: float = 0.0) -> dict[str, Tensor]:
    """Inputs of several prompts as one batch. Tokens are padded on the left, and arrays of media on the right, where
    they have different sizes. `pad_value` fills arrays of floats."""

    def joined(name: str) -> Tensor:
        found = [prompt[name] for prompt in prompts if name in prompt]
        sizes = torch.tensor([each.shape[1:] for each in found]).amax(0).tolist()
        value = pad_id if name == "input_ids" else pad_value * found[0].is_floating_point()
        padded = []
        for each in found:
            missing = [size - own for size, own in zip(sizes, each.shape[1:], strict=True)]
            sides = [(count, 0) if name in OF_TOKENS else (0, count) for count in reversed(missing)]
            padded.append(torch.nn.functional.pad(each, sum(sides, ()), value=value))
        return torch.cat(padded)

    return {name: joined(name) for name in dict.fromkeys(name for prompt in prompts for name in prompt)}
