"""Tokens of a GGUF file and their types, with corrections for known errors in files.

Some converters marked the tokens that end a turn as ordinary text. A turn then never ended, and the marks in a prompt
were split into pieces. llama.cpp recognises such tokens by name, and so does this module. Source: its
src/llama-vocab.cpp."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import numpy as np

from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.vocabulary import CONTROL, NORMAL, USER_DEFINED

logger = logging.getLogger("pace")

END_TOKENS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|end_of_turn|>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
}  # fmt: skip
"""Tokens that end a text, regardless of their type and of the keys. A key names only one, but models have several."""
END_TOKENS_OF_CONTROL = {"</s>", "<eos>", "[EOS]"}
"""The same, for tokens of the control type only. In Gemma's vocabulary </s> is HTML."""
FILL_TOKENS = {
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|prefix|>", "<|suffix|>", "<|middle|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
}  # fmt: skip
"""Marks of a text with a gap to fill."""
HARMONY = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""If a vocabulary has both tokens of one of these pairs, <|end|> ends a message within a turn, not the text."""
MARK = re.compile(r"<[^<>\s]+>")
"""Pattern of marks in a chat template."""
ROLE_MARK = re.compile(r"""<\|(['"]\s*[+~]|\{\{)""")
"""Start of a template's mark that contains a role: `'<|' + message.role + '|>'`."""
ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("bos", "eos", "eot", "eom")
"""Keys of tokens that begin and end texts and turns."""
MAX_LISTED = 8


@dataclass(frozen=True)
class Tokens:
    """A vocabulary."""

    texts: list[str]
    ids: dict[str, int]
    """Text -> id. Has fewer entries than `texts` if a text occurs twice."""
    types: np.ndarray
    """int64 `[tokens]`: NORMAL, CONTROL, ..., after corrections. Has another length if the file is wrong."""
    ends: list[int]
    """Tokens that end a text, in addition to those that keys name."""


def read_tokens(metadata: Metadata) -> Tokens | None:
    """Returns the vocabulary, read once and cached; None if the file has no vocabulary."""
    if "tokens" not in metadata.__dict__:
        metadata.__dict__["tokens"] = _read(metadata)
    return metadata.__dict__["tokens"]


def rename_tokens(metadata: Metadata, names: dict[int, str]) -> None:
    """Gives tokens of a vocabulary other texts, in place. They become control tokens."""
    tokens = read_tokens(metadata)
    if tokens is None or not names:
        return
    texts, types = list(tokens.texts), tokens.types.copy()
    for index, name in names.items():
        texts[index], types[index] = name, CONTROL
    metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"] = texts, types
    del metadata.__dict__["tokens"]


def _read(metadata: Metadata) -> Tokens | None:
    texts = metadata.texts("tokenizer.ggml.tokens")
    if not texts:
        return None
    types = metadata.numbers("tokenizer.ggml.token_type")
    if types is None:
        types = np.full(len(texts), NORMAL)
    ids = dict(zip(texts, range(len(texts))))
    types = types.astype(np.int64)
    if len(types) != len(texts):
        return Tokens(texts, ids, types, [])
    ends = _ends(ids, types)
    _correct(metadata, texts, ids, types, ends)
    return Tokens(texts, ids, types, ends)


def _ends(ids: dict[str, int], types: np.ndarray) -> list[int]:
    names = END_TOKENS & ids.keys()
    if any(pair <= names for pair in HARMONY):
        names -= {"<|end|>"}
    names |= {name for name in END_TOKENS_OF_CONTROL & ids.keys() if types[ids[name]] == CONTROL}
    return sorted(ids[name] for name in names)


def _correct(metadata: Metadata, texts: list[str], ids: dict[str, int], types: np.ndarray, ends: list[int]) -> None:
    """Corrects the types of end tokens and marks, and logs changes of ordinary text."""
    wanted = {index: CONTROL for index in (*ends, *_named_marks(metadata, texts))}
    wanted |= {ids[name]: CONTROL for name in FILL_TOKENS & ids.keys()}
    for mark in _marks_of_templates(metadata) & ids.keys():
        if types[ids[mark]] not in (CONTROL, USER_DEFINED):
            wanted.setdefault(ids[mark], CONTROL if mark.startswith("<|") else USER_DEFINED)
    wrong = sorted(index for index, kind in wanted.items() if types[index] != kind)
    told = [index for index in wrong if types[index] != USER_DEFINED]
    for index in wrong:
        types[index] = wanted[index]
    if not told:
        return
    listed = ", ".join(repr(texts[index]) for index in told[:MAX_LISTED]) + ", ..." * (len(told) > MAX_LISTED)
    logger.warning(
        "%s: tokenizer.ggml.token_type marks %s as ordinary text; treating them as separate tokens (%d in all)",
        metadata.path,
        listed,
        len(told),
    )


def _named_marks(metadata: Metadata, texts: list[str]) -> set[int]:
    """Tokens that keys name, except ordinary text such as a line end."""
    named = [metadata.integer(f"tokenizer.ggml.{key}_token_id") for key in KEYS]
    inside = [index for index in named if index is not None and 0 <= index < len(texts)]
    return {index for index in inside if texts[index][:1] + texts[index][-1:] in ("<>", "[]")}


def _marks_of_templates(metadata: Metadata) -> set[str]:
    keys = [key for key in metadata if key.startswith("tokenizer.chat_template")]
    templates = [template for template in map(metadata.get, keys) if isinstance(template, str)]
    marks = {mark for template in templates for mark in MARK.findall(template)}
    return marks | {f"<|{role}|>" for role in ROLES if any(map(ROLE_MARK.search, templates))}
