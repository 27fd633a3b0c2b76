"""Configuration of draft sources, for `LLMModel(..., spec_config=...)`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_DRAFT_TOKENS = 64
"""Limit for one sequence in one step. If 99 % of the drafts are right, the last of 65 rows is kept with probability
0.5."""


@dataclass(frozen=True)
class PromptLookupConfig:
    """Drafts are the tokens that followed an earlier occurrence of the last tokens, in prompt or output. Suits outputs
    that copy, and costs almost nothing.

    Raises TypeError and ValueError for values out of range, as the other configs do.
    """

    max_ngram: int = 4
    """The longest run of last tokens to search for; the longest run found is used."""
    min_ngram: int = 1
    """The shortest run to search for."""
    num_draft_tokens: int = 16
    """Maximum number of drafts per step; 1 to 64."""
    adaptive: bool = True
    """Propose the number of drafts that pays, from measured acceptance and step costs; False for always
    `num_draft_tokens`."""

    def __post_init__(self) -> None:
        _check_count("min_ngram", self.min_ngram, 1, 32)
        _check_count("max_ngram", self.max_ngram, 1, 32)
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram must be at least min_ngram={self.min_ngram}, got {self.max_ngram}")
        _check_drafts(self.num_draft_tokens, self.adaptive)


@dataclass(frozen=True)
class MtpConfig:
    """Drafts come from the checkpoint's own layer for multi-token prediction, token by token. The short form is
    `spec_config="mtp"`.

    The layer reads the model's rows, so it needs no second model and little memory. It was trained for the first draft;
    the acceptance of further ones falls."""

    num_draft_tokens: int = 4
    """Maximum number of drafts per step; 1 to 64."""
    adaptive: bool = True
    """Propose the number of drafts that pays, from measured acceptance and step costs; False for always
    `num_draft_tokens`."""

    def __post_init__(self) -> None:
        _check_drafts(self.num_draft_tokens, self.adaptive)


@dataclass(frozen=True)
class DraftModelConfig:
    """Drafts come from a smaller model with the same tokenizer, or from an EAGLE-3 drafter of the model, token by
    token."""

    model: str | Path
    """A checkpoint, as for `LLMModel`."""
    num_draft_tokens: int = 8
    """Maximum number of drafts per step; 1 to 64."""
    adaptive: bool = True
    """Propose the number of drafts that pays, from measured acceptance and step costs; False for always
    `num_draft_tokens`."""
    revision: str | None = None
    """Branch, tag or commit of the draft model on the Hub."""

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_drafts(self.num_draft_tokens, self.adaptive)


@dataclass(frozen=True)
class PardConfig:
    """Drafts come from a parallel draft model: one forward pass over the sequence and mask tokens proposes all of them
    (arXiv 2504.18583).

    The model must have been trained for it (such as amd/PARD-Qwen2.5-0.5B): its config.json names the mask token in
    `pard_token`.
    """

    model: str | Path
    """A checkpoint, as for `LLMModel`."""
    mask_token_id: int | None = None
    """The token for each position to be predicted; None for `pard_token` of the model's config.json."""
    num_draft_tokens: int = 12
    """Maximum number of drafts per step; 1 to 64."""
    adaptive: bool = True
    """Propose the number of drafts that pays, from measured acceptance and step costs; False for always
    `num_draft_tokens`."""
    revision: str | None = None
    """Branch, tag or commit of the draft model on the Hub."""

    def __post_init__(self) -> None:
        _check_model(self.model)
        if self.mask_token_id is not None:
            _check_count("mask_token_id", self.mask_token_id, 0, 2**31 - 1)
        _check_drafts(self.num_draft_tokens, self.adaptive)


SpecConfig = PromptLookupConfig | MtpConfig | DraftModelConfig | PardConfig


def read_spec_config(value: object) -> SpecConfig | None:
    """Returns the config of a `spec_config`, which may be "mtp". Raises TypeError for anything else."""
    if value is None or isinstance(value, SpecConfig):
        return value
    if value == "mtp":
        return MtpConfig()
    raise TypeError(
        "spec_config must be a PromptLookupConfig, MtpConfig, DraftModelConfig or PardConfig of pace.llm, "
        f'"mtp" or None; got {value!r:.100}'
    )


def _check_count(name: str, value: object, minimum: int, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int from {minimum} to {maximum}, got {value!r}")
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} must be from {minimum} to {maximum}, got {value}")


def _check_drafts(num_draft_tokens: object, adaptive: object) -> None:
    _check_count("num_draft_tokens", num_draft_tokens, 1, MAX_DRAFT_TOKENS)
    if not isinstance(adaptive, bool):
        raise TypeError(f"adaptive must be True or False, got {adaptive!r}")


def _check_model(model: object) -> None:
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be the path or Hub id of a draft model's checkpoint, got {model!r}")
