"""Filling a gap: a prompt of what stands before and after it, for models that were trained to write what is between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pace.llm.configs import SamplingConfig

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 3 and later
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""Tokens before the text that precedes the gap, before the text that follows it, and before the answer."""
OTHER_MARKS = ("[SUFFIX]", "[PREFIX]")
"""Those of Codestral, which wants the suffix first."""
ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|fim_repo|>", "<|file_separator|>",
    "<fim_pad>", "<fim-pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>", "<|EOT|>", "▁<EOT>",
)  # fmt: skip
"""Tokens with which such models end a filling, besides the tokenizer's own end: what comes next is another file."""
_NOWHERE = "☺"
"""A character that CodeLlama's own code puts before texts, so that no blank comes before what follows it."""


@dataclass(frozen=True)
class Infill:
    """The tokens by which one tokenizer's models fill a gap."""

    marks: tuple[int, int, int]
    end_tokens: tuple[int, ...]
    end_strings: tuple[str, ...]
    """Those of the end tokens that the tokenizer does not call special. Their texts are to be cut off, too."""
    has_blank: bool
    """Whether the tokenizer puts a blank before each text, which has no place here."""

    @classmethod
    def of(cls, tokenizer: Any) -> Infill:
        """Raises ValueError for a tokenizer without such tokens."""
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
        """The token ids after which the model writes what is between `before`, a text or token ids, and `after`. The
        token that begins a text comes first, where the tokenizer adds one and `add_special_tokens` is True."""
        prefix, suffix, middle = self.marks
        first = tokenizer("", add_special_tokens=True)["input_ids"][:1] if add_special_tokens else []
        begin = [token for token in first if token == tokenizer.bos_token_id]
        known = self._encode(tokenizer, before) if isinstance(before, str) else list(before)
        return [*begin, prefix, *known, suffix, *self._encode(tokenizer, after), middle]

    def add_ends(self, config: SamplingConfig, defaults: SamplingConfig) -> None:
        """Has the end of a filling end the text, besides what the config or the checkpoint's `defaults` say."""
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
    """The prompts of `LLMModel.generate` with a gap after each: `suffix` follows all of them, or each has one of its own.
    Raises ValueError or TypeError."""
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
    """The id of the token of that name; None where there is none."""
    token = tokenizer.convert_tokens_to_ids(name)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None
