"""Exact properties of the engine, on a model whose logits show every mistake in the cache."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from pace.batch import ForwardBatch
from pace.llm.configs import SamplingConfig
from pace.llm.engine.drafter import NoDraft
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import StoppingCriteria
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, greedy
from tests.llm.generators import check_idle, make_generator, random_prompts
from tests.plugins.tiers import sample

PLENTY = 1 << 22


def make_sequence(model: FakeModel, prompt: list[int], num_tokens: int) -> Sequence:
    limit = len(prompt) + num_tokens
    return Sequence(prompt, Sampling(), StoppingCriteria(limit, end_tokens=[0]), limit)


def assert_greedy(model: FakeModel, sequence: Sequence, num_tokens: int) -> None:
    assert sequence.generated == greedy(model, sequence.tokens[: sequence.num_prompt_tokens], num_tokens, (0,))


LIMITS = [
    {},
    {"max_tokens_per_step": 1},
    {"max_tokens_per_step": 5, "max_sequences_per_step": 3},
    {"max_tokens_per_step": 33},
]
RAGGED = [(count, limits) for count in (1, 2, 3, 7, 16, 33) for limits in LIMITS]


@pytest.mark.parametrize("case", sample(RAGGED, lambda case: case in RAGGED[::3]), ids=str)
def test_a_ragged_batch_gives_what_each_prompt_gives_alone(case: tuple[int, dict[str, int]]) -> None:
    count, limits = case
    generator = make_generator(**limits)
    prompts = random_prompts(count, count)
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=20))
    model = generator.engine.model
    assert out.generated_token_ids == [greedy(model, prompt, 20, (0,)) for prompt in prompts]
    assert out.finish_reasons == ["stop" if tokens[-1] == 0 else "length" for tokens in out.generated_token_ids]
    check_idle(generator)


def test_preemption_really_happens() -> None:
    generator = make_generator(num_blocks=6)
    lengths = []
    generator.engine.model.hook = lambda batch: lengths.append(len(batch.tokens))
    generator.generate([[1] * 20, [2] * 20], SamplingConfig(max_new_tokens=60, ignore_eos=True))
    assert sum(lengths) > 2 * (20 + 59), (
        "something was computed twice, since 6 blocks do not hold two times 80 positions"
    )


@pytest.mark.parametrize("seed", sample(range(6), lambda seed: seed < 3))
def test_arrivals_and_aborts_at_random_steps_leak_nothing(seed: int) -> None:
    chance = random.Random(seed)
    model = FakeModel(eos_bias=1.0)
    engine = Engine.create(
        model,
        OPS,
        12 * model.kv_spec.block_bytes,
        max_tokens_per_step=chance.choice([1, 7, 64]),
        max_sequences_per_step=4,
    )
    live: list[Sequence] = []
    done: list[Sequence] = []
    for prompt in random_prompts(seed, 25, longest=60):
        live.append(make_sequence(model, prompt, chance.randint(1, 60)))
        engine.submit([live[-1]])
        for _ in range(chance.randint(0, 12)):
            engine.step()
            engine.cache.check_integrity(engine.scheduler.sequences())
        if chance.random() < 0.3:
            engine.abort([live.pop(chance.randrange(len(live)))])
    while engine.step():
        engine.cache.check_integrity(engine.scheduler.sequences())
    for sequence in live + done:
        assert_greedy(model, sequence, sequence.max_length - sequence.num_prompt_tokens)
    engine.check_idle()
    assert engine.cache.used_bytes == 0


def test_an_aborted_sequence_is_cancelled_and_the_others_go_on() -> None:
    model = FakeModel()
    engine = Engine.create(model, OPS, PLENTY)
    first, second = make_sequence(model, [5, 6], 30), make_sequence(model, [7], 30)
    engine.submit([first, second])
    engine.step()
    engine.abort([first])
    assert first.finish_reason == "cancelled" and not first.block_table
    while engine.step():
        pass
    assert_greedy(model, second, 30)
    engine.check_idle()


def test_several_threads_share_steps() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=5, num_blocks=20)
    prompts = random_prompts(3, 8, longest=40)
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        results[index] = generator.generate(
            [prompts[index], prompts[-1 - index]], SamplingConfig(max_new_tokens=30)
        ).generated_token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    model = generator.engine.model
    for index in range(len(prompts)):
        assert results[index] == [greedy(model, prompts[index], 30), greedy(model, prompts[-1 - index], 30)]
    check_idle(generator, None)
    assert model.num_calls < 8 * 2 * 30, "steps were shared"


def test_a_short_call_returns_while_a_long_one_goes_on() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    began, returned = threading.Event(), threading.Event()
    reasons = []

    def begin(batch: ForwardBatch) -> None:
        began.set()
        time.sleep(0.001)  # lets the short call in

    def long() -> None:
        reasons.extend(generator.generate([1], SamplingConfig(max_new_tokens=4000), cancel=returned).finish_reasons)

    generator.engine.model.hook = begin
    thread = threading.Thread(target=long)
    thread.start()
    assert began.wait(timeout=60)
    assert generator.generate([6], SamplingConfig(max_new_tokens=5)).finish_reasons == ["length"]
    returned.set()
    thread.join(timeout=60)
    assert reasons == ["cancelled"], "the long call had ended before"


class ScriptedDrafter(NoDraft):
    """Proposes the correct continuation, with wrong tokens at random places."""

    def __init__(self, model: FakeModel, chance: random.Random, length: int) -> None:
        self.model, self.chance, self.length = model, chance, length

    def extend(self, spans, cache) -> None:
        for span in spans:
            sequence = span.sequence
            room = min(self.length, sequence.max_length - len(sequence.tokens) - 1)
            if span.num_rows == 1 and room > 0 and cache.reserve(sequence, len(sequence.tokens) + room):
                drafts = greedy(self.model, sequence.tokens, room)
                span.drafts = [token if self.chance.random() < 0.7 else (token + 1) % 50 for token in drafts]


def test_logits_that_are_not_finite_fail_their_sequence_alone() -> None:
    model = FakeModel(eos_bias=-50.0)
    engine = Engine.create(model, OPS, PLENTY)
    good, bad = make_sequence(model, [1], 10), make_sequence(model, [2], 10)
    honest = model.logits_of
    model.logits_of = lambda tokens: (
        honest(tokens) * float("nan") if tokens[0] == 2 and len(tokens) > 4 else honest(tokens)
    )
    engine.submit([good, bad])
    while engine.step():
        pass
    assert bad.finish_reason == "error" and bad.num_generated == 4
    with pytest.raises(ValueError, match="not finite"):
        raise bad.error
    assert_greedy(model, good, 10)
    engine.check_idle()


@pytest.mark.parametrize("error", [RuntimeError("out of order"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [0, 1, 3, 9])
def test_a_step_that_fails_ends_what_it_worked_on_and_nothing_else(step: int, error: BaseException) -> None:
    model = FakeModel(eos_bias=-50.0)
    engine = Engine.create(model, OPS, PLENTY, max_sequences_per_step=2)
    sequences = [make_sequence(model, [token] * 20, 12) for token in (3, 4, 5, 6)]
    engine.submit(sequences)
    for _ in range(step):
        engine.step()
    model.hook = raising(error)
    with pytest.raises(type(error)):
        engine.step()
    model.hook = lambda batch: None
    while engine.step():
        pass
    first, second, *others = sequences
    assert first.error is second.error is error and first.finish_reason == "error"
    for sequence in others:
        assert_greedy(model, sequence, 12)
    engine.check_idle()
    assert engine.cache.used_bytes == 0


def test_samples_go_on_when_the_step_of_the_first_one_fails() -> None:
    """The other samples wait for its prompt. If it fails, they compute the prompt themselves."""
    model = FakeModel(eos_bias=-50.0)
    engine = Engine.create(model, OPS, PLENTY, max_tokens_per_step=8)
    first, *sharers = (make_sequence(model, [3] * 40, 5) for _ in range(3))
    first.prompt_sharers = list(sharers)
    for sharer in sharers:
        sharer.waits_for_prompt = True
    engine.submit([first, *sharers])
    engine.step()
    model.hook = raising(RuntimeError("out of order"))
    with pytest.raises(RuntimeError):
        engine.step()
    model.hook = lambda batch: None
    while engine.step():
        pass
    for sharer in sharers:
        assert_greedy(model, sharer, 5)
    engine.check_idle()


def raising(error: BaseException):
    def hook(batch: object) -> None:
        raise error

    return hook


class Listener:
    """A sink that records its calls, and checks the sequence at each call."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []

    def token(self, sequence, token, logprob) -> None:
        assert sequence.tokens[-1] == token
        self.heard.append((token, logprob and logprob.logprob))

    def end(self, sequence, reason, error) -> None:
        assert not sequence.block_table, "its blocks are free by now"
        self.heard.append((reason, error))


