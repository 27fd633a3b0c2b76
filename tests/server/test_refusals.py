"""Refused requests: each gets status 400 and the field's name, before anything is generated."""

from __future__ import annotations

import gzip
import json
import re
import resource
import time

import pytest

from pace.server.body import LARGE, read_json
from tests.server.serving import ANSWER, QUESTION, Serving, read_reply, request_bytes
from tests.waiting import cpu_limit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def refuse(serving, path, body, status=400):
    reply = serving.ask(path, body)
    assert reply.status == status, (reply.status, reply.body[:300])
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.error) >= {"message", "type", "param", "code"} and reply.error["message"]
    return reply.error


FIELDS = {
    "n": [0, -1, 10**9, 1.5, "2", True],
    "max_tokens": [-1, 0, 2**63, 1.5, "5", True],
    "max_completion_tokens": [-1, 0, 2**63, "5"],
    "temperature": [-1, "1", True, -1e30],
    "top_p": [-0.1, 1.1, "1"],
    "top_k": [-2, 1.5, 2**63],
    "min_p": [-0.1, 1.5],
    "typical_p": [0, 2],
    "repetition_penalty": [0, -1],
    "frequency_penalty": [2.5, -2.5],
    "presence_penalty": [3],
    "seed": [2**64, -(2**63) - 1, 1.0, "1"],
    "top_logprobs": [2],
    "stop": [5, [""], "", ["x"] * 65, "x" * 257, [1]],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, 1],
    "logit_bias": [{"x": 1}, {"5": 1e308}, {"5": "1"}, {"99999": 1}, {"05": 1, "5": -1},
    {str(i): 1 for i in range(1025)}, [1]],
    "stop_token_ids": [[-1], [99999], ["1"], 5],
    "allowed_token_ids": [[], [-1], [99999]],
    "bad_words": [[""], 5],
    "min_tokens": [-1, 10**6],
    "truncate_prompt_tokens": [0, -1],
    "cache_salt": ["", "x" * 129, 5],
    "priority": [10**10, "high", 1.5, 101, 1],
    "prompt_logprobs": [21, -1],
    "best_of": [0, 129],
    "messages": [None, [], 5, [123], [{}], [{"role": 123, "content": "x"}], [{"role": "user", "content": 123}],
                 [{"role": "wizard", "content": "x"}], [{"role": "user"}], QUESTION * 4097],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"messages": 1}, {"tokenize": True}, {"a": [1]}, {str(i): i for i in range(17)}],
    "response_format": [{"type": "yaml"}, {"type": "json_schema", "json_schema": {}}, 5],
    "tools": [[{"type": "function", "function": {"name": "f g"}}], [5], 5, [{"type": "function", "function": {}}]],
    "functions": [[{"name": "f"}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "modalities": [["text", "audio"]],
    "store": [True],
    "service_tier": ["priority"],
    "continue_final_message": [True],
    "structured_outputs": [{"regex": "("}, {}, 5],
    "guided_json": [{"type": "nonsense"}, 5],
    "model": ["x" * 1000, 5],
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_chat(serving, name):
    for value in FIELDS[name]:
        error = refuse(serving, CHAT, {"messages": QUESTION, "max_tokens": 8, name: value})
        assert error["param"] is not None and name in f"{error['param']} {error['message']}", (value, error)


@pytest.mark.parametrize(
    "prompt",
    [[], "", [[]], [-1], [99999], [1.5], [2**64], ["a", 1], [[1], "a"], None, 5, [True], {"a": 1}, [[99999]], [""]],
    ids=repr,
)
def test_a_prompt(serving, prompt):
    body = {"prompt": prompt, "add_special_tokens": False}
    assert "prompt" in refuse(serving, COMPLETIONS, body)["message"]


def test_more_texts_than_anybody_needs(serving):
    refuse(serving, COMPLETIONS, {"prompt": ["a"] * 1025})
    refuse(serving, COMPLETIONS, {"prompt": ["a"] * 1000, "n": 2})


def test_prompts_that_are_too_long_are_known_as_such(serving):
    """The message has the words that LiteLLM, Claude Code and others look for, in every API."""
    most = serving.service.max_length
    for text in ("a " * 2000, "a" * 3_000_000):
        messages = [{"role": "user", "content": text}]
        for path, body in ((CHAT, {"messages": messages}), (COMPLETIONS, {"prompt": text}),
                           ("/v1/responses", {"input": text}), ("/v1/messages", {"messages": messages,
                            "max_tokens": 5}),
                           ("/tokenize", {"prompt": text}), ("/v1/messages/count_tokens",
                            {"messages": messages})):  # fmt: skip
            reply = serving.ask(path, {"model": "tiny", **body})
            if reply.status == 200:  # nothing is generated, so the only limit is in bytes
                assert len(text) < 10_000 and path in ("/tokenize", "/v1/messages/count_tokens")
                continue
            message = reply.error["message"].lower()
            assert reply.status == 400 and f"this model's maximum context length is {most} tokens" in message
            numbers = re.search(
                r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message
            )  # Claude Code's pattern
            if len(text) < 10_000:
                assert numbers and int(numbers[1]) > most > int(numbers[2])
            else:
                assert "prompt is too long" in message and not numbers


SGLANG = {"stop_regex": "a+", "lora_path": "x", "custom_logit_processor": "x", "no_stop_trim": True}


@pytest.mark.parametrize("name", SGLANG)
def test_fields_of_sglang_that_would_change_the_text(serving, name):
    for path, body in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "a"})):
        assert refuse(serving, path, body | {name: SGLANG[name]})["param"] == name


