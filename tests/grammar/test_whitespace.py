"""Wherever JSON is requested, models may use their own whitespace, within bounds; a field changes that."""

from __future__ import annotations

import argparse
import json

import pytest

from pace.cli.sampling import add_sampling_arguments, sampling_config
from pace.grammar import Grammar, whitespace
from pace.grammar.backend import repeats_whitespace
from pace.grammar.response_format import read_response_format
from pace.grammar.structural_tag import read_structural_tag
from pace.llm import SamplingConfig
from pace.llm.chat import FORMATS, Tool
from pace.llm.chat.arguments import Rules
from pace.llm.chat.arguments.json_arguments import JsonArguments
from pace.llm.chat.arguments.python_arguments import PythonArguments
from pace.llm.chat.arguments.tagged_arguments import TaggedArguments
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.completions import CompletionsRequest
from pace.server.schemas.messages import MessagesRequest
from pace.server.schemas.responses import ResponsesRequest
from tests.grammar.compiling import takes

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}}},
    "required": ["words"],
    "additionalProperties": False,
}
VALUE = {"words": ["the", "fox"]}
COMPACT, SPACED, INDENTED = (
    json.dumps(VALUE, separators=(",", ":")), json.dumps(VALUE), json.dumps(VALUE, indent=4),
)  # fmt: skip
AIRY = '{ "words" : [ "the" , "fox" ] }'
DEEP = "{\n\n" + " " * 20 + '"words":\t["the","fox"]}'.replace("\t", "\n\t")
WITHIN = (COMPACT, SPACED) if repeats_whitespace() else (COMPACT, SPACED, INDENTED, AIRY, DEEP)
BEYOND = (
    COMPACT.replace(",", ",  "), COMPACT.replace(",", ",\t"), COMPACT.replace(",", ", \n"),
    COMPACT.replace(",", "," + "\n" * 3), COMPACT.replace("{", "{\n" + " " * 21), COMPACT + " ", COMPACT + "\n",
    " " + COMPACT, "\n" + COMPACT,
)  # fmt: skip


def request(kind: type = ChatRequest, **fields) -> Grammar:
    begin = {ChatRequest: {"messages": [{"role": "user", "content": "a"}]}, CompletionsRequest: {"prompt": "a"}}
    begin |= {MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}}
    body = {"model": "m", **begin.get(kind, {"input": "a"}), **fields}
    structure = kind.model_validate(body).to_job(Limits(), SamplingConfig()).structure
    return structure.read(Limits().grammar)


def given_on_the_command_line(tmp_path, *options: str) -> Grammar:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    return sampling_config(parser.parse_args(["--json-schema", str(tmp_path / "schema.json"), *options])).make_grammar()


NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FORMS = {
    "Grammar": lambda: Grammar.json_schema(SCHEMA),
    "lenient": lambda: Grammar.json_schema(SCHEMA, strict=False),
    "any object": Grammar.json,
    "response_format": lambda: read_response_format(NAMED),
    "json_object": lambda: read_response_format({"type": "json_object"}),
    "tag": lambda: read_structural_tag({"format": {"type": "json_schema", "json_schema": SCHEMA}}),
    "config": lambda: SamplingConfig(json_schema=SCHEMA).make_grammar(),
    "config, response_format": lambda: SamplingConfig(response_format=NAMED).make_grammar(),
    "chat": lambda: request(response_format=NAMED),
    "guided_json": lambda: request(guided_json=SCHEMA),
    "structured_outputs": lambda: request(structured_outputs={"json": SCHEMA}),
    "json_object of structured_outputs": lambda: request(structured_outputs={"json_object": True}),
    "llama.cpp": lambda: request(CompletionsRequest, json_schema=SCHEMA),
    "mistral.rs": lambda: request(grammar={"type": "json_schema", "value": SCHEMA}),
    "messages": lambda: request(MessagesRequest, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
    "responses": lambda: request(
        ResponsesRequest, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_json_is_laid_out_as_models_do_within_bounds(form: str) -> None:
    grammar = FORMS[form]()
    for text in WITHIN:
        assert takes(grammar, text), text
    for text in BEYOND:
        assert not takes(grammar, text), text


def test_the_command_line(tmp_path) -> None:
    assert given_on_the_command_line(tmp_path) == Grammar.json_schema(SCHEMA)
    compact = Grammar.json_schema(SCHEMA, whitespace="compact")
    assert given_on_the_command_line(tmp_path, "--json-whitespace", "compact") == compact


@pytest.mark.parametrize("format", [name for name in FORMATS if isinstance(FORMATS[name].arguments, JsonArguments)])
def test_arguments_of_tools(format: str) -> None:
    rules = Rules({})
    rules.add("start", FORMATS[format].arguments.grammar(Tool("note", parameters=SCHEMA), rules, "arguments"))
    grammar = Grammar.lark(rules.text())
    for text in WITHIN:
        assert takes(grammar, text), text
    for text in BEYOND:
        assert not takes(grammar, text), text


def test_a_single_argument_of_a_tool() -> None:
    """Formats that write arguments one by one, `between` tags or as in Python."""
    for arguments, call in (
        (TaggedArguments("<a=", ">", "</a>", between=""), '<a=words>["the", \n  "fox"]</a>'),
        (PythonArguments(), 'words=["the", \n  "fox"]'),
    ):
        rules = Rules({})
        rules.add("start", arguments.grammar(Tool("note", parameters=SCHEMA), rules, "arguments"))
        grammar = Grammar.lark(rules.text())
        assert takes(grammar, call.replace(" \n ", "\n ")) and takes(grammar, call.replace(" \n  ", ""))
        assert not takes(grammar, call)


COMPACT_FORMS = {
    "Grammar": lambda: Grammar.json_schema(SCHEMA, whitespace="compact"),
    "empty": lambda: Grammar.json_schema(SCHEMA, whitespace=""),
    "any object": lambda: Grammar.json("compact"),
    "config": lambda: SamplingConfig(json_schema=SCHEMA, json_whitespace="compact").make_grammar(),
    "vLLM's name": lambda: SamplingConfig(response_format=NAMED, whitespace_pattern="").make_grammar(),
    "structured_outputs": lambda: request(structured_outputs={"json": SCHEMA, "whitespace_pattern": ""}),
    "json_object": lambda: request(structured_outputs={"json_object": True, "whitespace_pattern": ""}),
    "beside response_format": lambda: request(response_format=NAMED, structured_outputs={"whitespace_pattern": ""}),
    "disable_any_whitespace": lambda: request(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}),
    "guided_json": lambda: request(guided_json=SCHEMA, guided_whitespace_pattern=""),
    "guided, response_format": lambda: request(response_format=NAMED, guided_whitespace_pattern=""),
    "llama.cpp": lambda: request(CompletionsRequest, json_schema=SCHEMA, guided_whitespace_pattern=""),
    "mistral.rs": lambda: request(grammar={"type": "json_schema", "value": SCHEMA}, guided_whitespace_pattern=""),
    "tag": lambda: request(
        structured_outputs={
            "structural_tag": {"format": {"type": "json_schema", "json_schema": SCHEMA}},
            "whitespace_pattern": "",
        }
    ),
}


@pytest.mark.parametrize("form", COMPACT_FORMS)
def test_compact_where_a_field_says_so(form: str) -> None:
    grammar = COMPACT_FORMS[form]()
    assert takes(grammar, COMPACT)
    assert not any(takes(grammar, text) for text in (SPACED, INDENTED, AIRY, COMPACT + " "))


def test_an_llguidance_that_repeats_whitespace_has_it_at_commas_and_colons(monkeypatch) -> None:
    monkeypatch.setattr(whitespace, "repeats_whitespace", lambda: True)
    for grammar in (Grammar.json_schema(SCHEMA), Grammar.json_schema(SCHEMA, whitespace=r"\n{1,2} {0,20}| ")):
        for text in (COMPACT, SPACED, COMPACT.replace(",", ",\n  "), COMPACT.replace(":", "\n:\n\n")):
            assert takes(grammar, text), text
        assert not any(takes(grammar, text) for text in (*BEYOND, AIRY, INDENTED))


@pytest.mark.skipif(repeats_whitespace(), reason="llguidance takes patterns of whitespace once from 1.8 on")
@pytest.mark.parametrize(
    ("pattern", "within", "beyond"),
    [("[ ]?", (COMPACT, SPACED, AIRY), (INDENTED, COMPACT.replace(",", ",  "))),
     (r"[\n\t ]*", (COMPACT, SPACED, INDENTED, COMPACT.replace(",", "," + "\n" * 50)), (COMPACT + " ",)),
     (r"\s{0,3}", (COMPACT, COMPACT.replace(",", ",\r\n\t")), (INDENTED, COMPACT.replace(",", ",\f"))),
     (r"(?: |\x0A)+", (SPACED, COMPACT.replace(",", ", \n ")), (COMPACT.replace(",", ",\t"),))],
)  # fmt: skip
def test_a_pattern_says_what_may_stand_at_a_place(pattern: str, within, beyond) -> None:
    for grammar in (
        Grammar.json_schema(SCHEMA, whitespace=pattern),
        request(guided_json=SCHEMA, guided_whitespace_pattern=pattern),
    ):
        assert all(takes(grammar, text) for text in within)
        assert not any(takes(grammar, text) for text in beyond)


@pytest.mark.parametrize("pattern", ["lots", ".*", "[^a]", "( ", "a?", r"\S", r"\w", "[ -~]", " " * 201, '"', ","])
def test_what_is_no_whitespace(pattern: str) -> None:
    with pytest.raises(ValueError, match="flexible, compact, spaced, or a regular expression"):
        Grammar.json_schema(SCHEMA, whitespace=pattern)
    with pytest.raises(ValueError, match="flexible, compact, spaced"):
        SamplingConfig(json_schema=SCHEMA, json_whitespace=pattern)
    for fields in (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": pattern},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": pattern}},
    ):
        with pytest.raises(ApiError) as caught:
            request(**fields)
        assert caught.value.param in ("guided_whitespace_pattern", "structured_outputs.whitespace_pattern")


@pytest.mark.parametrize(
    "fields",
    [{"guided_whitespace_pattern": ""}, {"guided_regex": "a", "guided_whitespace_pattern": ""},
     {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
     {"response_format": {"type": "text"}, "structured_outputs": {"disable_any_whitespace": True}},
     {"guided_json": SCHEMA, "guided_whitespace_pattern": "", "structured_outputs": {"whitespace_pattern": " "}},
     {"guided_json": SCHEMA, "guided_whitespace_pattern": 5}],
)  # fmt: skip
def test_whitespace_of_nothing_or_said_twice_is_refused(fields) -> None:
    with pytest.raises(ApiError) as caught:
        request(**fields)
    assert "whitespace" in caught.value.param