@pytest.mark.parametrize("length", [0, 4])
def test_a_sink_hears_of_every_token_and_once_of_the_end(length: int) -> None:
    model = FakeModel()
    engine = Engine.create(model, OPS, PLENTY, drafter=ScriptedDrafter(model, random.Random(1), length))
    generator = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))
    sequences = []
    for prompt in ([5, 6], [7], [8]):
        prepared = generator.prepare_for_generate(prompt, SamplingConfig(max_new_tokens=30, logprobs=1))
        sequences += generator.sequences_of(prepared, 0)
    for sequence in sequences:
        sequence.sink = Listener()
    engine.submit(sequences)
    for _ in range(3):
        engine.step()
    engine.abort(sequences[2:])
    engine.abort(sequences[2:])
    while engine.step():
        pass
    for sequence in sequences:
        *tokens, end = sequence.sink.heard
        assert tokens == [(entry.token, entry.logprob) for entry in sequence.logprobs]
        assert [token for token, _ in tokens] == sequence.generated
        assert end == (sequence.finish_reason, None)
    assert sequences[2].finish_reason == "cancelled"


def test_samples_of_one_prompt_compute_it_once() -> None:
    generator = make_generator()
    computed = []
    generator.engine.model.hook = lambda batch: computed.append(len(batch.tokens))
    prompt = random_prompts(1, 1, 60)[0] * 3
    out = generator.generate(
        prompt, SamplingConfig(do_sample=True, num_return_sequences=6, seed=1, max_new_tokens=20, ignore_eos=True)
    )
    assert sum(computed) == len(prompt) + 5 + 6 * 19
    assert len(set(map(tuple, out.generated_token_ids))) > 1
    alone = generator.generate(prompt, SamplingConfig(do_sample=True, seed=1, max_new_tokens=20, ignore_eos=True))
    assert out.generated_token_ids[0] == alone.generated_token_ids[0]
    check_idle(generator, None)


