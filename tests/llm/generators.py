"""Generators on fake models, with the prompts and configs used by tests of requests, orders, cancelling and outputs."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pace.llm import LLMModel
from pace.llm.configs import SamplingConfig
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sampling.logits import LogitsProcessor
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, greedy


def make_generator(model: FakeModel | None = None, num_blocks: int = 5000, **limits: Any) -> Generator:
    model = model or FakeModel()
    return Generator(
        Engine.create(model, OPS, num_blocks * model.kv_spec.block_bytes, **limits),
        FakeTokenizer(),
        SamplingConfig(eos_token_id=0),
    )


def random_prompts(seed: int, count: int, longest: int = 70) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1, 50) for _ in range(chance.randint(1, longest))] for _ in range(count)]


class Odd(LogitsProcessor):
    """Favours odd tokens after an odd number of generated ones, and asserts that it was given every token and
    rollback."""

    def __init__(self) -> None:
        self.total = 0

    def accept(self, token: int) -> None:
        self.total += token

    def rollback(self, num_tokens: int) -> None:
        self.total -= sum(self.seen[-num_tokens:])

    def apply(self, logits: torch.Tensor) -> None:
        assert self.total == sum(self.seen)
        logits[(len(self.seen) - self.num_prompt_tokens) % 2 :: 2] += 2.0


CONFIGS = [
    SamplingConfig(),
    SamplingConfig(repetition_penalty=1.3, no_repeat_ngram_size=2, logprobs=2),
    SamplingConfig(do_sample=True, seed=3, temperature=1.5, top_k=0),
    SamplingConfig(do_sample=True, seed=4, frequency_penalty=0.7, presence_penalty=0.2, min_p=0.02, prompt_logprobs=1),
    SamplingConfig(logits_processors=[Odd()], min_new_tokens=5),
    SamplingConfig(
        stop_strings=["q"], logits_processors=[lambda ids, logits: logits - logits[:, :1] * (ids.shape[1] % 3 == 0)]
    ),
]


def what_matters(out) -> tuple:
    """Returns all fields of a GenerateOutput that describe its texts."""
    logprobs = out.logprobs, out.prompt_logprobs, out.sequence_scores
    return out.generated_token_ids, out.finish_reasons, out.texts, logprobs, out.output_token_ids.tolist()


def with_length(config: SamplingConfig, num_tokens: int) -> SamplingConfig:
    config = config.copy()
    config.max_new_tokens = max(num_tokens, config.min_new_tokens)
    return config


class ByHand:
    """The engine of a driver whose thread is paused between two steps, so that the test can step it."""

    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver
        self.engine = driver.engine

    def step(self) -> bool:
        """Runs the posted calls, then one step."""
        self.driver._do_posted()
        return self.engine.step()


@contextmanager
def by_hand(generator: Generator | LLMModel) -> Iterator[ByHand]:
    """Pauses the engine's thread while the block runs. Waiting for the engine inside the block deadlocks."""
    driver = driver_of(generator)
    is_held, let_go = threading.Event(), threading.Event()
    done = driver.call(lambda engine: (is_held.set(), let_go.wait()))
    is_held.wait()
    try:
        yield ByHand(driver)
    finally:
        let_go.set()
        done.result()


def driver_of(generator: Generator | LLMModel | EngineDriver) -> EngineDriver:
    if isinstance(generator, EngineDriver):
        return generator
    return (generator.generator if isinstance(generator, LLMModel) else generator).driver


def num_at_work(generator: Generator | LLMModel | EngineDriver) -> int:
    """Sequences in the engine now. Any thread may ask: one that moves from one queue to another counts once."""
    scheduler = driver_of(generator).engine.scheduler
    return len({*scheduler.waiting, *scheduler.running, *scheduler.parked})


def check_idle(generator: Generator | LLMModel | EngineDriver, used_bytes: int | None = 0) -> None:
    """Raises AssertionError if anything is in flight, or if the cache does not hold `used_bytes` (None: any number)."""
    driver = driver_of(generator)

    def check(engine: Engine) -> None:
        engine.check_idle()
        assert used_bytes is None or engine.cache.used_bytes == used_bytes

    try:
        driver.call(check).result(60)
    except AssertionError:  # an exception that a test caught may keep a request alive until a garbage collection
        gc.collect()
        driver.call(check).result(60)


def ids(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, 50) for _ in range(length)]


def generate(generator: Generator, prompts: list[list[int]], num_tokens: int = 8):
    """Generates, checks the tokens against `greedy`, and returns the output and the number of computed tokens."""
    computed, model = [], generator.engine.model
    model.hook = lambda batch: computed.append(len(batch.tokens))
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=num_tokens))
    assert out.generated_token_ids == [greedy(model, prompt, num_tokens) for prompt in prompts]
    check_idle(generator, used_bytes=None)
    return out, sum(computed)
