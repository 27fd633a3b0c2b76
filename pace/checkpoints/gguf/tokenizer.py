"""Converts the tokenizer in a GGUF file's metadata to the contents of tokenizer.json and tokenizer_config.json.

Language models use three kinds of vocabularies. Byte-level BPE ("gpt2") has tokens, merges, and the name of the rule
that splits texts before merging. sentencepiece ("llama") has pieces with scores, from which merges follow. Gemma 4's
("gemma4") has sentencepiece's pieces, and merges. Encoders also use WordPiece ("bert") and unigram ("t5").
llama.cpp reads all in src/llama-vocab.cpp."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from pace.checkpoints.gguf.encoder_vocabularies import (
    DEFAULT_IDS,
    OTHER_KEYS,
    UNIGRAM,
    WORD_PIECES,
    encoder_ends,
    hub_tokens,
    unigram,
    word_pieces,
)
from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.tokens import Tokens, read_tokens
from pace.checkpoints.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    added_token,
    bpe_model,
    merges_by_score,
    sentencepiece_parts,
    text_with_ends,
)
from pace.naming import shown

logger = logging.getLogger("pace")

SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name in tokenizer_config.json -> name in the key tokenizer.ggml.<name>_token_id."""
SPECIAL_TOKENS_OF_ENCODERS = {**SPECIAL_TOKENS, "cls_token": "bos", "sep_token": "seperator", "mask_token": "mask"}
SPECIAL_TOKENS_OF_WORD_PIECES = {
    name: key for name, key in SPECIAL_TOKENS_OF_ENCODERS.items() if name not in ("bos_token", "eos_token")
}


class PreTokenizer(NamedTuple):
    """Rule for splitting texts before a byte-level vocabulary's merges are applied."""

    patterns: tuple[str, ...]
    """Each pattern splits the pieces of the previous one into its matches and the text between them."""
    ignore_merges: bool = False
    """True if a piece that is a token becomes that token, regardless of merges."""
    add_bos: bool = False
    """Default of add_bos_token."""
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
_QWEN3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "".join(
    rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
) + r"\s"  # fmt: skip
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_YOUTU = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_NOT_HAN = [kind.removesuffix("]") + r"&&[^\p{Han}]]" for kind in (_UPPER, _LOWER)]
KIMI_PATTERN = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"
)
_BAILING = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Numerals in groups of three. The first may be shorter."""
_THREES_OF_WORDS = r"\d{1,3}(?=(?:\d{3})*\b)"
"""The same for a number that ends a word."""
_ASIAN_SCRIPTS = (
    "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)
_WITH_CASE = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    "ⴀ-ⴭ\ua78f-\ua7ffꬰ-ꭩ\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb]]"
)
"""Letters that have a case, except those that Unicode added later and mathematical letters."""
_HAN = "[一-龥ࠀ-一가-\ud7ff]+"

_PRE_TOKENIZERS = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    (
        *("gpt-2", "phi-2", "olmo", "mpt", "granite-docling", "a.x-4.0", "exaone4", "mellum", "trillion"),
        *("roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es"),
    ): PreTokenizer((_GPT2,)),
    ("modern-bert",): PreTokenizer((_GPT2,), normalizer={"type": "NFC"}),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("bloom", "gpt3-finnish", "poro-chat"): PreTokenizer((" ?[^(\\s|.,!?…。，、।۔،)]+",)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): PreTokenizer(
        (r"\p{N}", _GPT2)
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("glm4", "glm5"): PreTokenizer((_LLAMA3,), ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "f2llmv2"): PreTokenizer(
        (_QWEN2,), normalizer={"type": "NFC"}
    ),
    ("qwen35",): PreTokenizer((_QWEN3_5,), normalizer={"type": "NFC"}),
    ("hunyuan", "solar-open"): PreTokenizer((_QWEN2,)),
    ("laguna",): PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((_BAILING,)),
    ("exaone-moe",): PreTokenizer((_EXAONE_MOE,)),
    ("kimi-k2",): PreTokenizer((KIMI_PATTERN,)),
    ("afmoe",): PreTokenizer((_THREES, f"[{_ASIAN_SCRIPTS}]+", _DEEPSEEK3)),
    ("cohere2moe", "tiny_aya"): PreTokenizer((_THREES_OF_WORDS, _GPT4O)),
    ("jais-2",): PreTokenizer((_JAIS2,)),
    ("seed-coder",): PreTokenizer((_SEED,)),
    ("youtu",): PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True),
    ("hunyuan-dense", "deepseek-v3"): PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ("deepseek-llm",): PreTokenizer(
        ("[\r\n]", rf"\s?{_WITH_CASE}+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN, r"\p{N}")
    ),
    ("deepseek-coder",): PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): PreTokenizer((_GPT4O,)),
}
PRE_TOKENIZERS = {name: rule for names, rule in _PRE_TOKENIZERS.items() for name in names}
"""Value of tokenizer.ggml.pre -> rule."""


ADVICE = "Give tokenizer_name_or_path, or token ids instead of text"


def tokenizer_state(metadata: Metadata) -> dict[str, Any] | str | None:
    """Returns the contents of tokenizer.json: its text if the file contains it, or None if the file has no vocabulary.

    Raises ValueError for missing values and wrong types, NotImplementedError for other kinds of vocabularies. The
    message names the file."""
    if whole := metadata.text("tokenizer.huggingface.json"):
        return whole
    model = metadata.text("tokenizer.ggml.model")
    if model in (None, "no_vocab", "none"):
        return None
    if model not in BUILDERS:
        raise NotImplementedError(
            f"{metadata.path} has a tokenizer of type {model[:80]!r}, which is not implemented; "
            f"implemented: {', '.join(BUILDERS)}. {ADVICE}"
        )
    tokens = metadata.required("tokenizer.ggml.tokens", _tokens(metadata))
    if len(tokens.ids) < len(tokens.texts):
        twice = next(token for index, token in enumerate(tokens.texts) if tokens.ids[token] != index)
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.tokens has {shown(twice)} twice, so the tokens of a text are ambiguous. "
            f"{ADVICE}"
        )
    if len(tokens.types) != len(tokens.texts):
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.token_type must have a type for each of {len(tokens.texts)} tokens; "
            f"it has {len(tokens.types)}"
        )
    return {
        **BUILDERS[model](metadata, tokens),
        "added_tokens": _added_tokens(metadata, tokens),
        "post_processor": _ends(metadata, tokens.texts),
    }


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json, with the chat template."""
    tokens = _tokens(metadata)
    is_encoder = _is_encoder(metadata)
    settings: dict[str, Any] = {
        "clean_up_tokenization_spaces": False,
        "padding_side": "right" if is_encoder else "left",
    }
    if metadata.text("tokenizer.ggml.model") == WORD_PIECES:
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if tokens:
        for name, key in _special_tokens(metadata).items():
            if (index := _token_id(metadata, key, len(tokens.texts))) is not None:
                settings[name] = tokens.texts[index]
        known = {settings[name] for name in _special_tokens(metadata) if name in settings}
        control = [tokens.texts[index] for index in np.flatnonzero(tokens.types == CONTROL)]
        settings["additional_special_tokens"] = [token for token in control if token not in known]
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


