"""The tokenizer in a GGUF file's metadata, as the tokenizer.json and tokenizer_config.json that it stands for.

Two kinds of vocabularies come with the architectures that are implemented: byte-level BPE ("gpt2": tokens, merges, and
the name of the rule by which texts are cut before) and sentencepiece ("llama": pieces with scores, from which merges
follow). How llama.cpp reads both: its src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    bpe_model,
    sentencepiece_parts,
    text_with_ends,
)
from pace.naming import shown

logger = logging.getLogger("pace")

SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name in tokenizer_config.json -> in the key tokenizer.ggml.<name>_token_id."""


class Cut(NamedTuple):
    """How texts are cut before a byte-level vocabulary's merges."""

    patterns: tuple[str, ...]
    """Each cuts the pieces of the one before, into its matches and what lies between them."""
    ignore_merges: bool = False
    """A piece that is a token is that token, whatever the merges make of it."""
    add_bos: bool = False
    """Where the file does not say."""
    normalizer: dict[str, str] | None = None


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_WITH_CASE = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^" "ⴀ-ⴭ\ua78f-\ua7ffꬰ-ꭩ\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb]]"
)
"""Letters that have a case, but for those that Unicode has since and those of formulas."""
_HAN = "[一-龥ࠀ-一가-\ud7ff]+"

_CUTS = {
    ("default",): Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "olmo", "mpt", "granite-docling", "a.x-4.0", "mellum", "trillion"): Cut((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): Cut((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"): Cut(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): Cut((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "f2llmv2"): Cut(
        (_QWEN2,), normalizer={"type": "NFC"}
    ),
    ("hunyuan",): Cut((_QWEN2,)),
    ("hunyuan-dense", "deepseek-v3"): Cut((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ("deepseek-llm",): Cut(
        ("[\r\n]", rf"\s?{_WITH_CASE}+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN, r"\p{N}")
    ),
    ("deepseek-coder",): Cut(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    ("tekken",): Cut((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2"): Cut((_GPT4O,)),
}
CUTS = {name: cut for names, cut in _CUTS.items() for name in names}
"""By tokenizer.ggml.pre."""


def tokenizer_json(metadata: Metadata) -> str | None:
    """The text of tokenizer.json, None where the file has no vocabulary. Raises ValueError for what is missing or of
    the wrong type, NotImplementedError for other kinds of vocabularies; the message names the file."""
    if whole := metadata.text("tokenizer.huggingface.json"):
        return whole  # some files bring it along
    model = metadata.text("tokenizer.ggml.model")
    if model in (None, "no_vocab", "none"):
        return None
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise NotImplementedError(
            f"{metadata.path} has a tokenizer of the kind {model[:80]!r}, which is not implemented; implemented: gpt2, llama. Give tokenizer_name_or_path, or token ids instead of text"
        )
    tokens = metadata.required("tokenizer.ggml.tokens", metadata.texts("tokenizer.ggml.tokens"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.tokens has {shown(twice)} twice, so that texts have no definite tokens"
        )
    parts = build(metadata, tokens, vocabulary)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(metadata, tokens),
            "post_processor": _ends(metadata, tokens),
        }
        | parts
    )


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """What stands in tokenizer_config.json, and the chat template."""
    tokens = metadata.texts("tokenizer.ggml.tokens") or []
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False, "padding_side": "left"}
    for name, key in SPECIAL_TOKENS.items():
        if (index := _token_id(metadata, key, len(tokens))) is not None:
            settings[name] = tokens[index]
    types = _token_types(metadata, len(tokens))
    known = set(settings.values())
    settings["additional_special_tokens"] = [
        token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL and token not in known
    ]
    if length := metadata.integer(f"{metadata.text('general.architecture')}.context_length"):
        settings["model_max_length"] = length
    template = metadata.text("tokenizer.chat_template")
    names = metadata.texts("tokenizer.chat_templates") or []
    named = {name: metadata.text(f"tokenizer.chat_template.{name}") for name in names}
    if named := {name: text for name, text in named.items() if text is not None}:
        settings["chat_template"] = named | ({} if template is None else {"default": template})
    elif template is not None:
        settings["chat_template"] = template
    return settings


def _token_id(metadata: Metadata, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.integer(key)
    if index is not None and not 0 <= index < num_tokens:
        raise ValueError(f"{metadata.path}: {key} must be one of the {num_tokens} tokens; got {index}")
    return index


def _token_types(metadata: Metadata, num_tokens: int) -> list[int]:
    types = metadata.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.token_type must have a type for each of {num_tokens} tokens; it has {len(types)}"
        )
    return types.tolist()


def _added_tokens(metadata: Metadata, tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else is: control tokens, which decoding may leave out, and
    others."""
    kinds = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    plain = {"single_word": False, "lstrip": False, "normalized": False}
    # Of Phi-3's sentencepiece vocabulary these take the spaces after them, which no key says.
    strips = metadata.text("general.architecture") == "phi3" and metadata.text("tokenizer.ggml.model") == "llama"
    return [
        {
            "id": index,
            "content": token,
            "special": kinds[kind],
            "rstrip": strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
            **plain,
        }
        for index, (token, kind) in enumerate(zip(tokens, _token_types(metadata, len(tokens)), strict=True))
        if kind in kinds and token
    ]


def _ends(metadata: Metadata, tokens: list[str]) -> dict[str, Any] | None:
    """The post-processor: which tokens are put before and after a text."""
    sentencepiece = metadata.text("tokenizer.ggml.model") == "llama"
    begins = metadata.flag("tokenizer.ggml.add_bos_token", sentencepiece or _cut(metadata).add_bos)
    added = {"bos": begins, "eos": metadata.flag("tokenizer.ggml.add_eos_token", False)}
    ids = {name: _token_id(metadata, name, len(tokens)) for name, wanted in added.items() if wanted}
    before, after = ([(tokens[ids[name]], ids[name])] if ids.get(name) is not None else [] for name in ("bos", "eos"))
    return text_with_ends(before, after)


def _cut(metadata: Metadata) -> Cut:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise NotImplementedError(
            f"{metadata.path}: tokenizer.ggml.pre = {name[:80]!r} is not implemented; implemented: {', '.join(CUTS)}. Give tokenizer_name_or_path, or token ids instead of text"
        )
    return CUTS[name]


def _byte_level(metadata: Metadata, tokens: list[str], vocabulary: dict[str, int]) -> dict[str, Any]:
    cut = _cut(metadata)
    merges = [
        merge.split(" ")
        for merge in metadata.required("tokenizer.ggml.merges", metadata.texts("tokenizer.ggml.merges"))
    ]
    for merge in merges:
        if len(merge) != 2 or not (merge[0] in vocabulary and merge[1] in vocabulary and "".join(merge) in vocabulary):
            raise ValueError(
                f"{metadata.path}: tokenizer.ggml.merges has {shown(' '.join(merge))}, which is no pair of tokens that makes a token"
            )
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": cut.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": bpe_model(vocabulary, merges, ignore_merges=cut.ignore_merges),
    }


def _sentencepiece(metadata: Metadata, tokens: list[str], vocabulary: dict[str, int]) -> dict[str, Any]:
    scores = metadata.required("tokenizer.ggml.scores", metadata.numbers("tokenizer.ggml.scores"))
    if len(scores) != len(tokens):
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.scores must have a score for each of {len(tokens)} tokens; it has {len(scores)}"
        )
    types = _token_types(metadata, len(tokens))
    unknown = _token_id(metadata, "unknown", len(tokens))
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    return sentencepiece_parts(tokens, scores.tolist(), types, unknown, prefix)
