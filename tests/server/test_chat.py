"""`/v1/chat/completions` through the real SDK, compared with the engine's own text."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.serving import ANSWER, LONG, QUESTION, Serving, read_reply, request_bytes, text_of

openai = pytest.importorskip("openai")


@pytest.fixture
def client(serving: Serving):
    return openai.OpenAI(base_url=serving.url + "/v1", api_key="none", max_retries=0)


def test_an_answer_is_that_of_generate(client, serving):
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    tokens = serving.generator.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    assert answer.usage.completion_tokens == len(tokens) + 1  # the stop token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "tiny" and answer.id.startswith("chatcmpl-") and answer.system_fingerprint


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 0, "max_tokens": 7}, {"temperature": 1.3, "seed": 5, "max_tokens": 60},
     {"temperature": 1.3, "seed": -5, "max_tokens": 60, "top_p": 0.9}, {"temperature": 0, "stop": [" wa", "fox"]},
     {"temperature": 1, "seed": 3, "n": 3, "max_tokens": 40, "stop": "e"}],
)  # fmt: skip
def test_a_stream_joined_is_the_whole_answer(client, fields):
    whole = client.chat.completions.create(model="tiny", messages=LONG, **fields)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=LONG, stream=True, stream_options=options, **fields)
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert own[0].delta.role == "assistant" and all(part.delta.role is None for part in own[1:])
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_the_same_seed_gives_the_same_text_alone_and_among_others(client, serving):
    fields = {"model": "tiny", "messages": LONG, "temperature": 1.5, "max_tokens": 40}
    alone = client.chat.completions.create(seed=11, **fields).choices[0].message.content

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=serving.url + "/v1", api_key="none") as crowd:
            answers = await asyncio.gather(*(crowd.chat.completions.create(seed=seed, **fields) for seed in range(24)))
            return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(many())
    assert texts[11] == alone
    assert len(set(texts)) > 12


def test_logprobs_are_of_the_text_byte_by_byte(client):
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="tiny", messages=LONG, temperature=0, max_tokens=50, logprobs=True, top_logprobs=3, stream=stream
        )
        parts = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        text = "".join((part.delta if stream else part.message).content or "" for part in parts)
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode()
        assert "".join(entry.token for entry in entries) == text
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in entries)


def test_logprobs_stay_with_text_that_a_stop_string_cuts(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, logprobs=True, stop=["Fran"]
    )
    choice = answer.choices[0]
    assert choice.message.content == "The capital of " and choice.finish_reason == "stop"
    assert "".join(entry.token for entry in choice.logprobs.content) == "The capital of "


def test_a_stop_string_is_cut_and_named(serving):
    reply = serving.chat(stop=["is P", "never"])
    choice = reply.json["choices"][0]
    assert choice["message"]["content"] == "The capital of France " and choice["stop_reason"] == "is P"
    kept = serving.chat(stop=["is P"], include_stop_str_in_output=True).json["choices"][0]
    assert kept["message"]["content"] == "The capital of France is P"


def test_a_stop_string_that_almost_came_is_given_out(serving):
    reply = serving.chat(stop=["Paris. And"], stream=True)
    assert text_of(reply.events) == ANSWER


def test_choices_of_the_likeliest_text_are_alike(serving):
    reply = serving.chat(n=3)
    assert [choice["message"]["content"] for choice in reply.json["choices"]] == [ANSWER] * 3
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]


def test_choices_that_are_drawn_differ(serving):
    reply = serving.chat(LONG, n=4, temperature=1.5, seed=1, max_tokens=30)
    assert len({choice["message"]["content"] for choice in reply.json["choices"]}) == 4


def test_without_max_tokens_the_context_is_the_limit(serving):
    reply = serving.chat(LONG, ignore_eos=True)
    usage = reply.json["usage"]
    assert usage["total_tokens"] == serving.service.max_length
    assert reply.json["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_beats_max_tokens(serving):
    assert serving.chat(LONG, max_tokens=2, max_completion_tokens=5).json["usage"]["completion_tokens"] == 5


def test_an_answer_goes_on_with_the_last_message(serving):
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    reply = serving.chat(messages, continue_final_message=True)
    assert reply.json["choices"][0]["message"]["content"] == " France is Paris."


def test_usage_on_every_chunk(serving):
    events = serving.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[-1] > 0
    plain = serving.chat(stream=True, stream_options={"continuous_usage_stats": True}).events
    assert not any("usage" in event for event in plain[:-1])


def test_token_ids_are_those_of_the_text(serving):
    reply = serving.chat(return_token_ids=True)
    tokenizer = serving.generator.tokenizer
    assert tokenizer.decode(reply.json["choices"][0]["token_ids"], skip_special_tokens=True) == ANSWER
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert reply.json["prompt_token_ids"] == prompt
    for n in (1, 2):  # in a stream it has the same place as in a whole answer, in the first chunk of a choice
        events = serving.chat(return_token_ids=True, stream=True, n=n, stream_options={"include_usage": True}).events[
            :-1
        ]
        first = [event for event in events if event["choices"] and event["choices"][0]["delta"].get("role")]
        assert [event["prompt_token_ids"] for event in first] == [prompt] * n
        assert sum("prompt_token_ids" in event for event in events) == n
        assert not any("prompt_token_ids" in choice for event in events for choice in event["choices"])


def test_special_tokens_are_shown_where_asked(serving):
    reply = serving.chat(skip_special_tokens=False)
    assert reply.json["choices"][0]["message"]["content"] == ANSWER + "<|end|>"


def test_unknown_fields_are_named(serving):
    reply = serving.chat(frobnicate=1, user="me")
    assert reply.status == 200 and reply.headers["x-pace-ignored"] == "frobnicate"


def test_unknown_fields_are_refused_where_the_server_is_strict():
    with Serving(strict=True) as strict:
        reply = strict.chat(frobnicate=1)
        assert reply.status == 400 and reply.error["param"] == "frobnicate"
        strict.check_well()


def test_paths_without_v1_and_other_names(serving):
    body = {"model": "alias", "messages": QUESTION, "temperature": 0}
    assert serving.ask("/chat/completions", body).json["model"] == "alias"


def test_a_second_turn_reads_the_first_from_the_cache(serving):
    turns = [{"role": "user", "content": "Count from one to twenty. " * 8}]
    first = serving.chat(turns, max_tokens=40).json
    turns += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, *QUESTION]
    second = serving.chat(turns, max_tokens=5).json
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_special_tokens_before_the_template_where_asked(serving):
    plain, more = (
        serving.chat(max_tokens=1, return_token_ids=True, add_special_tokens=adds).json["prompt_token_ids"]
        for adds in (False, True)
    )
    assert len(more) > len(plain) and more[-len(plain) :] == plain


def test_logprobs_of_an_end_that_is_shown(serving):
    capital = serving.ask("/tokenize", {"content": " capital"}).json["tokens"]
    for fields in ({"skip_special_tokens": False}, {"stop_token_ids": capital}):
        choice = serving.chat(logprobs=True, max_tokens=30, **fields).json["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks(serving):
    request = request_bytes("/v1/chat/completions", {"messages": QUESTION, "temperature": 0, "stream": True})
    with serving.connect() as connection:
        connection.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        reply = read_reply(connection)
    assert "transfer-encoding" not in reply.headers and reply.headers["content-length"] == str(len(reply.body))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert text_of(reply.events) == ANSWER and reply.events[-1] == "[DONE]"
