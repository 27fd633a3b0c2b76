"""`Grammar`: a validated constraint on a text, independent of any model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pace.grammar.backend import gbnf_to_lark, problem_of
from pace.grammar.json_schema import prepare_schema, read_schema
from pace.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from pace.grammar.support import explain, relaxed
from pace.grammar.whitespace import whitespace_options


@dataclass(frozen=True)
class GivenSchema:
    """A JSON schema from a caller, and its name in error messages."""

    schema: Mapping[str, Any]
    source: str
    """A grammar of this schema only, in llguidance's form."""
    title: str = "this JSON schema"
    place: str | None = None
    """Field of the request that holds the schema, such as `tools[3]`; None if the caller knows it."""


class GrammarError(ValueError):
    """Raised if a grammar cannot be used. `place` is the field of the request that is wrong, if known."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Grammar:
    """A constraint on a text. Equal grammars are compiled once.

    Use one of the class methods. Each raises TypeError or ValueError for an invalid grammar, one that is too large, or
    one nested too deeply. Errors that only the compiler finds, such as an undefined rule, fail the request that uses
    the grammar.
    """

    kind: str
    """Origin: "json_schema", "regex", "lark", "gbnf", "choices", "llguidance", or "turn" (`pace/llm/chat/turn.py`)."""
    source: str
    """The grammar in llguidance's form: JSON with the member "grammars"."""
    schemas: tuple[GivenSchema, ...] = field(default=(), compare=False, repr=False)
    """The JSON schemas in the grammar; errors name places in them."""
    left_out: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Keywords of non-strict schemas that the grammar does not enforce, each with its place."""

    @classmethod
    def json_schema(
        cls, schema: Any, *, strict: bool = True, whitespace: str = "flexible", limits: GrammarLimits = DEFAULT_LIMITS
    ) -> Grammar:
        """JSON texts of a schema: a dict, its JSON text, True, or a pydantic model.

        `strict`: raise an error with the place of each keyword that cannot be enforced. False ignores such keywords,
        and lists them in `left_out` or `CompiledGrammar.warnings`.
        `whitespace`: "compact" allows none, "spaced" one space after each colon and comma. "flexible" allows nothing,
        one space, or one or two newlines and up to 20 blanks between parts. A regular expression of blanks replaces
        what "flexible" allows in each place.
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
        """Texts that a regular expression matches as a whole. The syntax is that of Rust's regex: no look-around and no
        back-references."""
        _check_string(pattern, "regex")
        limits.check_text(pattern, "regex")
        pattern = pattern.replace("\n", "\\n")  # a rule of Lark is one line
        return cls("regex", _source(lark_grammar=f"start: /{_escape_slashes(pattern)}/"))

    @classmethod
    def lark(cls, text: str, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """Texts of a context-free grammar in llguidance's variant of Lark; the start rule is `start`."""
        _check_string(text, "grammar")
        limits.check_text(text, "grammar")
        return cls("lark", _source(lark_grammar=text))

    @classmethod
    def gbnf(cls, text: str, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """Texts of a context-free grammar in llama.cpp's GBNF; the start rule is `root`. Needs `pace-llm[grammar]`."""
        _check_string(text, "grammar")
        limits.check_text(text, "grammar")
        try:
            return cls("gbnf", _source(lark_grammar=gbnf_to_lark(text)))
        except ModuleNotFoundError:
            raise
        except (Exception, RecursionError) as error:
            raise ValueError(f"this is not a GBNF grammar: {str(error)[:500]}") from None

    @classmethod
    def choices(cls, choices: Any, *, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
        """Texts that equal one of some strings."""
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

    def check(self) -> None:
        """Raises GrammarError for an error that llguidance finds without a vocabulary, such as an undefined rule.
        Raises ModuleNotFoundError if llguidance is missing."""
        if error := problem_of(self.source):
            raise self.refusal(error, problem_of)

    def refusal(self, error: str, find_error: Callable[[str], str]) -> GrammarError:
        """Returns the error about a grammar that llguidance refuses; it names the faulty schema, if one is at fault.
        `find_error` returns llguidance's error about a source, or "" if there is none."""
        for given in self.schemas:
            own = error if given.source == self.source else find_error(given.source)
            if own:
                return GrammarError(f"{given.title} cannot be used: {explain(own, given.schema)}", given.place)
        what = {"json_schema": "JSON schema", "regex": "regex", "choices": "list of choices"}.get(self.kind, "grammar")
        first, *more = error.splitlines()
        reason = next((line for line in more if line.startswith("error: ")), first).removeprefix("error: ")
        return GrammarError(f"this {what} cannot be used: {reason}")

    def after(self, text: str) -> Grammar:
        """Returns the grammar of `text` followed by a text of this grammar."""
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
        """Detects the language of a grammar: `::=` means GBNF, JSON with the member "grammars" is llguidance's own
        form, and everything else is Lark."""
        _check_string(text, "grammar")
        if text.lstrip().startswith("{"):
            return cls._of_llguidance(text, limits)
        return (cls.gbnf if "::=" in text else cls.lark)(text, limits=limits)

    @classmethod
    def _of_llguidance(cls, text: str, limits: GrammarLimits) -> Grammar:
        """Checks each part of a grammar in llguidance's form like a grammar in its own language."""
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
    """Puts a backslash before each slash that has none."""
    escaped, is_escaped = [], False
    for letter in pattern:
        escaped.append("\\/" if letter == "/" and not is_escaped else letter)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(escaped)
