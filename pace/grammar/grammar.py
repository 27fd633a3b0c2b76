"""`Grammar`: a description of what a text may be, checked, and independent of any model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pace.grammar.json_schema import prepare_schema, read_schema
from pace.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from pace.grammar.support import relaxed
from pace.grammar.whitespace import whitespace_options


@dataclass(frozen=True)
class GivenSchema:
    """A JSON schema as somebody gave it, and what errors call it."""

    schema: Mapping[str, Any]
    source: str
    """A grammar of it alone, in llguidance's form."""
    title: str = "this JSON schema"
    place: str | None = None
    """The field of a request that holds it, as `tools[3]`; None where the caller knows."""


class GrammarError(ValueError):
    """A grammar cannot be used. `place` is the field of a request that holds what is wrong with it, if it is known."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Grammar:
    """What a text may be. Equal grammars are compiled once.

    Made by one of the class methods, each of which raises TypeError or ValueError for what is no such grammar, too large
    or nested too deeply. What only a compiler finds, such as a rule that is not there, is an error of the request that
    asks for the grammar.
    """

    kind: str
    """What it was made as: "json_schema", "regex", "lark", "gbnf", "choices"."""
    source: str
    """In llguidance's form: JSON with the member "grammars"."""
    schemas: tuple[GivenSchema, ...] = field(default=(), compare=False, repr=False)
    """The JSON schemas in it, in which errors name places."""
    left_out: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What of schemas that are not strict it does not hold, by its place."""

    @classmethod
    def json_schema(
        cls, schema: Any, *, strict: bool = True, whitespace: str = "flexible", limits: GrammarLimits = DEFAULT_LIMITS
    ) -> Grammar:
        """JSON texts of a schema: a dict, its JSON text, True, or a pydantic model.

        `strict`: keywords that cannot be enforced are errors that name their place; False passes over them, and
        `left_out` or `CompiledGrammar.warnings` names them.
        `whitespace`: "flexible" lets nothing, one blank, or one or two line ends and up to 20 blanks stand between parts.
        "compact" is none, "spaced" one blank after each colon and comma. A regular expression of blanks says what may
        stand at one place in their stead.
        """
        options = whitespace_options(whitespace)
        given = read_schema(schema)
        prepared, left_out = prepare_schema(given, limits), ()
        if not strict:
            options |= {"lenient": True, "coerce_one_of": True}
            prepared, left_out = relaxed(prepared)
        source = _source(json_schema=prepared | {"x-guidance": options})
        return cls("json_schema", source, (GivenSchema(given, source),), left_out)

    @classmethod
    def json(cls, whitespace: str = "flexible") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """Texts that a regular expression matches as a whole, in the syntax of Rust's regex: no look-around, no
        back-references."""
        _check_string(pattern, "regex")
        limits.check_text(pattern, "regex")
        pattern = pattern.replace("\n", "\\n")  # a rule of Lark is a line
        return cls("regex", _source(lark_grammar=f"start: /{_escape_slashes(pattern)}/"))

    @classmethod
    def lark(cls, text: str, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark, whose first rule is `start`."""
        _check_string(text, "grammar")
        limits.check_text(text, "grammar")
        return cls("lark", _source(lark_grammar=text))

    @classmethod
    def gbnf(cls, text: str, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """A context-free grammar as llama.cpp has it, whose first rule is `root`. Needs `pace-llm[grammar]`."""
        _check_string(text, "grammar")
        limits.check_text(text, "grammar")
        from pace.grammar.backend import gbnf_to_lark

        try:
            return cls("gbnf", _source(lark_grammar=gbnf_to_lark(text)))
        except (Exception, RecursionError) as error:
            raise ValueError(f"this is no GBNF grammar: {str(error)[:500]}") from None

    @classmethod
    def choices(cls, choices: Any, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """One of some strings."""
        if isinstance(choices, str) or not isinstance(choices, (list, tuple)):
            raise TypeError(f"choices must be a list of strings, got {choices!r:.100}")
        for choice in choices:
            _check_string(choice, "each of the choices")
        if not choices or not all(choices):
            raise ValueError("choices must be at least one string, and none of them empty")
        if len(choices) > limits.max_choices:
            raise ValueError(f"there are {len(choices)} choices; at most {limits.max_choices} are taken")
        texts = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices)]
        if (num_bytes := sum(len(text.encode()) for text in texts)) > limits.max_bytes:
            raise ValueError(f"the choices have {num_bytes} bytes; at most {limits.max_bytes} are taken")
        return cls("choices", _source(lark_grammar="start: " + " | ".join(texts)))

    def after(self, text: str) -> Grammar:
        """Texts of this grammar with `text` before them."""
        source = json.loads(self.source)
        first, *others = source["grammars"]
        taken = {part.get("name") for part in others}
        name = first.get("name") or next(name for name in map("after_text{}".format, range(99)) if name not in taken)
        begin = {"lark_grammar": f"start: {json.dumps(text, ensure_ascii=False)} @{name}"}
        parts = [begin, first | {"name": name}, *others]
        return Grammar(
            self.kind, json.dumps(source | {"grammars": parts}, ensure_ascii=False), self.schemas, self.left_out
        )

    @classmethod
    def read(cls, text: str, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """A grammar whose language shows: GBNF has rules with `::=`, Lark with `:`, and JSON with the member "grammars"
        is llguidance's own form."""
        _check_string(text, "grammar")
        if text.lstrip().startswith("{"):
            return cls._of_llguidance(text, limits)
        return (cls.gbnf if "::=" in text else cls.lark)(text, limits=limits)

    @classmethod
    def _of_llguidance(cls, text: str, limits: GrammarLimits) -> Grammar:
        """Its parts are what the other languages are, and are checked like them."""
        try:
            members = json.loads(text)
            parts = members["grammars"]
            if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
                raise ValueError('"grammars" must be a list of objects')
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f'a grammar that begins with "{{" must be JSON with the member "grammars": {error}'
            ) from None
        if len(text.encode("utf-8", "surrogatepass")) > limits.max_bytes:
            raise ValueError(f"the grammar has {len(text.encode())} bytes; at most {limits.max_bytes} are taken")
        for part in parts:
            if isinstance(lark := part.get("lark_grammar"), str):
                limits.check_text(lark, "grammar")
            if isinstance(schema := part.get("json_schema"), dict):
                prepare_schema(schema, limits)
        return cls("llguidance", text)


def _source(**member: Any) -> str:
    return json.dumps({"grammars": [member]}, ensure_ascii=False)


def _check_string(value: Any, what: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, got {value!r:.100}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half a character, a lone surrogate, at {error.start}") from None


def _escape_slashes(pattern: str) -> str:
    """The pattern with a backslash before each slash that has none."""
    escaped, is_escaped = [], False
    for letter in pattern:
        escaped.append("\\/" if letter == "/" and not is_escaped else letter)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(escaped)
