"""Token endpoints with the bundled tokenizer: the answers that vLLM's and llama.cpp's clients expect."""

from __future__ import annotations

from typing import Any

import pytest

from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.prompts import PromptReader
from pace.tokenizer.loading import load_tokenizer

pytest.importorskip("pydantic")
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from pace.server.wire import tokens as wire
from tests.server.schemas.requests import read

LENGTH = 1024
TEXT = "Two foxes 🦊🦊, naïve."
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
RENDERED = "<|bos|><|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("pace/assets/tiny")


@pytest.fixture(scope="module")
def reader(tokenizer: Any) -> PromptReader:
    return PromptReader(tokenizer, len(tokenizer), LENGTH, Limits(bytes_per_token=16))


def tokenize(reader: PromptReader, **body: Any) -> dict[str, Any]:
    return wire.tokenize(read(TokenizeRequest, body), reader, Limits())


def detokenize(reader: PromptReader, **body: Any) -> dict[str, str]:
    return wire.detokenize(read(DetokenizeRequest, body), reader, Limits())


def test_a_text_comes_back(reader: PromptReader) -> None:
    answer = tokenize(reader, model="tiny", prompt=TEXT, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"]) > 5 and answer["max_model_len"] == LENGTH
    assert answer["token_strs"] is None
    assert detokenize(reader, tokens=answer["tokens"]) == {"prompt": TEXT, "content": TEXT}
    assert detokenize(reader, tokens=[]) == {"prompt": "", "content": ""}


def test_special_tokens_are_added_as_each_client_expects(reader: PromptReader, tokenizer: Any) -> None:
    bare = tokenizer("hi", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("hi", add_special_tokens=True)["input_ids"]
    assert tokenize(reader, prompt="hi")["tokens"] == dressed
    assert tokenize(reader, prompt="hi", add_special_tokens=False)["tokens"] == bare
    assert tokenize(reader, content="hi")["tokens"] == bare
    assert tokenize(reader, content="hi", add_special=True)["tokens"] == dressed


def test_a_conversation_is_tokenised_as_it_would_be_read(reader: PromptReader) -> None:
    answer = tokenize(reader, messages=MESSAGES)
    assert detokenize(reader, tokens=answer["tokens"])["prompt"] == RENDERED
    assert wire.apply_template(read(ChatRequest, {"messages": MESSAGES}), reader, Limits()) == {"prompt": RENDERED}
    shorter = tokenize(reader, messages=MESSAGES, add_generation_prompt=False)
    assert shorter["tokens"] == answer["tokens"][:-1]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_template_is_given_thoughts(name: str) -> None:
    tokenizer = load_tokenizer("pace/assets/tiny")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.reasoning_content is string %}"
        "<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\n{% endfor %}"
    )
    reader = PromptReader(tokenizer, len(tokenizer), LENGTH, Limits())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]
    request = read(ChatRequest, {"messages": messages})
    assert wire.apply_template(request, reader, Limits()) == {"prompt": "a\n<think>hm</think>b\n"}
    messages[1][name] = 5
    with pytest.raises(ApiError, match=rf"messages\[1\].{name} must be a string"):
        read(ChatRequest, {"messages": messages}).to_prompt(Limits())


def test_tokens_have_names_and_pieces(reader: PromptReader) -> None:
    plain = tokenize(reader, prompt=TEXT)["tokens"]
    named = tokenize(reader, prompt=TEXT, return_token_strs=True)
    assert len(named["token_strs"]) == named["count"] and named["tokens"] == plain
    pieces = tokenize(reader, content=TEXT, with_pieces=True)["tokens"]
    data = [piece["piece"] for piece in pieces]
    assert b"".join(item.encode() if isinstance(item, str) else bytes(item) for item in data).decode() == TEXT
    assert any(isinstance(item, list) for item in data), "a fox is more than one token"


def test_the_tokenizer_is_described(reader: PromptReader, tokenizer: Any) -> None:
    info = wire.tokenizer_info(reader)
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|bos|>", "<|end|>", "<|pad|>")
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast", "the one that the checkpoint names"
    assert info["chat_template"] == tokenizer.chat_template and info["max_model_len"] == LENGTH


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "prompt"), ({"prompt": "a", "content": "b"}, "content"), ({"prompt": 5}, "prompt"),
     ({"prompt": "a" * (16 * LENGTH + 1)}, "prompt"), ({"messages": []}, "messages"),
     ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
     ({"messages": MESSAGES, "tools": [{}]}, "tools[0].name"),
     ({"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template")],
)  # fmt: skip
def test_what_is_wrong_is_named(reader: PromptReader, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        tokenize(reader, **body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("tokens", [[-1], [5, 10**6], [2**70], [1.5], "5", None])
def test_ids_that_are_none_are_named(reader: PromptReader, tokens: Any) -> None:
    with pytest.raises(ApiError) as caught:
        detokenize(reader, tokens=tokens)
    assert caught.value.status == 400 and caught.value.param.startswith("tokens")
