"""Filling a gap: builds a prompt from the text before and after it, for models trained to write the text between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pace.llm.configs import SamplingConfig
from pace.naming import check_text

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 3 and later
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Tiny-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Marks that precede the text before the gap, the text after it, and the answer."""
OTHER_MARKS = ("[SUFFIX]", "[PREFIX]")
"""Marks of Codestral, which needs the suffix first."""
ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|fim_repo|>", "<|file_separator|>",
    "<fim_pad>", "<fim-pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>", "<|EOT|>", "▁<EOT>",
)  # fmt: skip
"""Tokens that end a filling in such models, in addition to the tokenizer's own end token: they start another file."""
_NOWHERE = "☺"
"""A character that CodeLlama's own code puts before texts, so that the text after it gets no leading blank."""


@dataclass(frozen=True)
class Infill:
    """The tokens that mark and end a gap for one tokenizer."""

    marks: tuple[int, int, int]
    end_tokens: tuple[int, ...]
    end_strings: tuple[str, ...]
    """The end tokens that the tokenizer does not list as special. Their texts must be cut off, too."""
    has_blank: bool
    """True if the tokenizer puts a blank before each text, which would be wrong here."""

    @classmethod
    def of(cls, tokenizer: Any) -> Infill:
        """Finds the marks of a tokenizer. Raises ValueError for a tokenizer without them."""
        found = [[_token(tokenizer, name) for name in names] for names in MARKS]
        index = next((index for index, ids in enumerate(found) if None not in ids), None)
        if index is None:
            if None not in [_token(tokenizer, name) for name in OTHER_MARKS]:
                raise ValueError(
                    f"suffix: this model's marks of a gap are {' and '.join(OTHER_MARKS)}, by which pace does not fill "
                    "gaps; leave suffix out, or give token ids with the marks in them"
                )
            raise ValueError(
                "suffix: this model was not trained to fill a gap: its tokenizer has no tokens such as <|fim_prefix|>, "
                "<|fim_suffix|> and <|fim_middle|>; leave suffix out"
            )
        ends = {name: token for name in ENDS if (token := _token(tokenizer, name)) is not None}
        ends |= dict(zip(MARKS[index], found[index]))
        special = frozenset(tokenizer.all_special_ids)
        shown = tuple(name for name, token in ends.items() if token not in special)
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        tokens = tuple(dict.fromkeys([*own, *ends.values()]))
        return cls(tuple(found[index]), tokens, shown, MARKS[index][0].startswith("▁"))

    def prompt(
        self, tokenizer: Any, before: str | Sequence[int], after: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt for the text between `before`, a text or token ids, and `after`. The beginning-of-text
        token comes first if the tokenizer adds one and `add_special_tokens` is True."""
        prefix, suffix, middle = self.marks
        first = tokenizer("", add_special_tokens=True)["input_ids"][:1] if add_special_tokens else []
        begin = [token for token in first if token == tokenizer.bos_token_id]
        known = self._encode(tokenizer, before) if isinstance(before, str) else list(before)
        return [*begin, prefix, *known, suffix, *self._encode(tokenizer, after), middle]

    def add_ends(self, config: SamplingConfig, defaults: SamplingConfig) -> None:
        """Adds the end tokens and strings of a filling to those of the config or the checkpoint's `defaults`."""
        if config.ignore_eos:
            return
        own = defaults.eos_token_id if config.eos_token_id is None else config.eos_token_id
        config.eos_token_id = list(dict.fromkeys([*(own or ()), *self.end_tokens]))
        strings = defaults.stop_strings if config.stop_strings is None else config.stop_strings
        config.stop_strings = list(dict.fromkeys([*(strings or ()), *self.end_strings])) or None

    def _encode(self, tokenizer: Any, text: str) -> list[int]:
        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        if not self.has_blank:
            return ids(text)
        lead, whole = ids(_NOWHERE), ids(_NOWHERE + text)
        return whole[len(lead) :] if whole[: len(lead)] == lead else ids(text)


def infill_prompts(inputs: Any, suffix: str | Sequence[str], tokenizer: Any) -> tuple[list[list[int]], Infill]:
    """The prompts of `LLMModel.generate` with a gap after each. `suffix` is one text for all of them, or a list of one
    for each. Raises ValueError or TypeError."""
    if tokenizer is None:
        raise ValueError("suffix is text, and this model has no tokenizer; give one")
    befores = _befores(inputs)
    afters = [suffix] * len(befores) if isinstance(suffix, str) else suffix
    if not isinstance(afters, (list, tuple)) or not all(isinstance(after, str) for after in afters):
        raise TypeError(f"suffix must be a string, or a list of one for each prompt; got {suffix!r:.100}")
    if len(afters) != len(befores):
        raise ValueError(
            f"suffix has {len(afters)} texts for {len(befores)} prompts; give one for each, or one for all"
        )
    for before, after in zip(befores, afters):
        if isinstance(before, str):
            check_text(before)
        check_text(after, "suffix")
    infill = Infill.of(tokenizer)
    return [infill.prompt(tokenizer, before, after) for before, after in zip(befores, afters)], infill


def _befores(inputs: Any) -> list[str | list[int]]:
    if isinstance(inputs, Mapping):
        raise TypeError("with a suffix inputs must be text or token ids, not a tokenizer's output")
    items = inputs.tolist() if hasattr(inputs, "tolist") else inputs
    if isinstance(items, str) or (isinstance(items, (list, tuple)) and items and isinstance(items[0], int)):
        items = [items]
    if not isinstance(items, (list, tuple)) or not items or not all(map(_is_prompt, items)):
        raise TypeError(
            f"with a suffix inputs must be text or token ids, or a list of them; got {type(inputs).__name__}"
        )
    return list(items)


def _is_prompt(item: Any) -> bool:
    is_ids = isinstance(item, (list, tuple)) and all(type(token) is int for token in item)
    return isinstance(item, str) or is_ids


def _token(tokenizer: Any, name: str) -> int | None:
    """The id of a token by name; None if there is no such token."""
    token = tokenizer.convert_tokens_to_ids(name)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None
