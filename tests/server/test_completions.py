"""`/v1/completions`: prompts in all forms, echo, and the log-probabilities that lm-eval reads."""

from __future__ import annotations

import pytest
import torch

from tests.server.serving import text_of

PROMPT = "Question: What is the capital of France?"


def ids(serving, text):
    return list(serving.generator.tokenizer(text)["input_ids"])


def test_texts_and_ids_in_every_form(serving):
    one = serving.complete(PROMPT, max_tokens=8).json["choices"][0]["text"]
    tokens = ids(serving, PROMPT)
    assert serving.complete(tokens, max_tokens=8).json["choices"][0]["text"] == one
    for prompts in ([PROMPT, "Hello"], [tokens, ids(serving, "Hello")]):
        choices = serving.complete(prompts, max_tokens=8).json["choices"]
        assert [choice["index"] for choice in choices] == [0, 1] and choices[0]["text"] == one


def test_sixteen_tokens_where_nothing_is_said(serving):
    assert serving.complete(PROMPT, ignore_eos=True).json["usage"]["completion_tokens"] == 16


def test_index_counts_choices_prompt_by_prompt(serving):
    fields = {"n": 2, "temperature": 1, "seed": 4, "max_tokens": 6}
    both = serving.complete([PROMPT, "Hello"], **fields).json
    alone = serving.complete("Hello", **fields).json
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"][2:]] == [choice["text"] for choice in alone["choices"]]
    assert both["usage"]["prompt_tokens"] == len(ids(serving, PROMPT)) + len(ids(serving, "Hello"))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_and_its_logprobs(serving, stream):
    """The request that lm-eval's `local-completions` sends, and the fields that it reads."""
    tokens = ids(serving, PROMPT)
    reply = serving.ask(
        "/v1/completions",
        {"prompt": [tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
         "stream": stream},
    )  # fmt: skip
    parts = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
    logprobs = {name: sum((part["logprobs"][name] for part in parts), []) for name in parts[0]["logprobs"]}
    values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(values) == len(tops) == len(logprobs["tokens"]) == len(tokens) + 1
    assert values[0] is None and tops[0] is None
    expected = serving.generator.generate(tokens).output_token_ids  # a greedy run, for the first token after the prompt
    assert expected is not None
    assert "".join(logprobs["tokens"]) == "".join(part["text"] for part in parts)
    assert [offset for offset in logprobs["text_offset"]] == sorted(logprobs["text_offset"])
    for value, top in zip(values[1:], tops[1:]):
        assert max(top.values()) >= value and value in top.values()


def test_logprobs_of_a_prompt_are_those_of_score(serving):
    from pace.llm.clients.scoring import score

    tokens = ids(serving, PROMPT)
    reply = serving.complete(tokens, max_tokens=1, logprobs=0, echo=True).json["choices"][0]["logprobs"]
    expected = score(serving.generator.driver, [tokens])[0]
    assert torch.equal(torch.tensor(reply["token_logprobs"][1 : len(tokens)]), expected)
    assert all(len(top) == 1 for top in reply["top_logprobs"][1:])


def test_an_end_token_has_its_entry(serving):
    prompt = serving.generator.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    reply = serving.complete(prompt, max_tokens=40, logprobs=1, add_special_tokens=False).json
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["completion_tokens"]
    assert choice["logprobs"]["tokens"][-1] == ""


def test_no_tokens_and_the_prompt_echoed(serving):
    reply = serving.complete(PROMPT, max_tokens=0, echo=True, logprobs=1).json
    assert reply["choices"][0]["text"] == PROMPT and reply["usage"]["completion_tokens"] == 0
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]


def test_the_best_of_several(serving):
    fields = {"temperature": 1.4, "seed": 9, "max_tokens": 12}
    every = serving.complete(PROMPT, n=6, logprobs=0, **fields).json["choices"]
    best = serving.complete(PROMPT, best_of=6, n=2, **fields).json

    def mean(choice):
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    ranked = [choice["text"] for choice in sorted(every, key=mean, reverse=True)]
    assert [choice["text"] for choice in best["choices"]] == ranked[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None


def test_a_stream_joined_is_the_whole(serving):
    fields = {"temperature": 1, "seed": 2, "n": 2, "max_tokens": 30, "stop": ["."]}
    whole = serving.complete([PROMPT, "Once"], **fields).json["choices"]
    events = serving.complete([PROMPT, "Once"], stream=True, **fields).events
    assert events[-1] == "[DONE]"
    assert [text_of(events, index) for index in range(4)] == [choice["text"] for choice in whole]
    reasons = {c["index"]: c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]}
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole}


def test_only_the_last_tokens_of_a_prompt(serving):
    tokens = ids(serving, PROMPT)
    cut = serving.complete(tokens, truncate_prompt_tokens=4, max_tokens=6).json
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["choices"][0]["text"] == serving.complete(tokens[-4:], max_tokens=6).json["choices"][0]["text"]


def test_bad_words_and_biases(serving):
    free = serving.complete(PROMPT, max_tokens=12).json["choices"][0]["text"]
    word = free.split()[0]
    assert word not in serving.complete(PROMPT, max_tokens=12, bad_words=[word]).json["choices"][0]["text"].split()
    token = ids(serving, "zz")[-1]
    forced = serving.complete(PROMPT, max_tokens=3, allowed_token_ids=[token], return_token_ids=True).json
    assert forced["choices"][0]["token_ids"] == [token] * 3
    biased = serving.complete(PROMPT, max_tokens=1, logit_bias={str(token): 100}, return_token_ids=True).json
    assert biased["choices"][0]["token_ids"] == [token]


def test_names_of_tokens_as_ids(serving):
    reply = serving.complete(PROMPT, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True).json
    assert all(name.startswith("token_id:") for name in reply["choices"][0]["logprobs"]["tokens"])


def test_a_context_that_is_just_full(serving):
    most = serving.service.max_length
    reply = serving.complete([5] * (most - 1), max_tokens=5).json
    assert reply["usage"]["completion_tokens"] == 1 and reply["choices"][0]["finish_reason"] == "length"


def test_the_last_of_more_token_ids_than_the_context_holds(serving):
    ids = [5] * (2 * serving.service.max_length) + [6, 7]
    reply = serving.complete(ids, truncate_prompt_tokens=3, max_tokens=1, return_token_ids=True)
    assert reply.json["choices"][0]["prompt_token_ids"] == [5, 6, 7]


def test_an_echo_with_fewer_logprobs_than_its_prompt(serving):
    fields = {"echo": True, "prompt_logprobs": 3, "max_tokens": 1}
    choice = serving.complete("1, 2, 3", logprobs=1, **fields).json["choices"][0]
    ranks = {entry["rank"] for token in choice["prompt_logprobs"][1:] for entry in token.values()}
    assert ranks >= {1, 2, 3} and all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert choice["prompt_logprobs"] == serving.complete("1, 2, 3", **fields).json["choices"][0]["prompt_logprobs"]
