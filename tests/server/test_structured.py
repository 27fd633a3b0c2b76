"""Structured output in every API: valid by construction, and the same text with or without streaming."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from tests.server.serving import QUESTION

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
NAMED = {"name": "city", "schema": SCHEMA, "strict": True}
GBNF = 'root ::= "- " [a-z]{3} "."'
TAG = {"structures": [{"begin": "<c>", "schema": SCHEMA, "end": "</c>"}], "triggers": ["<c"]}


def is_city(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def matches(pattern: str):
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


FORMS = {
    "response_format": [
        ({"type": "json_schema", "json_schema": NAMED}, is_city),
        ({"type": "json_schema", "schema": SCHEMA}, is_city),
        ({"type": "json_object", "schema": SCHEMA}, is_city),
        ({"type": "structural_tag", **TAG}, matches(".*")),
        ({"type": "structural_tag", "format": {"type": "const_string", "value": "so it is"}}, matches("so it is")),
    ],
    "structured_outputs": [
        ({"json": SCHEMA}, is_city),
        ({"json": json.dumps(SCHEMA)}, is_city),
        ({"regex": "[ab]{4}"}, matches("[ab]{4}")),
        ({"choice": ["yes", "no"]}, matches("yes|no")),
        ({"grammar": GBNF}, matches(r"- [a-z]{3}\.")),
        ({"grammar": 'start: "x" /[0-9]/'}, matches("x[0-9]")),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: /[xy]{3}/"}]}'}, matches("[xy]{3}")),
        ({"structural_tag": json.dumps({"type": "structural_tag", **TAG})}, matches(".*")),
    ],
    "guided_json": [(SCHEMA, is_city), (json.dumps(SCHEMA), is_city)],
    "guided_regex": [("[ab]{4}", matches("[ab]{4}"))],
    "guided_choice": [(["yes", "no"], matches("yes|no"))],
    "guided_grammar": [(GBNF, matches(r"- [a-z]{3}\."))],
    "grammar": [
        (GBNF, matches(r"- [a-z]{3}\.")),
        ({"type": "regex", "value": "[ab]{4}"}, matches("[ab]{4}")),
        ({"type": "json_schema", "value": SCHEMA}, is_city),
        ({"type": "lark", "value": "start: /[ab]{4}/"}, matches("[ab]{4}")),
        ({"type": "llguidance", "value": {"grammars": [{"lark_grammar": "start: /[ab]{4}/"}]}}, matches("[ab]{4}")),
    ],
    "json_schema": [(SCHEMA, is_city)],
    "regex": [("[ab]{4}", matches("[ab]{4}"))],
    "ebnf": [
        (GBNF, matches(r"- [a-z]{3}\.")),
        ('root ::= item+ # two\nitem ::= "x" | ("y" [0-9]{2})', matches("(x|y[0-9]{2})+")),
    ],
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form(serving, name):
    for value, holds in FORMS[name]:
        reply = serving.chat(**{name: value}, max_tokens=60)
        assert reply.status == 200, (value, reply.body)
        choice = reply.json["choices"][0]
        text = choice["message"]["content"]
        assert choice["finish_reason"] in ("stop", "length") and holds(text), (value, text)
        streamed = serving.chat(**{name: value}, max_tokens=60, stream=True)
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed.events[:-1]) == text
        completed = serving.complete("A city: ", **{name: value}, max_tokens=60).json["choices"][0]["text"]
        assert holds(completed)
    serving.check_well()


def test_any_object(serving):
    reply = serving.chat(response_format={"type": "json_object"}, max_tokens=20).json["choices"][0]
    assert reply["message"]["content"].startswith("{")


def test_what_is_cut_off_ends_with_length(serving):
    choice = serving.chat(response_format={"type": "json_schema", "json_schema": NAMED}, max_tokens=3).json["choices"][
        0
    ]
    assert choice["finish_reason"] == "length"


def test_plain_text_is_no_constraint(serving):
    plain = serving.chat(max_tokens=12).json["choices"][0]["message"]["content"]
    for fields in ({"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}):
        assert serving.chat(**fields, max_tokens=12).json["choices"][0]["message"]["content"] == plain
    reply = serving.chat(response_format={"type": "text"}, guided_choice=["yes", "no"])
    assert reply.json["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_constraint_may_be_named_twice(serving):
    """guidance sends both vLLM's old field and its new one."""
    reply = serving.chat(guided_grammar=GBNF, structured_outputs={"grammar": GBNF}, max_tokens=20)
    assert reply.status == 200, reply.body
    assert re.fullmatch(r"- [a-z]{3}\.", reply.json["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("old", "new"),
    [({"guided_grammar": GBNF}, {"grammar": 'root ::= "x"'}), ({"guided_regex": "[ab]{4}"}, {"grammar": "[ab]{4}"}),
     ({"guided_json": {"const": 1}}, {"json": {"const": True}})],
)  # fmt: skip
def test_two_constraints_are_refused(serving, old, new):
    reply = serving.chat(**old, structured_outputs=new)
    assert reply.status == 400 and reply.error["param"].startswith("structured_outputs."), reply.body


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "count"}}])
@pytest.mark.parametrize("name", ["response_format", "guided_regex"])
def test_calls_follow_their_tools_and_text_its_form(serving, choice, name):
    count = {"name": "count", "parameters": {"type": "object", "properties": {"to": {"enum": [3]}}, "required": ["to"]}}
    form, holds = FORMS[name][0]
    fields = {name: form, "tools": [{"type": "function", "function": count}], "tool_choice": choice}
    reply = serving.chat(**fields, parallel_tool_calls=False, max_tokens=60)
    assert reply.status == 200, reply.body
    message = reply.json["choices"][0]["message"]
    if calls := message.get("tool_calls"):
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
            ("count", {"to": 3})
        ]
        assert message["content"] is None
    else:
        assert choice == "auto" and holds(message["content"])


def test_samples_and_logprobs(serving):
    reply = serving.chat(
        response_format={"type": "json_schema", "json_schema": NAMED}, n=4, temperature=1.5, seed=3, logprobs=True
    )
    for choice in reply.json["choices"]:
        assert is_city(choice["message"]["content"])
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]


def test_a_keyword_that_is_passed_over_is_told(serving):
    odd = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": odd}}
    reply = serving.chat(response_format=form, max_tokens=30)
    assert reply.status == 200 and "uniqueItems" in reply.headers["x-pace-warnings"]
    form["json_schema"]["strict"] = True
    refused = serving.chat(response_format=form, max_tokens=30)
    assert refused.status == 400 and refused.error["param"] == "response_format"
    assert "#/uniqueItems" in refused.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks(serving, stream):
    openai, anthropic, pydantic = map(pytest.importorskip, ("openai", "anthropic", "pydantic"))

    class City(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        size: int

    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=City, max_tokens=40, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed.size, int)
    form = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(
        model="tiny", input="A city.", text={"format": form}, max_output_tokens=60, temperature=0, stream=stream
    )
    answer = list(answer)[-1].response if stream else answer
    assert is_city(answer.output_text) and answer.text.format.type == "json_schema"
    claude = anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0)
    message = claude.messages.create(
        model="tiny",
        messages=QUESTION,
        max_tokens=60,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert is_city(message.content[0].text)
