"""Step callbacks in unusual situations: within characters, across step points, when cut or cancelled, with
sentencepiece and longrope."""

from __future__ import annotations

import time

import pytest
import torch

from pace.llm import CallbackStreamer, SamplingConfig, StepContext, StepFeedback, TokenMask
from pace.llm.cache.manager import CacheManager
from pace.llm.constraints.masks import fill_bits
from pace.llm.engine.engine import Engine
from pace.llm.engine.scheduler import Scheduler
from pace.llm.generator import Generator
from pace.ops import reference
from tests.llm.bundled import bundled
from tests.llm.clients.test_steps import no_more_than
from tests.llm.fake_model import FakeModel, FakeTokenizer
from tests.llm.generators import by_hand, make_generator
from tests.llm.models.variants import VARIANTS, save_tiny
from tests.llm.text.tokenizer_zoo import byte_level, sentencepiece
from tests.support import exit_code_in_fork, load_model
from tests.waiting import PATIENCE, Gate


class Says(TokenMask):
    """Forces the given tokens, then allows all tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._count = tokens, 0

    @property
    def is_open(self) -> bool:
        return self._count >= len(self._tokens)

    def fill(self, row) -> None:
        if self.is_open:
            row.fill_(-1)
        else:
            fill_bits(row, [self._tokens[self._count]])

    def accept(self, token: int) -> None:
        if not self.is_open and token != self._tokens[self._count]:
            raise ValueError(f"not {token}")
        self._count += 1

    def rollback(self, num_tokens: int) -> None:
        self._count -= num_tokens

    def count_allowed(self, tokens: list[int]) -> int:
        expected = self._tokens[self._count : self._count + len(tokens)]
        return next((index for index, (a, b) in enumerate(zip(tokens, expected)) if a != b), len(tokens))


def saying(text: str, **fields) -> SamplingConfig:
    """Returns a config that makes the bundled model generate `text`."""
    tokens = bundled().tokenizer(text, add_special_tokens=False)["input_ids"]
    return SamplingConfig(token_mask=Says(tokens), max_new_tokens=len(tokens), **fields)


def test_strings_of_several_bytes_and_steps_within_a_character() -> None:
    config = saying("I have five € left", step_strings=["€"])
    config.step_callback = watch = no_more_than(0, None)
    bundled().generate("x", config)
    (call,) = watch.calls
    tokens = call.token_ids[: len(call.token_ids) - call.num_string_tokens]
    assert bundled().tokenizer.decode(tokens) + call.text_before_string == "I have five " and call.string == "€"
    config = saying("a fox is € and", step_strings=["fox"], step_every=1)
    config.step_callback = watch = no_more_than(0, None)
    bundled().generate("x", config)
    assert [call.string for call in watch.calls].count("fox") == 1
    config = saying("a € b", step_strings=["\ufffd"], step_every=50)
    config.step_callback = lambda context: None
    assert bundled().add_request("x", config).result(PATIENCE).texts == ["a € b"]


@pytest.mark.parametrize("every", [None, 1, 2, 3])
def test_a_string_is_found_across_step_points(every: int | None) -> None:
    config = saying("I have five left", step_strings=["five"], step_every=every)
    config.step_callback = watch = no_more_than(0, None)
    bundled().generate("x", config)
    assert [call.string for call in watch.calls if call.string] == ["five"]


def test_one_that_is_cancelled_at_its_step_point_has_no_more_tokens() -> None:
    generator = bundled("lookup").generator
    config = SamplingConfig(max_new_tokens=30, step_every=3, step_callback=lambda context: None)
    with by_hand(generator) as hand:
        request = generator.add_request("1, 2, 3, 1, 2, 3, 1, 2, 3,", config)
        while len(request.tokens) < 3:
            hand.step()
        assert len(request.tokens) == 3
        request.cancel()
        hand.step()
    assert len(request.result(PATIENCE).generated_token_ids[0]) == 3


def test_all_of_an_open_mask_may_be_taken_back() -> None:
    config = saying("red fox", step_every=4)
    config.max_new_tokens = 12
    config.step_callback = no_more_than(1, lambda context: StepFeedback(take_back=len(context.token_ids)))
    assert bundled().generate("x", config).texts[0].startswith("red fox")


def test_a_callback_that_changes_its_context_takes_no_more_back() -> None:
    def greedy_hands(context: StepContext) -> StepFeedback:
        context.token_ids.extend([1] * 50)
        return StepFeedback(take_back=40)

    with pytest.raises(ValueError, match="only 4 tokens"):
        bundled().generate("x", SamplingConfig(max_new_tokens=9, step_every=4, step_callback=greedy_hands))


def test_a_row_that_is_cut_has_what_was_told() -> None:
    told: list[int] = []

    def cut(event) -> bool | None:
        told.extend([] if event.token is None else [event.token])
        time.sleep(0.3 if len(told) == 4 else 0)  # meanwhile the engine gets ahead, if the machine is free
        return len(told) != 4

    config = SamplingConfig(max_new_tokens=20, step_every=5)
    config.step_callback = lambda context: StepFeedback(take_back=3, text=" and then")
    out = bundled().generate("Once upon a time", config, streamer=CallbackStreamer(cut, bundled().tokenizer))
    assert out.generated_token_ids == [told[:4]] and out.finish_reasons == ["cancelled"]


def test_what_is_put_in_goes_on_without_a_blank() -> None:
    from pace.llm.clients.steps import _tokens_of

    for tokenizer in (byte_level(), sentencepiece()):
        for text in ("fox", " fox", "\nfox", "the end"):
            before = tokenizer("there was a", add_special_tokens=False)["input_ids"]
            whole = tokenizer.decode(before + _tokens_of(text, tokenizer), clean_up_tokenization_spaces=False)
            assert whole == "there was a" + text


@pytest.mark.parametrize("every", [1, 2, 4, 6])
def test_angles_that_change_with_the_length(tmp_path, every: int) -> None:
    """Inserted text may bring a sequence to the length at which longrope recomputes all of it."""
    (fields,) = [fields for name, what, fields in VARIANTS if (name, what) == ("phi3", "longrope-long")]
    save_tiny(tmp_path, "phi3", fields)
    model, prompt = load_model(tmp_path, torch.float32, reference), [5, 17, 33, 2, 71, 9, 28, 60, 11, 3]
    assert len(prompt) + every < model.recompute_length <= len(prompt) + every + 6

    def generate(tokens: list[int], config: SamplingConfig) -> list[int]:
        cache = CacheManager(model.kv_spec, 64 * model.kv_spec.block_bytes)
        generator = Generator(Engine(model, reference, cache, Scheduler(cache)), FakeTokenizer())
        return generator.generate(tokens, config).generated_token_ids[0]

    config = SamplingConfig(max_new_tokens=20, ignore_eos=True, step_every=every)
    config.step_callback = no_more_than(1, lambda context: StepFeedback(text="bcdefg"))
    tokens = generate(prompt, config)
    rest = SamplingConfig(max_new_tokens=20 - every - 6, ignore_eos=True)
    assert tokens[every + 6 :] == generate(prompt + tokens[: every + 6], rest)


def test_a_child_does_not_wait_for_a_callback_of_its_parent() -> None:
    generator, gate = make_generator(FakeModel(eos_bias=-50.0)), Gate()
    request = generator.add_request([1, 2], SamplingConfig(max_new_tokens=8, step_every=4, step_callback=gate))
    gate.wait_inside()
    assert exit_code_in_fork(lambda: request.result(PATIENCE).finish_reasons == ["cancelled"]) == 0
    gate.open()
    assert request.result(60).finish_reasons == ["length"]
