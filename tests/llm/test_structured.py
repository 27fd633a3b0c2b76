"""Constrained text equals, token by token, the text of a plain loop of forward, mask and pick."""

from __future__ import annotations

import functools
import json
import random
import sys

import jsonschema
import numpy as np
import pytest
import torch

from pace.assets import TINY
from pace.llm import AllowedTokens, Grammar, LLMModel, SamplingConfig
from pace.llm.sampling.logits import Processors, build_processors
from pace.llm.sampling.sampler import Sampling, rules_of, token_logprobs
from pace.llm.sequence import Sequence, Span
from tests.llm.bundled import KINDS, bundled
from tests.llm.constraints.test_grammar_mask import GRAMMARS, PERSON, satisfies
from tests.llm.generators import check_idle
from tests.plugins.tiers import sample

llguidance = pytest.importorskip("llguidance")
native = pytest.importorskip("pace.ops.native", reason="the kernels are not built")

FORM = '{"name": "Tom", "age": 3} {"name": "Ben", "age": 4} '
PROMPTS = ["A person: ", "1, 2, 3, 1, 2, 3,", FORM, "Once upon a time"]
RULES = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(do_sample=True, seed=3, temperature=1.3, top_k=0),
    "filtered": SamplingConfig(do_sample=True, seed=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    "logprobs": SamplingConfig(logprobs=2),
}
NUM_TOKENS = 40


def constrained(name: str, rules: str) -> SamplingConfig:
    return SamplingConfig(grammar=GRAMMARS[name], max_new_tokens=NUM_TOKENS).merge_from(RULES[rules])


@functools.cache
def llguidance_tokenizer(end: int):
    model = bundled("plain")
    text = model.tokenizer.backend_tokenizer.to_str()
    return llguidance.LLTokenizer(text, n_vocab=model.config.vocab_size, eos_token=end)


@functools.cache
def plain_loop(prompt: str, name: str, rules: str) -> tuple[list[int], list]:
    """Returns tokens and log-probabilities, from a row of the model, llguidance's own mask and a pick at each step."""
    model = bundled("plain")
    tokenizer, config = model.tokenizer, RULES[rules].copy()
    ends = model.generator.defaults.eos_token_id
    matcher = llguidance.LLMatcher(llguidance_tokenizer(ends[0]), GRAMMARS[name].source)
    tokens = tokenizer(prompt)["input_ids"]
    processors = Processors(build_processors(config, len(tokens), ends))
    strategy = Sampling(processors, rules_of(config), config.seed or 0, config.logprobs)
    sequence = Sequence(tokens, strategy, None, 1000)
    with model.session() as session:
        logits = session.append(tokens)
        while len(sequence.generated) < NUM_TOKENS and not matcher.is_stopped():
            may_end = matcher.is_accepting()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            banned = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: logits.shape[1]] == 0)
            banned[ends] = not may_end
            logits[0, banned] = -torch.inf
            (token,) = strategy.choose(native, logits, Span(sequence, 0, 1))
            sequence.append(token)
            if token in ends:
                break
            assert matcher.consume_token(token)
            logits = session.append([token])
    return sequence.generated, sequence.logprobs


