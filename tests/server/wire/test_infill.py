"""`suffix` of `/v1/completions`: models trained for infilling fill a gap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pace.assets import TINY
from pace.llm.generator import Generator
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from tests.llm.generation.infill_tokenizers import DEEPSEEK, QWEN, with_tokens
from tests.server.serving import Serving, text_of

BEFORE, AFTER = "def f(x):\n    ", "\n    return y\n"
MARKS = {
    "qwen": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    "deepseek": ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
}
ENDS = {"qwen": ["<|file_sep|>", "<|fim_pad|>", "<|repo_name|>", "<|endoftext|>"], "deepseek": ["<|EOT|>"]}


@pytest.fixture(scope="module", params=MARKS)
def coder(request) -> Iterator[Serving]:
    loaded = load.open_model(LoadOptions(str(TINY), progress=False, kv_cache_bytes="32MiB"))
    tokenizer = with_tokens(QWEN if request.param == "qwen" else DEEPSEEK)
    generator = Generator(loaded.engine, tokenizer, loaded.defaults)
    with Serving(generator) as serving:
        serving.family = request.param
        yield serving
    generator.driver.close()


def test_the_prompt_is_what_stands_around_the_gap(coder):
    tokenizer = coder.generator.tokenizer

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prefix, suffix, middle = map(tokenizer.convert_tokens_to_ids, MARKS[coder.family])
    expected = [tokenizer.bos_token_id, prefix, *ids(BEFORE), suffix, *ids(AFTER), middle]
    asked = {"suffix": AFTER, "max_tokens": 3, "return_token_ids": True}
    for prompt in (BEFORE, ids(BEFORE)):
        reply = coder.complete(prompt, **asked).json
        assert reply["choices"][0]["prompt_token_ids"] == expected
        assert reply["usage"]["prompt_tokens"] == len(expected)
    whole = coder.complete(BEFORE, add_special_tokens=False, **asked).json["choices"][0]
    assert whole["prompt_token_ids"] == expected[1:]
    several = coder.complete([BEFORE, ""], **asked).json["choices"]
    assert [choice["prompt_token_ids"] for choice in several] == [
        expected,
        [*expected[:2], *expected[2 + len(ids(BEFORE)) :]],
    ]
    plain = coder.complete(BEFORE, suffix="", max_tokens=3).json
    assert plain["choices"][0]["text"] == coder.complete(BEFORE, max_tokens=3, suffix=None).json["choices"][0]["text"]
    assert plain["usage"]["prompt_tokens"] == 1 + len(ids(BEFORE))


@pytest.mark.parametrize("stream", [False, True])
def test_a_filling_ends_before_the_next_file(coder, stream):
    for name in ENDS[coder.family]:
        token = coder.generator.tokenizer.convert_tokens_to_ids(name)
        asked = {"logit_bias": {str(token): 100}, "max_tokens": 4, "stream": stream, "stop": ["zq"]}
        reply = coder.complete(BEFORE, suffix=AFTER, **asked)
        choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
        text = text_of(reply.events) if stream else choices[0]["text"]
        assert (choices[-1]["finish_reason"], text) == ("stop", ""), name


def test_what_has_no_meaning_with_a_suffix(coder):
    for fields, param in (({"echo": True}, "echo"), ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens")):
        reply = coder.complete(BEFORE, suffix=AFTER, **fields)
        assert reply.status == 400 and reply.error["param"] == param
    for value in (5, ["a"], {}):
        assert coder.complete(BEFORE, suffix=value).error["param"] == "suffix"
    reply = coder.complete(BEFORE, suffix="a" * 3_000_000)
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"


def test_a_model_that_fills_no_gaps_says_so(serving):
    reply = serving.complete(BEFORE, suffix=AFTER)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "suffix", "unsupported_parameter")
    assert "not trained to fill a gap" in reply.error["message"]