def _tokens(metadata: Metadata) -> Tokens | None:
    """The vocabulary, with the Hub's names of tokens."""
    tokens = read_tokens(metadata)
    is_changed = tokens is not None and metadata.text("tokenizer.ggml.model") == WORD_PIECES
    return hub_tokens(tokens) if is_changed and len(tokens.types) == len(tokens.texts) else tokens


def _is_encoder(metadata: Metadata) -> bool:
    """True if the vocabulary is that of a model whose tokens see the whole text."""
    causal = metadata.flag(f"{metadata.text('general.architecture')}.attention.causal", True)
    return not causal or metadata.text("tokenizer.ggml.model") in (WORD_PIECES, UNIGRAM)


def _special_tokens(metadata: Metadata) -> dict[str, str]:
    """Name in tokenizer_config.json -> name in a key, for the special tokens of this kind of vocabulary."""
    if metadata.text("tokenizer.ggml.model") == WORD_PIECES:
        return SPECIAL_TOKENS_OF_WORD_PIECES
    return SPECIAL_TOKENS_OF_ENCODERS if _is_encoder(metadata) else SPECIAL_TOKENS


def _token_id(metadata: Metadata, name: str, num_tokens: int) -> int | None:
    """Id of a special token. Raises ValueError if it is none of the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.integer(key)
    if index is None and name in OTHER_KEYS and _is_encoder(metadata):
        key = f"tokenizer.ggml.{OTHER_KEYS[name]}_token_id"
        index = metadata.integer(key)
    if index is None and metadata.text("tokenizer.ggml.model") == WORD_PIECES:
        usual = DEFAULT_IDS.get(name, num_tokens)
        return usual if usual < num_tokens else None
    if index is not None and not 0 <= index < num_tokens:
        raise ValueError(f"{metadata.path}: {key} must be one of the {num_tokens} tokens; got {index}")
    return index


def _added_tokens(metadata: Metadata, tokens: Tokens) -> list[dict[str, Any]]:
    """Tokens that are matched in a text before anything else: control tokens, which decoding may skip, and others."""
    # In Phi-3's sentencepiece vocabulary these strip the spaces after them, which no key states.
    strips = metadata.text("general.architecture") == "phi3" and metadata.text("tokenizer.ggml.model") == "llama"
    # A mask takes the spaces before it, except in vocabularies of WordPiece.
    takes_spaces = _is_encoder(metadata) and metadata.text("tokenizer.ggml.model") != WORD_PIECES
    mask = _token_id(metadata, "mask", len(tokens.texts)) if takes_spaces else None
    added = []
    for index in np.flatnonzero(np.isin(tokens.types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist():
        if text := tokens.texts[index]:
            token = added_token(index, text, special=bool(tokens.types[index] != USER_DEFINED))
            rstrip = strips and text not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(token | {"rstrip": rstrip, "lstrip": index == mask})
    return added


def _ends(metadata: Metadata, tokens: list[str]) -> dict[str, Any] | None:
    """Post-processor that puts tokens before and after a text."""
    model = metadata.text("tokenizer.ggml.model")
    if _is_encoder(metadata):
        ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "seperator")}
        return encoder_ends(metadata, tokens, ids)
    begins = metadata.flag("tokenizer.ggml.add_bos_token", model == "llama" or _pre_tokenizer(metadata).add_bos)
    begins |= model == "gemma4"  # as in llama.cpp, which ignores the key
    added = {"bos": begins, "eos": metadata.flag("tokenizer.ggml.add_eos_token", False)}
    ids = {name: _token_id(metadata, name, len(tokens)) for name, wanted in added.items() if wanted}
    before, after = ([(tokens[ids[name]], ids[name])] if ids.get(name) is not None else [] for name in ("bos", "eos"))
    return text_with_ends(before, after)


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise NotImplementedError(
            f"{metadata.path}: tokenizer.ggml.pre = {name[:80]!r} is not implemented; "
            f"implemented: {', '.join(PRE_TOKENIZERS)}. {ADVICE}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Metadata, tokens: Tokens) -> dict[str, Any]:
    rule = _pre_tokenizer(metadata)
    if metadata.text("tokenizer.ggml.pre") is None:
        logger.warning(
            "%s lacks tokenizer.ggml.pre, the rule for splitting a text before tokenizing. The rule 'default' is used, "
            "and the model may get other tokens than in training. Convert the model again, or give "
            "tokenizer_name_or_path",
            metadata.path,
        )
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": rule.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": bpe_model(tokens.ids, _merges(metadata, tokens), ignore_merges=rule.ignore_merges),
    }


def _merges(metadata: Metadata, tokens: Tokens) -> list[tuple[str, ...]]:
    """Pairs of tokens that make a third, best first."""
    lines = metadata.required("tokenizer.ggml.merges", metadata.texts("tokenizer.ggml.merges"))
    merges = [tuple(line.split(" ")) for line in lines]
    known = tokens.ids.keys()
    if not all(len(merge) == 2 for merge in merges) or not (
        known >= {left for left, _ in merges}
        and known >= {right for _, right in merges}
        and known >= {left + right for left, right in merges}
    ):
        wrong = next(
            line for line, merge in zip(lines, merges) if len(merge) != 2 or not {*merge, "".join(merge)} <= known
        )
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.merges has {shown(wrong)}, which must be two tokens that make a third"
        )
    return merges


def _pieces_with_merges(metadata: Metadata, tokens: Tokens) -> dict[str, Any]:
    return sentencepiece_parts(tokens.texts, _merges(metadata, tokens), _unknown(metadata, tokens), prefix=False)


def _unknown(metadata: Metadata, tokens: Tokens) -> int | None:
    """The token of unknown characters, if there is one."""
    unknown = _token_id(metadata, "unknown", len(tokens.texts))
    return next(iter(np.flatnonzero(tokens.types == UNKNOWN).tolist()), None) if unknown is None else unknown


def _sentencepiece(metadata: Metadata, tokens: Tokens) -> dict[str, Any]:
    scores = metadata.required("tokenizer.ggml.scores", metadata.numbers("tokenizer.ggml.scores"))
    if len(scores) != len(tokens.texts):
        raise ValueError(
            f"{metadata.path}: tokenizer.ggml.scores must have a score for each of {len(tokens.texts)} tokens; it has "
            f"{len(scores)}"
        )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    merges = merges_by_score(tokens.texts, scores, tokens.types)
    return sentencepiece_parts(tokens.texts, merges, _unknown(metadata, tokens), prefix)


def _unigram(metadata: Metadata, tokens: Tokens) -> dict[str, Any]:
    return unigram(metadata, tokens, _unknown(metadata, tokens))


def _word_pieces(metadata: Metadata, tokens: Tokens) -> dict[str, Any]:
    return word_pieces(metadata, tokens, _token_id(metadata, "unknown", len(tokens.texts)))


BUILDERS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _pieces_with_merges,
    WORD_PIECES: _word_pieces,
    UNIGRAM: _unigram,
}
"""Value of tokenizer.ggml.model -> function that makes the normalizer, pre-tokenizer, decoder and model."""
