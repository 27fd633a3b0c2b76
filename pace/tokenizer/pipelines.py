"""Decides which tokenizer.json files describe completely what transformers would make of them.

For most classes transformers uses a tokenizer.json unchanged. Some classes only read its vocabulary, and build the
normalizer, pre-tokenizer and decoder themselves. A file with equal parts gives the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from pace.tokenizer.tokenizer import NAMED

PLAIN_CLASSES = {"PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"}
"""Classes that use the file unchanged. The suffix "Fast" of a name makes no difference."""
PLAIN_MODELS = {
    "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "granite",
    "granitemoe", "granitemoehybrid", "granitemoeshared", "hyperclovax", "internlm2", "internlm3", "iquestcoder",
    "kimi_k25", "kimi_linear", "llava", "llava_next", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral",
    "mistral3", "mixtral", "modernbert-decoder", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "paddleocr_vl",
    "persimmon", "phi3", "phimoe", "smolvlm", "stablelm",
}  # fmt: skip
"""Values of model_type for which the file is used unchanged, regardless of the class in the settings."""
REBUILT_MODELS = {"qwen2": "Qwen2Tokenizer"} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"
)
"""model_type -> class that transformers uses regardless of the settings. tests/tokenizer checks both."""

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Byte tokens to which a vocabulary of pieces falls back."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LETTERS_ONLY = _BYTES | {"use_regex": False}
_CUT, _CUT3_5 = (
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in (_QWEN2, _QWEN3_5)
)
_WORDS = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PIECES = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_NFC = {"type": "NFC"}


def _sequence(kind: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


REBUILT = {
    "Qwen2Tokenizer": (_NFC, _sequence("pretokenizers", _CUT, _LETTERS_ONLY), _BYTES),
    "Qwen3_5Tokenizer": (_NFC, _sequence("pretokenizers", _CUT3_5, _LETTERS_ONLY), _BYTES),
    "GPT2Tokenizer": (None, _BYTES, _BYTES),
    "GemmaTokenizer": (_SPACES, _WORDS, _sequence("decoders", *_PIECES)),
    "LlamaTokenizer": (None, _METASPACE, _sequence("decoders", *_PIECES, _STRIP)),
}
"""Class -> the normalizer, pre-tokenizer and decoder that it builds. Models that work on pieces fuse unknown characters
and fall back to bytes. No model prefers a whole word to its merges."""

_END = "<|endoftext|>"
DEFAULTS: dict[str, dict[str, str | None]] = {
    **dict.fromkeys(
        ("Qwen2Tokenizer", "Qwen3_5Tokenizer"), {"unk_token": _END, "eos_token": _END, "pad_token": _END}
    ),
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None},
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>",
        "padding_side": "left",
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"},
}  # fmt: skip
"""Class -> default settings."""


def complete_settings(backend: Tokenizer, settings: Mapping[str, Any], model_type: Any) -> dict[str, Any] | None:
    """Returns the settings of tokenizer_config.json, completed by its class and the file. None unless transformers'
    tokenizer would be equal to `backend`, as read from tokenizer.json."""
    named = settings.get("tokenizer_class")
    if "auto_map" in settings or not isinstance(named, str) or not isinstance(model_type, str):
        return None
    name = _class_of(backend, named.removesuffix("Fast"), model_type)
    of_class = DEFAULTS.get(name or "", {})
    if backend.padding:  # overrides the class's padding side, but not its pad token
        of_class = {"pad_token": backend.padding["pad_token"], **of_class, "padding_side": backend.padding["direction"]}
    if backend.truncation:
        of_class = {**of_class, "truncation_side": backend.truncation["direction"]}
    complete = of_class | dict(settings)
    is_whole = (
        (name is None or _has_parts(backend, name, complete))
        and backend.post_processor is not None
        and not complete.get("fix_mistral_regex")
        and complete.get("padding_side", "left") in ("left", "right")
        and not (complete.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE")
        and _has_tokens(backend, complete, rebuilt=name is not None)
    )
    return complete if is_whole else None


def _class_of(backend: Tokenizer, name: str, model_type: str) -> str | None:
    """Class that transformers makes for a checkpoint that names `name`. None for a class that uses the file
    unchanged."""
    if model_type in REBUILT_MODELS:
        return REBUILT_MODELS[model_type]
    is_plain = name in PLAIN_CLASSES or model_type in PLAIN_MODELS
    return None if is_plain or name == "LlamaTokenizer" and _is_byte_level(backend) else name


def _has_parts(backend: Tokenizer, name: str, settings: Mapping[str, Any]) -> bool:
    """True if the tokenizer has the parts that the class `name` builds."""
    is_llama = name == "LlamaTokenizer"
    if name not in REBUILT or settings.get("add_prefix_space") not in (None, is_llama):
        return False
    if is_llama and settings.get("legacy"):  # legacy puts a space before each piece of text
        return False
    *before, decoder = REBUILT[name]
    found = [_as_json(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder)]
    of_bytes = decoder is _BYTES  # its flags have no meaning in a decoder
    model = backend.model
    return (
        found[:2] == before
        and (found[2]["type"] == "ByteLevel" if of_bytes and found[2] else found[2] == decoder)
        and type(model).__name__ == "BPE"
        and (model.fuse_unk, model.byte_fallback, model.ignore_merges) == (not of_bytes, not of_bytes, False)
        # Classes differ in the unknown token, so no text may be unknown.
        and (model.unk_token is None if of_bytes else None not in map(backend.token_to_id, BYTE_PIECES))
    )


def _is_byte_level(backend: Tokenizer) -> bool:
    """True if any part works on bytes. A byte-level LlamaTokenizer is used unchanged, one of pieces is rebuilt."""
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    return any('"ByteLevel"' in json.dumps(_as_json(part)) for part in parts)


def _as_json(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _has_tokens(backend: Tokenizer, settings: Mapping[str, Any], rebuilt: bool) -> bool:
    """True if all tokens that the settings add or declare special are added tokens of the file with the same flags. For
    a rebuilt class the file must have no others, because they would be lost."""
    known = backend.get_added_tokens_decoder()
    added = settings.get("added_tokens_decoder")
    for index, token in (added or {}).items():
        if not (isinstance(token, dict) and str(index).isdecimal() and _is_like(known.get(int(index)), token)):
            return False
    if rebuilt and added is not None and len(added) < len(known):
        return False
    special = {token.content: token for token in known.values() if token.special}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = [value for key, value in settings.items() if key in NAMED or key.endswith("_token")]
    if isinstance(extra, dict):
        named, extra = [*named, *extra.values()], []
    # transformers adds tokens without a name again, with different flags. For a rebuilt class it also does so with
    # named tokens.
    flags = {"lstrip": False, "rstrip": False, "normalized": False} if rebuilt else {}
    return all(
        _is_like(special.get(_content(token)), _with_flags(token, {"normalized": False})) for token in extra
    ) and all(
        _is_like(special.get(_content(token)), flags)
        for token in named
        if token is not None and not isinstance(token, bool)
    )


def _is_like(found: Any, token: Mapping[str, Any]) -> bool:
    return found is not None and all(getattr(found, flag, value) == value for flag, value in token.items())


def _with_flags(token: Any, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**flags, **token} if isinstance(token, dict) else flags


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
