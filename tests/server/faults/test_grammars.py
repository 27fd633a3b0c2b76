"""Hostile grammars: clear errors in bounded time, no unconstrained answers, other requests undisturbed."""

from __future__ import annotations

import json
import threading

import jsonschema
import pytest

from pace.llm.constraints import grammars
from tests.server.serving import QUESTION, Serving, make_generator
from tests.server.test_structured import SCHEMA, is_city
from tests.waiting import cpu_limit

pytestmark = pytest.mark.alone  # refusals have a time limit


def refused(serving: Serving, seconds: float = 1.0, **fields) -> str:
    """Error message of a request that must be refused within `seconds` of processor time."""
    with cpu_limit(seconds, fields):
        reply = serving.chat(max_tokens=20, **fields)
    assert reply.status == 400, (fields, reply.body[:300])
    assert reply.error["param"].split(".")[0] in fields and reply.error["type"] == "invalid_request_error"
    assert len(reply.error["message"]) < 1500
    return reply.error["message"]


@pytest.mark.parametrize(
    "pattern", ["(?<=a)b", "(?!a)b", r"(a)\1", "(" * 10**5, "[" * 10**5, "a" * 300_000, "(", "\x00("]
)
def test_regular_expressions(serving, pattern):
    refused(serving, guided_regex=pattern)
    serving.check_well()


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "a{1000000}", "(a|a)*b", "((a{1,1000}){1,1000}){1,1000}", "(.*){1,32000}[bc]"]
)
def test_regular_expressions_that_explode_elsewhere(serving, pattern):
    """They are served, without backtracking, or refused; both within the time limit."""
    with cpu_limit(5, pattern):
        assert serving.chat(guided_regex=pattern, max_tokens=8).status in (200, 400, 500)
    serving.check_well()


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"foo": "bar"}, "not a keyword"),
        ({"type": "nonsense"}, "nonsense"),
        ({"type": 5}, None),
        (5, "JSON schema"),
        ([], "JSON schema"),
        ("{", "not valid JSON"),
        (False, "allows nothing"),
        ({"$ref": "#"}, "cannot be used"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "cannot be used"),
        ({"$ref": "http://169.254.169.254/latest"}, "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
        (nested(60), None),
        (nested(61), None),
        ({"enum": [f"value {index}" for index in range(10**5)]}, "bytes"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"description": "x" * 2_000_000, "type": "object"}, "bytes"),
        ({"properties": {f"p{index}": {} for index in range(5000)}}, "schemas"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "cannot be used"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "cannot be used"),
    ],
)  # fmt: skip
def test_schemas(serving, schema, message):
    if message is None:  # refused or served
        assert serving.chat(guided_json=schema, max_tokens=8).status in (200, 400)
    else:
        assert message in refused(serving, 2.0, guided_json=schema)
    serving.check_well()


@pytest.mark.parametrize(
    "grammar",
    ["root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "start: " + "(" * 60_000 + '"a"' + ")" * 60_000,
     'start: start "a"', "root ::= nobody", 'start: ""', "root ::= ", "", 5, {"type": "jinja", "value": "x"},
     '{"grammars": 5}'],
)  # fmt: skip
def test_grammars(serving, grammar):
    refused(serving, grammar=grammar)
    serving.check_well()


def test_a_grammar_that_gets_too_complex_fails_alone(serving, monkeypatch):
    """Its stream ends with an error, and a request at the same time gets its exact text."""
    monkeypatch.setitem(grammars._WORK, "step_lexer_fuel", 300)
    pattern = r"(.|\n)*a(.|\n){60}b(.|\n)*"
    others: list[bool] = []
    thread = threading.Thread(target=lambda: others.append(serving.check_well() is None))
    thread.start()
    reply = serving.chat(guided_regex=pattern, max_tokens=200, temperature=1.5, seed=1, stream=True, ignore_eos=True)
    thread.join()
    assert others == [True]
    failed = reply.events[-2] if reply.status == 200 else reply.json
    assert failed["error"]["code"] == "grammar_too_complex" and failed["error"]["type"] == "server_error"
    assert serving.chat(guided_regex=pattern, max_tokens=200, temperature=1.5, seed=1, ignore_eos=True).status == 500
    serving.check_well()


def test_a_grammar_that_no_token_fits(serving):
    """The request bans every token that the grammar requires."""
    tokenizer = serving.generator.tokenizer
    bans = {str(token): -100 for token in range(len(tokenizer)) if "q" in tokenizer.decode([token])}
    reply = serving.chat(guided_choice=["qqq"], logit_bias=bans, max_tokens=8)
    assert reply.status == 400 and "no token is left to pick" in reply.error["message"]
    serving.check_well()


def test_many_schemas_at_once_and_one_many_times(serving):
    schemas = [
        {"type": "object", "properties": {f"key{index}": {"type": "boolean"}}, "required": [f"key{index}"],
         "additionalProperties": False}
        for index in range(64)
    ]  # fmt: skip
    answers: list[tuple[dict, str]] = []

    def ask(schema: dict) -> None:
        reply = serving.chat(guided_json=schema, max_tokens=30)
        answers.append((schema, reply.json["choices"][0]["message"]["content"]))

    threads = [threading.Thread(target=ask, args=(schema,)) for schema in schemas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 64
    for schema, text in answers:
        jsonschema.validate(json.loads(text), schema)
    compiled = dict(serving.generator.constraints.grammars._compiled)
    for _ in range(30):
        assert is_city(serving.chat(guided_json=SCHEMA, max_tokens=60).json["choices"][0]["message"]["content"])
    assert len(serving.generator.constraints.grammars._compiled) <= len(compiled) + 1
    serving.check_well()


def test_what_is_kept_has_a_bound():
    generator = make_generator(kv_cache_bytes="16MiB")
    with Serving(generator, grammar_cache_bytes=4 * 2**16) as serving:
        for index in range(12):
            assert serving.chat(guided_choice=[f"number {index}"], max_tokens=8).status == 200
        assert len(generator.constraints.grammars._compiled) <= 4
        serving.check_well()
    generator.driver.close()


def test_errors_show_nothing_of_others(serving):
    """Errors contain no parser state, no tokens, and no other client's grammar."""
    secret = 'root ::= "the secret of another client"'
    assert serving.chat(guided_grammar=secret, max_tokens=20).status == 200
    for fields in ({"guided_regex": "(?<=a)b"}, {"guided_grammar": "root ::= nobody"}, {"guided_json": {"not": {}}}):
        message = refused(serving, **fields)
        assert "secret" not in message and "<state>" not in message and "Tokens:" not in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
     ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar"),
     ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
     ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": 5}, "structured_outputs"),
     ({"structured_outputs": {"json": {}, "whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern"),
     ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
     ({"guided_choice": ["a"], "allowed_token_ids": [5]}, "guided_choice"),
     ({"response_format": {"type": "yaml"}}, "response_format"),
     ({"response_format": 5}, "response_format")],
)  # fmt: skip
def test_two_at_once_and_options_that_are_not_there(serving, fields, param):
    reply = serving.ask("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 8, **fields})
    assert reply.status == 400 and reply.error["param"] == param, reply.body
    serving.check_well()
