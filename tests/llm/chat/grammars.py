"""Helpers for tests of grammars: a tokenizer, random calls, and random walks."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from pace.llm.chat import FORMATS, Tool, ToolCall, ToolFormat
from pace.llm.chat.literals import parts
from tests.plugins.tiers import sample

TINY = Path(__file__).parents[3] / "pace" / "assets" / "tiny" / "tokenizer.json"
END = "<|end|>"
PLAIN = "\ue000"
"""Marker put into random values so that they are not read as special tokens. It is removed before comparisons."""
ALIKE = (
    *("granite3", "functools", "nemotron", "apriel", "llama4", "apertus", "olmo3"),
    *("hunyuan3_open", "hunyuan3", "deepseek_v4", "solar_open"),
)
"""Formats that differ from phi4_mini, lfm2, glm45, deepseek_v32, kimi or command only in their marks."""
FORMAT_NAMES = sample(list(FORMATS), always=lambda name: name not in ALIKE)
_SPECIAL = re.compile(r'<[|｜/]?[\w|｜▁:/"]+[|｜]?>|\[/?[A-Z_]+\]')


def call_of(format: ToolFormat, name: str, number: int = 0) -> ToolCall:
    """Returns a call without arguments, with an id as long as those of the format."""
    return ToolCall(f"abcDEF{number:03}9"[: len(format.make_id(name, number))], name, "")


def special_names(format: ToolFormat) -> list[str]:
    """Returns the marks of a format that are special tokens of models."""
    literals = [format.opening, format.call, format.between or "", format.closing, *format.reply, *format.preamble]
    literals += [getattr(format.arguments, name, "") for name in ("before", "after", "end", "quote")]
    return sorted({found for literal in literals for part in parts(literal) for found in _SPECIAL.findall(part.text)})


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bundled tokenizer, with more special tokens."""

    tokens: Tokenizer
    llt: LLTokenizer
    special: dict[str, int]
    """Special tokens that grammars may name, with their ids."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. The name of a special token with PLAIN inside is plain text."""
        pieces = text.split(PLAIN)
        return [token for piece in pieces for token in self.tokens.encode(piece, add_special_tokens=False).ids]

    def spell(self, text: str) -> list[int]:
        """Returns the text as tokens of single characters, so that none is special."""
        return [token for character in text for token in self.encode(character)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokens.decode(list(tokens), skip_special_tokens=False)


@functools.cache
def vocabulary(names: tuple[str, ...] = (), end: str = END) -> Vocabulary:
    """Returns the vocabulary with these additional special tokens. The token `end` ends a turn."""
    settings = json.loads(TINY.read_text())
    known = {token["content"]: token["id"] for token in settings["added_tokens"]}
    size = max([*settings["model"]["vocab"].values(), *known.values()]) + 1
    for name in names:
        if name not in known:
            known[name] = size
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            settings["added_tokens"].append({"id": size, "content": name, "special": True, **flags})
            size += 1
    text = json.dumps(settings)
    special = {name: token for name, token in known.items() if name != end}
    return Vocabulary(Tokenizer.from_str(text), LLTokenizer(text, eos_token=known[end]), special)


@functools.lru_cache(maxsize=64)
def _compiled(grammar: str, llt: LLTokenizer) -> LLMatcher:
    found = LLMatcher(llt, grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def matcher(grammar: str, words: Vocabulary) -> LLMatcher:
    return _compiled(grammar, words.llt).deep_copy()


def accepts(grammar: str, words: Vocabulary, tokens: Sequence[int]) -> bool:
    """True if the tokens are a whole turn."""
    found = matcher(grammar, words)
    return all(found.consume_token(token) for token in tokens) and found.is_accepting()


def walk(grammar: str, words: Vocabulary, rng: random.Random, most: int, begin: str = "") -> tuple[str, bool]:
    """Returns `begin` with random tokens that the grammar allows, and True if the turn ended within `most` tokens.

    About half of the tokens are closing ones if any is allowed, so that strings end.
    """
    found = matcher(grammar, words)
    tokens = words.encode(begin)
    assert all(found.consume_token(token) for token in tokens), f"the grammar refuses {begin!r}"
    end = words.tokens.token_to_id(END)
    mask = llguidance.numpy.allocate_token_bitmask(1, words.llt.vocab_size)
    for _ in range(most):
        if found.is_stopped():
            return words.decode(tokens), True
        llguidance.numpy.fill_next_token_bitmask(found, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), f"nothing may follow {words.decode(tokens)!r}"
        if rng.random() < 0.5:
            allowed = [token for token in _closing(words) if _bit(mask, token)] or allowed
        token = int(rng.choice(allowed))
        if token == end:
            return words.decode(tokens), True
        assert found.consume_token(token), found.get_error()
        tokens.append(token)
    return words.decode(tokens), found.is_stopped()


def _bit(mask: np.ndarray, token: int) -> bool:
    return bool(mask[0, token // 32] >> (token % 32) & 1)


@functools.lru_cache(maxsize=1)
def _closing(words: Vocabulary) -> list[int]:
    """Returns the tokens that close a string, a value, a tag or the turn."""
    ids = [words.tokens.token_to_id(text) for text in ('"', "'", "}", "]", ")", "</", "Ċ", END)]
    return [token for token in ids if token is not None]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "bounded", "long", "optional", "any"]
    kind = rng.choice(kinds + ["array", "list", "object"] * (depth > 0))
    if kind == "any":
        return {}
    if kind == "long":
        return {"type": "string", "minLength": rng.randrange(1, 4)}
    if kind == "optional":
        other = rng.choice([{"type": "string"}, {"enum": ["red", "null", "it's"]}, random_schema(rng, 0)])
        return {"anyOf": [other, {"type": "null"}]}
    if kind == "list":
        return {"type": "array", "items": random_schema(rng, depth - 1)}
    if kind == "enum":
        return {"enum": ["red", "green", "a b", "it's"]}
    if kind == "bounded":
        return {"type": "string", "minLength": 1, "maxLength": 5}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 3}
    if kind == "object":
        names = rng.sample(["x", "y", "z"], 2)
        inner = {name: random_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": inner, "required": names[:1], "additionalProperties": False}
    return {"type": kind}


def random_tools(rng: random.Random) -> list[Tool]:
    names = rng.sample(["get", "get_all", "f", "a.b-c", "functions", "name"], 3)
    tools = []
    for name in names:
        keys = rng.sample(["city", "cit", "days", "user-id", "name", "arguments", "größe"], rng.randrange(4))
        schema = {"type": "object", "properties": {key: random_schema(rng) for key in keys}}
        required = rng.sample(keys, rng.randrange(len(keys) + 1))
        tools.append(Tool(name, parameters=schema | ({"required": required} if required else {})))
    return tools


def random_value(schema: dict[str, Any], rng: random.Random) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return random_value(rng.choice(schema["anyOf"]), rng)
    kind = schema.get("type") or rng.choice(["string", "integer", "boolean", "null"])
    if kind == "null":
        return None
    if kind == "string" and "maxLength" in schema:
        return rng.choice(["a", "0", "x y", '"'])
    if kind == "string":
        nasty = ["</tool_call>", "\n</parameter", "</arg_valu", '"', "'", "\\", "\\n", "\n", "}", "]", "[TOOL_CALLS",
                 "\u0007", "é", "🙂", "{", ", ", "True", "<tool_call>{", "<think>", "/", "\u2028", "null",
                 "12"]  # fmt: skip
        text = "".join(rng.choices(nasty, k=rng.randrange(5))) or "Rome"
        text += "né<" if "minLength" in schema else ""
        return text.replace("<", "<" + PLAIN).replace("[", "[" + PLAIN)
    if kind == "integer":
        return rng.choice([0, -7, 12345])
    if kind == "number":
        return rng.choice([0.5, -1.25, 3])
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [random_value(schema["items"], rng) for _ in range(rng.randrange(3))]
    return random_object(schema, rng)


def random_object(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    required = schema.get("required", ())
    chosen = [key for key in schema["properties"] if key in required or rng.random() < 0.6]
    return {key: random_value(schema["properties"][key], rng) for key in chosen}