def test_rows_that_stopped_cost_nothing() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    sizes = []
    generator.engine.model.hook = lambda batch: sizes.append(len(batch.tokens))
    short = SamplingConfig(max_length=12)
    generator.generate([[1] * 10, [2] * 2], short)
    assert sizes == [12, 2] + [1] * 8


def test_the_same_shape_does_not_hide_new_content() -> None:
    """Calls of equal shapes use the same buffers."""
    generator = make_generator(FakeModel(eos_bias=-50.0))
    for token in (3, 4, 5):
        out = generator.generate([token], SamplingConfig(max_new_tokens=5))
        assert out.generated_token_ids == [greedy(generator.engine.model, [token], 5)]


def test_check_idle_sees_a_leak() -> None:
    generator = make_generator()
    check_idle(generator, None)
    stray = make_sequence(generator.engine.model, [1], 5)
    generator.engine.cache.reserve(stray, 20)
    with pytest.raises(AssertionError, match="holders"):
        generator.engine.check_idle()


def test_torch_seed_makes_unseeded_sampling_repeatable() -> None:
    generator = make_generator()
    config = SamplingConfig(do_sample=True, max_new_tokens=10)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(generator.generate([1, 2], config).generated_token_ids)
    assert outs[0] == outs[1] != outs[2]


def test_a_seed_gives_a_row_the_same_tokens_whatever_its_neighbours() -> None:
    generator = make_generator()
    config = SamplingConfig(do_sample=True, seed=11, max_new_tokens=25, temperature=1.5, top_k=0)
    prompts = random_prompts(5, 12)
    together = generator.generate(prompts, config).generated_token_ids
    assert together == [generator.generate(prompt, config).generated_token_ids[0] for prompt in prompts]


def test_rope_lengths_are_those_of_the_prompt_whatever_the_chunk() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_tokens_per_step=4)
    lengths: list[int] = []
    generator.engine.model.hook = lambda batch: lengths.extend(batch.rope_lengths.tolist())
    generator.generate([1] * 10, SamplingConfig(max_new_tokens=4))
    assert lengths == [10] * 10 + [11, 12, 13]