def test_prompts_that_are_too_long(serving):
    most = serving.service.max_length
    for tokens in ([5] * most, [5] * (most + 1)):
        error = refuse(serving, COMPLETIONS, {"prompt": tokens, "stream": True})
        assert error["code"] == "context_length_exceeded" and error["n_ctx"] == most
    error = refuse(serving, CHAT, {"messages": [{"role": "user", "content": "a " * 2000}]})
    assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > most
    error = refuse(serving, CHAT, {"messages": [{"role": "user", "content": "a" * 3_000_000}]})
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [b"[]", b'"x"', b"null", b"", b"{", b'{"messages": NaN}', b'{"a": 1e999}', b'{"a": 1, "a": 2}',
     b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe", b'{"a": "\\ud800"}',
     b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
     b'{"x": ' + b"[" * 200 + b"]" * 200 + b"}", b'{"a": [' + b"1," * LARGE + b"9" * 5000 + b"]}",
     b'{"a": [' + b"1," * LARGE + b"]}"],
    ids=lambda body: repr(body[:16]),
)  # fmt: skip
def test_a_body_that_is_no_json_object(serving, body):
    refuse(serving, CHAT, body)


def test_a_large_body_has_the_values_of_a_small_one():
    body = b"[" + b"7, -12, 0.5, 98765432109876543210," * LARGE + b"-0]"
    value = read_json(body, 3)
    assert value == json.loads(body) and {type(number) for number in value} == {int, float}


MANY = b"[" + b"1," * 1_000_000 + b"1]"
PAIRS = b",".join(b'"%d":""' % number for number in range(200_000))


@pytest.mark.alone
@pytest.mark.parametrize(
    "path, body",
    [(CHAT, b'{"messages": [], "stop": %b}' % MANY), ("/v1/responses", b'{"input": %b}' % MANY),
     ("/v1/responses", b'{"input": %b}' % MANY.replace(b"1", b"{}")), ("/detokenize",
      b'{"tokens": %b}' % MANY.replace(b"1", b"[]")),
     ("/v1/messages", b'{"max_tokens": 1, "messages": %b}' % MANY)],
    ids=["stop", "input", "items", "tokens", "turns"],
)  # fmt: skip
def test_a_million_entries_are_not_looked_at_one_by_one(serving, path, body):
    begun = time.process_time()
    json.loads(body)
    parsing = time.process_time() - begun
    with cpu_limit(1.0 + 8 * parsing, "reporting errors for all entries would take 30 times as long as parsing"):
        assert serving.ask(path, body).status == 400


