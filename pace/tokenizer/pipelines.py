"""Which tokenizer.json say all that transformers would make of them.

transformers takes a tokenizer.json as it is for most classes. Some classes read its vocabulary only and build the rest
by themselves: normalizer, pre-tokenizer and decoder. A file that has the same ones is as good as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from pace.tokenizer.tokenizer import NAMED

PLAIN_CLASSES = {"PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"}
"""Classes that take the file as it is; "Fast" at the end of a name says nothing."""
REBUILT_MODELS = {"qwen2": "Qwen2Tokenizer"}
"""By model_type: the class that transformers takes whatever the files say. tests/tokenizer holds this."""

BYTE_LEVEL_LLAMAS = {"llama", "deepseek_v2", "deepseek_v3"}
"""By model_type: where a LlamaTokenizer of bytes is taken as it is."""

_QWEN2 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LETTERS_ONLY = _BYTES | {"use_regex": False}
_CUT = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
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
    "GPT2Tokenizer": (None, _BYTES, _BYTES),
    "GemmaTokenizer": (_SPACES, _WORDS, _sequence("decoders", *_PIECES)),
    "LlamaTokenizer": (None, _METASPACE, _sequence("decoders", *_PIECES, _STRIP)),
}
"""By class: the normalizer, pre-tokenizer and decoder that it builds. Its model fuses unknown characters and falls back
to bytes where it works on pieces, and never prefers a whole word to its merges."""

_END = "<|endoftext|>"
DEFAULTS: dict[str, dict[str, str]] = {
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>",
        "padding_side": "left",
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"},
}  # fmt: skip
"""By class: what holds where the settings do not say."""


def complete_settings(backend: Tokenizer, settings: Mapping[str, Any], model_type: Any) -> dict[str, Any] | None:
    """What tokenizer_config.json holds, with the defaults of its class; None unless transformers' tokenizer would be
    `backend` as it was read from tokenizer.json."""
    name = settings.get("tokenizer_class")
    if "auto_map" in settings or not isinstance(name, str) or not isinstance(model_type, str):
        return None
    name = REBUILT_MODELS.get(model_type, name.removesuffix("Fast"))
    is_plain = name in PLAIN_CLASSES or (
        name == "LlamaTokenizer" and model_type in BYTE_LEVEL_LLAMAS and _is_byte_level(backend)
    )
    if not is_plain:
        settings = DEFAULTS.get(name, {}) | settings
    is_whole = (
        (is_plain or _has_parts(backend, name, settings))
        and not settings.get("fix_mistral_regex")
        and backend.post_processor is not None
        and _has_tokens(backend, settings)
    )
    return dict(settings) if is_whole else None


def _has_parts(backend: Tokenizer, name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is built as the class `name` builds it."""
    if name not in REBUILT or settings.get("add_prefix_space"):
        return False
    *before, decoder = REBUILT[name]
    found = [_as_json(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder)]
    of_bytes = decoder is _BYTES  # which has flags that mean nothing in a decoder
    model = backend.model
    return (
        found[:2] == before
        and (found[2]["type"] == "ByteLevel" if of_bytes and found[2] else found[2] == decoder)
        and type(model).__name__ == "BPE"
        and (model.fuse_unk, model.byte_fallback, model.ignore_merges) == (not of_bytes, not of_bytes, False)
    )


def _is_byte_level(backend: Tokenizer) -> bool:
    return (_as_json(backend.decoder) or {}).get("type") == "ByteLevel"


def _as_json(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _has_tokens(backend: Tokenizer, settings: Mapping[str, Any]) -> bool:
    """Whether all tokens that the settings add, or call special, are added tokens of the file with the same flags."""
    known = backend.get_added_tokens_decoder()
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        if not isinstance(token, dict) or not str(index).isdecimal():
            return False
        found = known.get(int(index))
        if found is None or any(getattr(found, field, None) != value for field, value in token.items()):
            return False
    special = {token.content for token in known.values() if token.special}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    tokens = [value for key, value in settings.items() if key in NAMED or key.endswith("_token")] + list(extra)
    names = [token.get("content") if isinstance(token, dict) else token for token in tokens if token is not None]
    return all(name in special for name in names if not isinstance(name, bool))
