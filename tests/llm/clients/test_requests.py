"""Requests arrive, join a batch, wait and leave. The tokens of a request do not depend on the other requests."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pace.llm import LLMModel, SamplingConfig
from pace.llm.clients.requests import Request
from pace.llm.generator import Generator
from tests.llm.fake_model import FakeModel
from tests.llm.generators import CONFIGS, by_hand, check_idle, make_generator, random_prompts, what_matters, with_length
from tests.plugins.tiers import sample
from tests.waiting import wait_until


def assert_as_alone(request: Request, prompt: list[int], config: SamplingConfig, eos_bias: float = 0.0) -> None:
    """Asserts that the output equals that of the request run alone; a cancelled one has a prefix of its tokens."""
    alone = make_generator(FakeModel(eos_bias=eos_bias)).generate(prompt, config)
    if request.finish_reason == "cancelled":
        assert request.tokens == alone.generated_token_ids[0][: len(request.tokens)]
        return
    assert what_matters(request.result()) == what_matters(alone)


# -- other requests at the same time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sample(range(12), lambda seed: seed < 4))
def test_tokens_do_not_depend_on_what_happens_around(seed: int) -> None:
    """Random limits, pools, orders of arrival and priorities. Requests join at any step and may be cancelled midway."""
    chance = random.Random(seed)
    model = FakeModel(eos_bias=chance.choice([-50.0, 0.0, 1.0]))
    limits = {"max_tokens_per_step": chance.choice([1, 5, 16, 512])}
    limits |= {"max_sequences_per_step": chance.choice([1, 2, 5, 64])}
    generator = make_generator(model, num_blocks=chance.choice([9, 14, 40]), **limits)
    engine, requests = generator.engine, []
    with by_hand(generator) as hand:
        for prompt in random_prompts(seed, 12, longest=60):
            config = with_length(chance.choice(CONFIGS), chance.randint(1, 60))
            requests.append((generator.add_request(prompt, config, chance.randint(-1, 1)), prompt, config))
            for _ in range(chance.choice([0, 0, 1, 9])):
                hand.step()
                engine.cache.check_integrity(engine.scheduler.sequences())
            if chance.random() < 0.25:
                chance.choice(requests)[0].cancel()
        while hand.step():
            engine.cache.check_integrity(engine.scheduler.sequences())
    for request, prompt, config in requests:
        assert_as_alone(request, prompt, config, model.eos_bias)
    check_idle(generator)


def test_threads_add_wait_read_and_cancel_at_once() -> None:
    generator = make_generator(num_blocks=24, max_tokens_per_step=24, max_sequences_per_step=6)
    prompts = random_prompts(11, 32, longest=50)
    done: list[tuple] = []

    def work(index: int) -> None:
        chance = random.Random(index)
        for prompt in prompts[index::8]:
            config = with_length(chance.choice(CONFIGS), chance.randint(1, 40))
            request = generator.add_request(prompt, config, chance.randint(-2, 2))
            done.append((request, prompt, config))
            how = chance.randrange(4)
            if how == 0:
                request.result()
            elif how == 1:
                assert "".join(request) == request.text == request.result().texts[0]
            elif how == 2:
                time.sleep(chance.choice([0.0, 0.001]))
                request.cancel()
            else:
                alone = make_generator().generate(prompt, config)
                assert generator.generate(prompt, config).generated_token_ids == alone.generated_token_ids

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8), timeout=120))
    assert len(done) == 32
    for request, prompt, config in done:
        if not request.done:
            request.result()
        assert_as_alone(request, prompt, config)
    check_idle(generator)


def test_requests_on_a_real_model_join_others_bit_for_bit(checkpoint) -> None:
    with LLMModel(checkpoint("llama")[0], dtype="float32", progress=False, kv_cache_bytes="1MiB") as model:
        chance = random.Random(1)
        prompts = [[chance.randrange(2, 280) for _ in range(chance.randint(1, 90))] for _ in range(12)]
        plain = SamplingConfig(max_new_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        configs = [plain.copy().merge_from(SamplingConfig(do_sample=seed % 2 == 1, seed=seed)) for seed in range(12)]
        alone = [model.generate(prompt, config) for prompt, config in zip(prompts, configs)]
        requests = []
        with by_hand(model) as hand:
            for prompt, config in zip(prompts, configs):
                requests.append(model.add_request(prompt, config, priority=chance.randint(-3, 3)))
                hand.step()
        for request, out in zip(requests, alone):
            assert what_matters(request.result()) == what_matters(out)
        check_idle(model, None)


# -- one request -------------------------------------------------------------------------------------------------------


def test_a_request_is_what_generate_gives() -> None:
    generator = make_generator()
    config = SamplingConfig(max_new_tokens=30, ignore_eos=True)
    with by_hand(generator):
        request = generator.add_request([1, 2, 3], config)
        assert (request.tokens, request.text, request.done, request.finish_reason) == ([], "", False, None)
    pieces = iter(request)
    first = next(pieces)
    assert request.text.startswith(first)
    out = generator.generate([1, 2, 3], config)
    assert request.result(60).generated_token_ids == out.generated_token_ids == [request.tokens] and request.done
    assert first + "".join(pieces) == request.text == "".join(request) == out.texts[0], "read again from the beginning"
    assert request.result().generated_token_ids == out.generated_token_ids and request.finish_reason == "length"
    request.cancel()
    assert request.finish_reason == "length", "it is too late for that"


def test_a_request_that_takes_too_long_goes_on() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    generator.engine.model.hook = lambda batch: time.sleep(0.01)
    request = generator.add_request([1], SamplingConfig(max_new_tokens=500))
    with pytest.raises(TimeoutError, match="tokens so far"):
        request.result(timeout=0.0)
    wait_until(lambda: request.tokens)
    with pytest.raises(TimeoutError):
        request.result(timeout=0.05)
    assert 0 < len(request.tokens) < 500
    generator.engine.model.hook = lambda batch: None
    assert len(request.result(timeout=60).generated_token_ids[0]) == 500
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            request.result(wrong)


def refusing(length: int):
    """Returns a processor that fails for texts of more than `length` tokens."""

    def refuse(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > length:
            raise RuntimeError("the processor's own")
        return logits

    return refuse


def test_a_request_that_fails_fails_alone() -> None:
    generator, config = make_generator(), SamplingConfig(max_new_tokens=20, ignore_eos=True)
    other = generator.add_request([4, 5], config)
    config = config.copy()
    config.logits_processors = [refusing(6)]
    request = generator.add_request([1, 2, 3], config)
    assert len(other.result().generated_token_ids[0]) == 20
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the processor's own"):
            request.result()
    assert request.done and request.finish_reason == "error" and len(request.tokens) == 4
    with pytest.raises(RuntimeError, match="the processor's own"):
        list(request)
    check_idle(generator)


def test_a_request_that_nobody_holds_leaves() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    with by_hand(generator) as hand:
        request = generator.add_request([1] * 40, SamplingConfig(max_new_tokens=500))
        hand.step()
        assert generator.engine.cache.used_bytes > 0
        sequence = request._sequences[0]
        del request
        hand.step()
        assert sequence.finish_reason == "cancelled"
    check_idle(generator)


# -- several continuations ---------------------------------------------------------------------------------------------

SEVERAL = SamplingConfig(do_sample=True, num_return_sequences=3, seed=7, max_new_tokens=25, logprobs=2, top_k=0)


def test_several_continuations_are_those_of_generate() -> None:
    generator = make_generator()
    request = generator.add_request([1, 2, 3], SEVERAL)
    out, expected = request.result(60), make_generator().generate([1, 2, 3], SEVERAL)
    assert what_matters(out) == what_matters(expected)
    assert [(choice.tokens, choice.text, choice.finish_reason) for choice in request.choices] == list(
        zip(out.generated_token_ids, out.texts, out.finish_reasons)
    )
    assert request.done and all(choice.done for choice in request.choices)
    for look in (lambda: request.tokens, lambda: request.text, lambda: request.finish_reason, lambda: iter(request)):
        with pytest.raises(ValueError, match="has 3 continuations; use `choices`"):
            look()
    check_idle(generator)


@pytest.mark.parametrize("config", [SEVERAL, SamplingConfig(max_new_tokens=20), SamplingConfig(stop_strings=["q"])])
def test_events_are_all_tokens_their_texts_and_log_probabilities(config: SamplingConfig) -> None:
    generator = make_generator()
    request = generator.add_request([1, 2, 3], config)
    seen = list(request.events())
    out = request.result(60)
    for row, tokens in enumerate(out.generated_token_ids):
        *told, end = [event for event in seen if event.row == row]
        assert [event.token for event in told] == tokens and not any(event.finish_reason for event in told)
        assert (end.token, end.finish_reason) == (None, out.finish_reasons[row])
        assert "".join(event.text for event in (*told, end)) == out.texts[row]
        assert [event.logprob for event in told] == (out.logprobs[row] if out.logprobs else [None] * len(tokens))
    assert list(request.events()) == seen, "who reads again reads from the beginning"


def test_a_continuation_that_fails_fails_the_request() -> None:
    generator = make_generator()
    config = SEVERAL.copy()
    config.logits_processors = [refusing(9)]
    config.ignore_eos = True
    request = generator.add_request([1, 2, 3], config)
    with pytest.raises(RuntimeError, match="the processor's own"):
        request.result(60)
    with pytest.raises(RuntimeError, match="the processor's own"):
        list(request.events())
    assert [len(choice.tokens) for choice in request.choices] == [7, 7, 7]
    check_idle(generator)


def test_cancelling_ends_all_continuations() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    config = SEVERAL.copy()
    config.max_new_tokens = 3000
    request = generator.add_request([1] * 40, config)
    events = request.events()
    next(events)
    request.cancel()
    assert request.result(60).finish_reasons == ["cancelled"] * 3
    assert [event.finish_reason for event in events if event.finish_reason] == ["cancelled"] * 3
    check_idle(generator)


# -- refused arguments -------------------------------------------------------------------------------------------------


def test_a_warning_comes_once_for_a_call(caplog) -> None:
    generator = make_generator()
    for config in (SamplingConfig(num_beams=3), SamplingConfig(do_sample=True, num_return_sequences=3)):
        caplog.clear()
        generator.generate([[1], [2]], config.merge_from(SamplingConfig(bad_words_ids=[[0], [5]], max_new_tokens=2)))
        assert ["bad_words_ids holds an end token" in record.message for record in caplog.records] == [True]


def test_what_a_request_cannot_be_is_told() -> None:
    generator = make_generator()
    for priority in (101, -101, 1.5, True, "high"):
        error = ValueError if priority in (101, -101) else TypeError
        with pytest.raises(error, match="priority must be an int from -100 to 100"):
            generator.add_request([1], priority=priority)
    for salt, error in (("", ValueError), ("x" * 129, ValueError), (7, TypeError)):
        with pytest.raises(error, match="cache_salt must"):
            generator.add_request([1], cache_salt=salt)
    with pytest.raises(ValueError, match="add_request continues one prompt, got 2"):
        generator.add_request([[1], [2]])
    with pytest.raises(ValueError, match="stream returns one text, got num_return_sequences=3"):
        generator.stream([1], SamplingConfig(do_sample=True, num_return_sequences=3))
    with pytest.raises(ValueError, match="beam search only has them at the end"):
        generator.add_request([1], SamplingConfig(num_beams=3))
    with pytest.raises(ValueError, match="token id 999"):
        generator.add_request([999])
    check_idle(generator)
    mute = Generator(generator.engine)
    request = mute.add_request([1], SamplingConfig(max_new_tokens=3))
    with pytest.raises(ValueError, match="tokenizer"):
        iter(request)
    assert request.text == "" and len(request.result().generated_token_ids[0]) == 3