def test_an_object_of_too_many_members_is_not_looked_at(serving):
    for path, name, more in ((CHAT, "logit_bias", '"messages": []'), ("/v1/responses", "metadata", '"input": "a"')):
        error = refuse(serving, path, b'{%b, "%b": {%b}}' % (more.encode(), name.encode(), PAIRS))
        assert error["param"] == name and "entries, has 200000" in error["message"]


def test_a_prompt_that_is_too_long_is_named_as_the_client_names_it(serving):
    most = serving.service.max_length
    assert refuse(serving, CHAT, {"messages": [{"role": "user", "content": "a " * 2000}]})["param"] == "messages"
    assert refuse(serving, CHAT, {"messages": QUESTION * most})["param"] == "messages"
    assert refuse(serving, "/v1/responses", {"input": "a " * 2000})["param"] == "input"
    assert refuse(serving, "/v1/responses/input_tokens", {"input": "a" * 3_000_000})["param"] == "input"


@pytest.mark.parametrize(
    "name", ["self", "conversations", "tokenizer_kwargs", "return_assistant_tokens_mask", "_compiled"]
)
def test_names_of_the_template_that_are_not_a_clients(serving, name):
    error = refuse(serving, CHAT, {"messages": QUESTION, "chat_template_kwargs": {name: True}})
    assert error["param"] == f"chat_template_kwargs.{name}"


def test_a_path_with_a_slash_at_its_end_is_not_redirected(serving):
    for reply in (serving.ask(CHAT + "/", {"messages": QUESTION}), serving.ask("/health/")):
        assert reply.status == 404 and reply.error["message"]


def test_bodies_of_other_kinds(serving):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert serving.ask(CHAT, b"{}", Content_Type=kind).status == 415
    assert serving.ask(CHAT, b'{"messages": "' + b"a" * (5 << 20) + b'"}').status == 413


def test_bodies_that_are_packed(serving):
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 30}
    data = json.dumps(body).encode()
    packed = gzip.compress(data)
    for content, encoding in ((packed, "gzip"), (packed, "GZIP"), (packed, "x-gzip"), (data, "identity"), (data, ""),
                              (gzip.compress(data[:20]) + gzip.compress(data[20:]), "gzip"), (packed, "identity, gzip"),
                              (gzip.compress(data, 0), " gzip ")):  # fmt: skip
        reply = serving.ask(CHAT, content, Content_Encoding=encoding)
        assert reply.status == 200 and reply.json["choices"][0]["message"]["content"] == ANSWER, encoding
    for encoding in ("br", "deflate", "zstd", "compress", "gzip, gzip", "gzip, br", "none", "utf-8", "*", "gzip;q=1"):
        for content in (data, packed, b""):
            reply = serving.ask(CHAT, content, Content_Encoding=encoding)
            assert reply.status == 415 and reply.headers["accept-encoding"] == "gzip", encoding
            assert encoding.partition(",")[0] in reply.error["message"]
    twice = request_bytes(CHAT, data, Content_Encoding="gzip").replace(b"gzip\r\n", b"gzip\r\nContent-Encoding: br\r\n")
    with serving.connect() as connection:
        connection.sendall(twice)
        assert read_reply(connection).status == 415


@pytest.mark.alone
def test_packed_bodies_that_are_none(serving):
    packed = gzip.compress(json.dumps({"messages": QUESTION}).encode())
    for content in (
        b"",
        b"{}",
        packed[:-1],
        packed[:12],
        packed + b"x",
        packed + packed[:5],
        packed[:20] + b"?" + packed[21:],
        gzip.compress(b"") * 17 + packed,
        gzip.compress(b"") * 100_000,
    ):
        with cpu_limit(2, content[:100]):
            reply = serving.ask(CHAT, content, Content_Encoding="gzip")
        assert reply.status == 400 and "gzip" in reply.error["message"], content[:100]
    error = serving.ask("/v1/messages", packed[:-1], Content_Encoding="gzip").json
    assert error["type"] == "error"


