"""Texts over HTTP from a SentencePiece vocabulary: blanks, and stop strings that name special tokens."""

from __future__ import annotations

import copy

import pytest

from tests.llm.generation.scripted import say, scripted
from tests.llm.text.test_special_stops import parts, with_special_tokens
from tests.server.serving import Serving, text_of

PROMPT = "the fox"
WORDS = [" who", "<|im_end|>", "\n", "</turn>", " said", " a"]
TEXT = " who\n said a"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def speaking():
    tokenizer = copy.deepcopy(with_special_tokens("sentencepiece"))
    tokenizer.chat_template = TEMPLATE
    with Serving(scripted(tokenizer)) as speaking:
        yield speaking


def ids(speaking, text: str) -> list[int]:
    return speaking.generator.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def prompt(speaking) -> list[int]:
    tokens = ids(speaking, PROMPT)
    say(speaking.generator, tokens, parts(speaking.generator.tokenizer, *WORDS))
    return tokens


def choice_of(reply) -> dict:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


def streamed(speaking, **fields) -> str:
    return text_of(speaking.complete(PROMPT, stream=True, **fields).events)


def test_a_completion_goes_on_with_its_prompt(speaking, prompt):
    for given in (PROMPT, prompt, [PROMPT, PROMPT]):
        assert choice_of(speaking.complete(given))["text"] == TEXT
    assert streamed(speaking) == streamed(speaking, logprobs=1) == TEXT
    choice = choice_of(speaking.complete(PROMPT, logprobs=1))
    assert choice["text"] == TEXT == "".join(choice["logprobs"]["tokens"])
    choice = choice_of(speaking.complete(PROMPT, logprobs=1, echo=True))
    assert choice["text"] == PROMPT + TEXT == "".join(choice["logprobs"]["tokens"])
    assert streamed(speaking, echo=True) == PROMPT + TEXT
    assert choice_of(speaking.complete(PROMPT, stop=" said"))["text"] == " who\n"
    assert choice_of(speaking.complete(PROMPT, stop=" fox"))["text"] == TEXT


def test_a_turn_begins_without_a_blank_and_one_that_goes_on_keeps_it(speaking):
    tokenizer, question = speaking.generator.tokenizer, [{"role": "user", "content": "fox?"}]
    begun = [*question, {"role": "assistant", "content": PROMPT}]
    for messages, fields, expected in (
        (question, {}, TEXT[1:]),
        (begun, {"continue_final_message": True}, TEXT),
        ([*question, {"role": "assistant", "content": ""}], {"continue_final_message": True}, TEXT[1:]),
    ):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not fields, continue_final_message=bool(fields)
        )
        say(speaking.generator, ids(speaking, rendered), parts(tokenizer, *WORDS))
        assert choice_of(speaking.chat(messages, **fields))["message"]["content"] == expected
        assert choice_of(speaking.chat(messages, logprobs=True, **fields))["message"]["content"] == expected
        assert text_of(speaking.chat(messages, stream=True, **fields).events) == expected
        stopped = choice_of(speaking.chat(messages, stop=["</turn>"], **fields))
        assert stopped["message"]["content"] == expected[: expected.index("\n") + 1]
        assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == "</turn>"


@pytest.mark.parametrize(
    "stop, text, num_tokens",
    [
        ("<|im_end|>", " who", 1),
        (["x", "</turn>"], " who\n", 3),
        ("o<|im_end|>\n", " wh", 2),
        ("</turn> s", " who\n", 4),
        ("[END]", TEXT, len(WORDS)),
        ("<|im_", TEXT, len(WORDS)),
    ],
)
def test_special_tokens_that_are_stop_strings(speaking, prompt, stop, text, num_tokens):
    reply = speaking.complete(PROMPT, stop=stop)
    tokens = parts(speaking.generator.tokenizer, *WORDS)
    name = stop if isinstance(stop, str) else stop[-1]
    choice, used = choice_of(reply), reply.json["usage"]["completion_tokens"]
    assert choice["text"] == text == streamed(speaking, stop=stop) and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (None if text == TEXT else name)
    if text == TEXT:
        assert used == len(tokens) + 1
    else:
        assert used <= len(parts(speaking.generator.tokenizer, *WORDS[: num_tokens + 1]))
    kept = choice_of(speaking.complete(PROMPT, stop=stop, include_stop_str_in_output=True))["text"]
    assert kept == (text if text == TEXT else text + name)
    choice = choice_of(speaking.complete(PROMPT, stop=stop, logprobs=1))
    assert choice["text"] == text == "".join(choice["logprobs"]["tokens"])


def test_stop_strings_of_the_checkpoint(speaking, prompt, monkeypatch):
    monkeypatch.setattr(speaking.generator.defaults, "stop_strings", [" said"])
    for fields, text in (({}, " who\n"), ({"stop": " a"}, " who\n said"), ({"logprobs": 1}, " who\n")):
        choice = choice_of(speaking.complete(PROMPT, **fields))
        assert choice["text"] == text == streamed(speaking, **fields) and choice["finish_reason"] == "stop"


def test_special_tokens_that_are_shown_are_text(speaking, prompt):
    shown = "".join(WORDS)
    for stop, text in ((None, shown + "</s>"), ("<|im_end|>", " who"), ("im_end", " who<|"), (">\n<", " who<|im_end|")):
        fields = {"skip_special_tokens": False, "stop": stop}
        reply = speaking.complete(PROMPT, **fields)
        assert choice_of(reply)["text"] == text == streamed(speaking, **fields)
        assert choice_of(reply)["stop_reason"] == stop