@pytest.mark.parametrize("num_prompts", [1, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("rules", RULES)
def test_each_grammar_as_in_a_plain_loop(rules: str, num_prompts: int) -> None:
    """Runs each grammar on one prompt and one kind of model, which take turns, or on all of them."""
    for number, name in enumerate(GRAMMARS, list(RULES).index(rules)):
        prompts = (PROMPTS * 2)[number % 4 :][:num_prompts]
        expected = [plain_loop(prompt, name, rules) for prompt in prompts]
        for kind in KINDS if num_prompts == 4 else [KINDS[number % 3]]:
            out = bundled(kind).generate(prompts, constrained(name, rules))
            assert out.generated_token_ids == [tokens for tokens, _ in expected], f"{name}, {kind}"
            if rules == "logprobs":
                assert out.logprobs == [logprobs for _, logprobs in expected], f"{name}, {kind}"
            for text, reason in zip(out.texts, out.finish_reasons):
                assert reason == "length" or satisfies(name, text), f"{name}, {kind}: {text}"
    for kind in KINDS:
        check_idle(bundled(kind), None)


@pytest.mark.parametrize("size", sample([1, 2, 7, 33], lambda size: size == 7))
@pytest.mark.parametrize("kind", ["plain", "draft"])
def test_batches_of_different_grammars_and_free_text(size: int, kind: str) -> None:
    model, chance = bundled(kind), random.Random(size)
    asked = [(chance.choice(PROMPTS), chance.choice([*GRAMMARS, None]), chance.choice([*RULES])) for _ in range(size)]
    requests = []
    for prompt, name, rules in asked:
        free = RULES[rules].copy().merge_from(SamplingConfig(max_new_tokens=NUM_TOKENS))
        requests.append(model.add_request(prompt, free if name is None else constrained(name, rules)))
    for (prompt, name, rules), request in zip(asked, requests):
        tokens = request.result().generated_token_ids[0]
        if name is not None:
            assert tokens == plain_loop(prompt, name, rules)[0]


def test_forced_tokens_take_no_step_of_their_own() -> None:
    out = bundled("plain").generate(PROMPTS[0], constrained("compact", "greedy"))
    assert out.metrics.num_forced_tokens > 10
    assert out.generated_token_ids[0] == plain_loop(PROMPTS[0], "compact", "greedy")[0]


@pytest.mark.parametrize("kind", sample(KINDS, lambda kind: kind == "draft"))
@pytest.mark.parametrize(
    "rules",
    [
        SamplingConfig(),
        SamplingConfig(do_sample=True, seed=3, temperature=1.3, top_p=0.9),
        SamplingConfig(repetition_penalty=1.3, prompt_logprobs=0),
        SamplingConfig(logits_processors=[lambda ids, logits: logits + 1]),
    ],
    ids=["greedy", "sampled", "edited", "processed"],
)
def test_log_probabilities_without_the_mask(kind: str, rules: SamplingConfig) -> None:
    model = bundled(kind)
    config = SamplingConfig(json_schema=PERSON, logprobs=2, unmasked_logprobs=True, max_new_tokens=NUM_TOKENS)
    out = model.generate(PROMPTS, config.copy().merge_from(rules))
    for prompt, tokens, logprobs in zip(PROMPTS, out.generated_token_ids, out.logprobs):
        with bundled("plain").session() as session:
            rows = session.append([*model.tokenizer(prompt)["input_ids"], *tokens[:-1]], len(tokens))
        assert logprobs == token_logprobs(native, rows, torch.arange(len(tokens)), torch.tensor(tokens), 2)
    config.unmasked_logprobs = None
    masked = model.generate(PROMPTS, config.copy().merge_from(rules))
    assert masked.generated_token_ids == out.generated_token_ids and masked.logprobs != out.logprobs


def test_samples_and_beams() -> None:
    model = bundled("plain")
    config = SamplingConfig(json_schema=PERSON, do_sample=True, temperature=2.0, seed=2, num_return_sequences=6)
    out = model.generate(PROMPTS[0], config.copy().merge_from(SamplingConfig(max_new_tokens=200)))
    ended = [text for text, reason in zip(out.texts, out.finish_reasons) if reason == "stop"]
    assert ended and all(satisfies("json_schema", text) for text in ended)
    assert len(set(out.texts)) == 6
    out = model.generate(PROMPTS, SamplingConfig(choices=["red", "green", "blue"], num_beams=3, num_return_sequences=3))
    assert len(out.texts) == 3 * len(PROMPTS) and set(out.texts) <= {"red", "green", "blue"}
    assert len(set(map(tuple, out.generated_token_ids))) > 3, "beams may write one text in several ways"


def test_ways_to_ask() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": PERSON, "strict": True}}
    for fields in (
        {"json_schema": PERSON},
        {"json_schema": json.dumps(PERSON)},
        {"grammar": Grammar.json_schema(PERSON)},
        {"response_format": form},
    ):
        out = bundled("plain").generate(PROMPTS[0], SamplingConfig(**fields))
        jsonschema.validate(json.loads(out.texts[0]), PERSON)
        assert out.finish_reasons == ["stop"]


def test_fields_of_the_config() -> None:
    model = bundled("plain")
    assert model.generate(PROMPTS[0], SamplingConfig(choices=["one", "two"])).texts[0] in ("one", "two")
    assert model.generate(PROMPTS[0], SamplingConfig(regex="[xyz]{5}")).finish_reasons == ["stop"]
    text = model.generate(PROMPTS[0], SamplingConfig(response_format={"type": "text"}, max_new_tokens=8)).texts[0]
    assert text == model.generate(PROMPTS[0], SamplingConfig(max_new_tokens=8)).texts[0]
    short = model.generate(PROMPTS[0], SamplingConfig(json_schema=PERSON, max_new_tokens=5))
    assert short.finish_reasons == ["length"], "what is cut off is not told as complete"
    past = model.generate(PROMPTS[0], SamplingConfig(regex="([0-9] )+", max_new_tokens=30, ignore_eos=True))
    assert past.finish_reasons == ["length"] and len(past.generated_token_ids[0]) == 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": {}, "regex": "a"}, "json_schema=, regex="),
        ({"choices": ["a"], "token_mask": AllowedTokens([1])}, "choices=, token_mask="),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"json_schema": {"not": {}}}, "#/not"),
        ({"grammar": "start: nobody"}, "nobody"),
    ],
)
def test_what_cannot_be_is_told_before_any_work(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundled("plain").generate(PROMPTS[0], SamplingConfig(**fields))


def test_without_llguidance(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    model = LLMModel(TINY, progress=False)
    with pytest.raises(ModuleNotFoundError, match=r"pace-llm\[grammar\]"):
        model.generate(PROMPTS[0], SamplingConfig(regex="a"))
    assert model.generate(PROMPTS[0], SamplingConfig(max_new_tokens=2)).texts[0]
