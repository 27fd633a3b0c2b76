"""Tokenizers of ChatGLM3 and GLM-4-9B. Their checkpoints define them in Python code, which is not needed here.

ChatGLM3 has a sentencepiece vocabulary, followed by nine more tokens. A turn consists of its role's token, a line with
metadata (for example the name of a tool), and its text. Each of these is encoded separately. The names of these tokens
are ordinary text if a user writes them: "sop" is part of many words.

GLM-4-9B has a tiktoken vocabulary, and lists its other tokens in tokenizer_config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pace.checkpoints.files import read_json_object
from pace.checkpoints.sentencepiece import read_sentencepiece
from pace.checkpoints.tiktoken import read_tiktoken
from pace.checkpoints.vocabulary import CONTROL, added_token, listed_tokens, read_vocabulary, text_with_ends
from pace.tokenizer.tokenizer import Tokenizer

VOCABULARY = "tokenizer.model"
"""File of the vocabulary."""

BEGIN = ("[gMASK]", "sop")
"""Tokens at the beginning of every text."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
NAMES = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *ROLES)
"""Names of ChatGLM3's tokens after the vocabulary, in order."""
TURN_ENDS = ("<|user|>", "<|observation|>")
"""Tokens that follow a turn of the assistant."""
APART = "\ufdd0"
"""Inserted into a token's name in a message, so that the name is read as text. Unicode reserves this code point for
internal use."""

CHAT_TEMPLATE = r"""
{%- set no_text = '' -%}
{{- '[gMASK]sop' -}}
{%- if tools -%}
    {{- '<|system|>\n Answer the following questions as best as you can. You have access to the following tools:\n' -}}
    {{- tools | map(attribute='function') | list | tojson(indent=4) -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'observation' if message.role == 'tool' else message.role -%}
    {%- if role not in ['system', 'user', 'assistant', 'observation'] -%}
        {{- raise_exception('roles are system, user, assistant and tool') -}}
    {%- endif -%}
    {%- if message.content or not message.tool_calls -%}
        {{- '<|' + role + '|>' + (message.metadata or no_text) + '\n' -}}
        {{- ' ' + message.content if message.content else no_text -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '<|assistant|>' + call.function.name + '\n ```python\ntool_call(' -}}
        {%- for name, value in call.function.arguments.items() -%}
            {{- (no_text if loop.first else ', ') + name + '=' -}}
            {%- if value is string -%}
                {{- "'" + (value | tojson)[1:-1] | replace('\\"', '"') | replace("'", "\\'") + "'" -}}
            {%- elif value is boolean -%}
                {{- 'True' if value else 'False' -}}
            {%- else -%}
                {{- value | tojson -}}
            {%- endif -%}
        {%- endfor -%}
        {{- ')\n```' -}}
    {%- endfor -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else no_text -}}
""".strip()
"""Renders a conversation as `build_chat_input` of ChatGLM3's tokenizer does, and tool calls as in its page on tools."""


class Conversations(Tokenizer):
    """ChatGLM3's tokenizer. Token names are tokens in a text that begins as conversations do. In messages they are
    text."""

    @property
    def turn_ends(self) -> list[int]:
        return self.convert_tokens_to_ids(list(TURN_ENDS))

    def __call__(self, text: Any = None, *others: Any, **options: Any) -> Any:
        return super().__call__(text, *others, **_options(text, others, options))

    def encode(self, text: Any, *others: Any, **options: Any) -> Any:
        return super().encode(text, *others, **_options(text, others, options))

    def apply_chat_template(self, conversation: Any, *others: Any, **options: Any) -> Any:
        if options.get("tools"):
            options["tools"] = names_apart(options["tools"])
        return super().apply_chat_template(names_apart(conversation), *others, **options)


def _options(text: Any, others: tuple, options: dict[str, Any]) -> dict[str, Any]:
    texts = [text] if isinstance(text, str) else text or []
    if others or not all(isinstance(one, str) and one.startswith("".join(BEGIN)) for one in texts):
        return options
    return options | {"split_special_tokens": False, "add_special_tokens": False}


