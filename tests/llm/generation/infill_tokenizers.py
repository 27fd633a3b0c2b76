"""The bundled tokenizer with infill tokens, which replace some of its words."""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pace.assets import TINY

QWEN = {"<|fim_prefix|>": False, "<|fim_middle|>": False, "<|fim_suffix|>": False, "<|fim_pad|>": False,
        "<|file_sep|>": False, "<|repo_name|>": False, "<|endoftext|>": True}  # fmt: skip
GEMMA = {"<|fim_prefix|>": True, "<|fim_middle|>": True, "<|fim_suffix|>": True, "<|file_separator|>": True}
STARCODER = {"<fim_prefix>": True, "<fim_middle>": True, "<fim_suffix>": True, "<file_sep>": True, "<fim_pad>": True}
FALCON = {"<|prefix|>": True, "<|middle|>": True, "<|suffix|>": True}
DEEPSEEK = {"<｜fim▁begin｜>": False, "<｜fim▁hole｜>": False, "<｜fim▁end｜>": False, "<|EOT|>": False}


def with_tokens(names: dict[str, bool]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer with its last words replaced by the tokens `names`. The values are True for special
    ones."""
    plain = AutoTokenizer.from_pretrained(str(TINY))
    state = json.loads(plain.backend_tokenizer.to_str())
    words = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)[-len(names) :]
    gone = set(words)
    merges = state["model"]["merges"]
    state["model"]["merges"] = [
        pair for pair in merges if "".join(pair if isinstance(pair, list) else pair.split(" ")) not in gone
    ]
    for word, (name, is_special) in zip(words, names.items()):
        token = state["model"]["vocab"].pop(word)
        state["model"]["vocab"][name] = token
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        state["added_tokens"].append({"id": token, "content": name, **flags, "special": is_special})
    special = {name: getattr(plain, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    special = {name: value for name, value in special.items() if value is not None}
    more = [name for name, is_special in names.items() if is_special]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), additional_special_tokens=more, **special
    )