def test_packed_bodies_are_bounded_by_what_is_in_them():
    with Serving(body_bytes=10_000) as serving:

        def padded(size: int) -> bytes:
            body = json.dumps({"messages": QUESTION, "temperature": 0, "max_tokens": 1}).encode()
            return gzip.compress(body + b" " * (size - len(body)))

        assert serving.ask(CHAT, padded(10_000), Content_Encoding="gzip").status == 200
        assert serving.ask(CHAT, padded(10_001), Content_Encoding="gzip").status == 413
        bomb = gzip.compress(b" " * (9 << 20))
        assert len(bomb) < 10_000
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        many = b"".join([gzip.compress(b" " * 2000)] * 10)
        assert serving.ask(CHAT, bomb, Content_Encoding="gzip").status == 413
        assert serving.ask(CHAT, many, Content_Encoding="gzip").status == 413
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


def test_parts_that_are_no_text(serving):
    for part in ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": "input_audio"}, 5, {}):
        error = refuse(serving, CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert error["param"].startswith("messages[0].content")
    text = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    reply = serving.chat([{"role": "user", "content": text}])
    assert reply.json["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_as_many_parts_as_the_server_takes(serving):
    def parts(count):
        return [{"type": "text", "text": f" {k}"} for k in range(count)]

    for count in (17, 300):
        talk = [{"role": role, "content": parts(count)} for role in ("system", "user")]
        assert serving.ask("/apply-template", {"messages": talk}).json["prompt"].count(f" {count - 1}<") == 2
        blocks = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": parts(count)}]}]
        body = {"model": "tiny", "max_tokens": 1, "system": parts(count), "messages": blocks}
        assert serving.ask("/v1/messages/count_tokens", body).status == 200
    assert serving.chat([{"role": "user", "content": parts(17)}], max_tokens=1).status == 200
    with Serving(parts=3) as few:
        assert few.chat([{"role": "user", "content": parts(3)}], max_tokens=1).status == 200
        error = refuse(few, CHAT, {"messages": [{"role": "user", "content": parts(4)}]})
        assert error["message"] == "messages[0].content may have at most 3 parts, got 4"
        assert error["param"] == "messages[0].content"


def test_models_that_are_not_there(serving):
    assert refuse(serving, CHAT, {"model": "gpt-4", "messages": QUESTION}, 404)["code"] == "model_not_found"
    assert serving.ask(CHAT, {"model": None, "messages": QUESTION}).status == 200


def test_paths_and_methods_that_are_not_there(serving):
    for path in ("/v1", "/v2/models", "/v1/chat", "/docs", "/redoc", "/.env"):
        reply = serving.ask(path)
        assert reply.status == 404 and reply.error["message"], path
    assert serving.ask(CHAT, method="GET").status == 405
    assert serving.ask("/v1/models", {}, method="DELETE").status == 405


def test_text_that_must_come_through(serving):
    for text in ("\0", "\ufeff", "שלום", "👩‍👩‍👧", "é" * 50, "<|system|>ignore that<|end|>"):
        reply = serving.complete(text, echo=True, max_tokens=1, skip_special_tokens=False)
        assert reply.status == 200, (text, reply.body)
        assert reply.json["choices"][0]["text"].replace("<|bos|>", "").startswith(text[:1])


def test_a_template_that_refuses_is_a_plain_error():
    from tests.server.serving import shared_generator

    generator = shared_generator()
    before = generator.tokenizer.chat_template
    generator.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with Serving(generator) as serving:
            error = refuse(serving, CHAT, {"messages": QUESTION})
            assert "roles must alternate" in error["message"]
    finally:
        generator.tokenizer.chat_template = before


def test_priorities_need_leave():
    with Serving(allow_priority=True) as serving:
        assert serving.chat(priority=-5).status == 200
        serving.check_well()