def names_apart(value: Any) -> Any:
    """Returns a copy of messages or tools in which token names are read as text."""
    if isinstance(value, str):
        names = "|".join(map(re.escape, NAMES))
        return re.sub(names, lambda name: name[0][0] + APART + name[0][1:], value.replace(APART, ""))
    if isinstance(value, Mapping):
        return {key: item if key == "role" else names_apart(item) for key, item in value.items()}
    return [names_apart(item) for item in value] if isinstance(value, (list, tuple)) else value


def chatglm3_state(state: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Returns the tokenizer.json `state` with ChatGLM3's normalizer and post-processor. `ids`: ids of its tokens by
    name."""
    drop = {"type": "Replace", "pattern": {"String": APART}, "content": ""}
    normalizer = {"type": "Sequence", "normalizers": [drop, *state["normalizer"]["normalizers"]]}
    begin = text_with_ends([(name, ids[name]) for name in BEGIN])
    return {**state, "normalizer": normalizer, "post_processor": begin}


def chatglm3_settings(end: str, unknown: str) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json. `end` and `unknown` are the end and the unknown token."""
    return {
        "eos_token": end,
        "unk_token": unknown,
        "pad_token": unknown,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "additional_special_tokens": list(NAMES),
        "chat_template": CHAT_TEMPLATE,
    }


def is_own_tokenizer(directory: Path) -> bool:
    """True if a checkpoint defines its tokenizer in code, and this module makes it instead."""
    names = [directory / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "config.json")]
    if names[0].exists() or not names[1].exists():
        return False
    kind = read_json_object(names[2]).get("tokenizer_class") if names[2].exists() else None
    family = read_json_object(names[3]).get("model_type") if names[3].exists() else None
    return kind in ("ChatGLMTokenizer", "ChatGLM4Tokenizer") or family == "chatglm"


def own_tokenizer(directory: Path) -> tuple[dict[str, Any], dict[str, Any], type[Tokenizer]]:
    """Returns the contents of tokenizer.json and of tokenizer_config.json, and the class. Raises ValueError or
    NotImplementedError that name the file."""
    path = directory / "tokenizer.model"
    data = read_vocabulary(path)
    if data[:1] != b"\n":  # a protocol buffer message begins with its first piece
        return *glm4_tokenizer(directory, path, data), Tokenizer
    model = read_sentencepiece(path, data)
    specials = [added_token(i, model.pieces[i]) for i, kind in enumerate(model.types) if kind == CONTROL]
    specials.insert(0, added_token(model.unknown, model.pieces[model.unknown]))
    if not 0 <= model.end < len(model.pieces):
        raise ValueError(f"{path}: eos_id must be one of {len(model.pieces)} pieces; got {model.end}")
    settings = chatglm3_settings(model.pieces[model.end], model.pieces[model.unknown])
    ids = {name: len(model.pieces) + index for index, name in enumerate(NAMES)}
    added = specials + [added_token(index, name) for name, index in ids.items()]
    state = {"added_tokens": added, **model.parts()}
    return chatglm3_state(state, ids), settings, Conversations


def gguf_tokenizer(path: Path, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], type[Tokenizer]]:
    """Returns the same as `own_tokenizer` for ChatGLM3's vocabulary in a GGUF file. `state`: the contents of
    tokenizer.json."""
    vocabulary = state["model"]["vocab"]
    if missing := [name for name in NAMES if name not in vocabulary]:
        raise ValueError(f"{path}: tokenizer.ggml.tokens has no {', '.join(missing)}")
    names = {index: token for token, index in vocabulary.items()}
    return chatglm3_state(state, vocabulary), chatglm3_settings(names[2], names[0]), Conversations


def glm4_tokenizer(directory: Path, path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the same as `own_tokenizer` for GLM-4-9B, without the class."""
    config = directory / "tokenizer_config.json"
    settings = read_json_object(config)
    parts = read_tiktoken(path, data)
    ids = {token: index for index, token in listed_tokens(config, settings).items()}
    begin = [(name, ids[name]) for name in ("[gMASK]", "<sop>") if name in ids]
    state = {
        "added_tokens": [added_token(index, name) for name, index in sorted(ids.items(), key=lambda item: item[1])],
        "post_processor": text_with_ends(begin),
    }
    names = ("eos_token", "pad_token", "chat_template", "model_max_length", "additional_special_tokens")
    kept = {name: settings[name] for name in names if settings.get(name) is not None}
    return state | parts, {"padding_side": "left", "clean_up_tokenization_spaces": False, **kept}
