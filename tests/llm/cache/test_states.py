"""Slots of states: who reads a slot finds the states of its own tokens. The fake model's state is the text itself."""

from __future__ import annotations

import random

import pytest
import torch

from pace.batch import KVSpec, Positions
from pace.llm.cache.manager import CacheManager
from pace.llm.cache.marks import MarkPlaces
from pace.llm.cache.state_cache import budget_for
from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from pace.llm.generator import Generator
from pace.llm.sequence import Sequence, Span
from pace.states import State
from tests.llm.cache.test_allocators_at_work import everything_at_once
from tests.llm.cache.test_prefix_cache import salted
from tests.llm.fake_model import FakeModel, FakeTokenizer, engine_of, greedy
from tests.llm.generators import check_idle, random_prompts
from tests.plugins.tiers import sample

SPEC = KVSpec((State(channels=8, kernel=3), Positions(1, 4, 4)), torch.float32)
MODELS = {"hybrid": {}, "pure": {"windows": ()}, "windows": {"windows": (20, None)}}


def make_model(name: str, **options) -> FakeModel:
    return FakeModel(eos_bias=-50.0, num_states=2, **MODELS[name], **options)


def make_generator(model: FakeModel, num_blocks: int = 1000, num_slots: int = 100, **options) -> Generator:
    engine = engine_of(model, num_blocks, num_slots, **options)
    return Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))


def make_sequence(length: int = 100) -> Sequence:
    return Sequence([1] * length, None, None, 4096)


def make_cache(num_blocks: int = 20, num_slots: int = 4, max_drafts: int = 0) -> CacheManager:
    slots = SPEC.slots(max_drafts)
    num_bytes = num_blocks * SPEC.block_bytes + num_slots * slots.slot_bytes
    return CacheManager(SPEC, num_bytes, num_slots=num_slots, max_drafts=max_drafts)


def compute(cache: CacheManager, sequence: Sequence, end: int, drafts: int = 0, accepted: int = 0) -> bool:
    """Does the cache's part of a step."""
    span = Span(sequence, sequence.num_computed, end - sequence.num_computed, [1] * drafts)
    if not cache.reserve(sequence, span.end):
        return False
    cache.plan([span])
    cache.commit(sequence, end + accepted)
    return True


# -- slots of a sequence -----------------------------------------------------------------------------------------------


def test_a_sequence_writes_its_own_slot_in_place() -> None:
    cache, sequence = make_cache(), make_sequence()
    assert cache.room_needed(sequence, 16).slots == 1
    assert compute(cache, sequence, 16)
    slot = sequence.state.slot
    assert slot >= 0 and cache.room_needed(sequence, 32).slots == 0
    assert compute(cache, sequence, 32) and sequence.state.slot == slot
    cache.check_integrity([sequence])
    cache.free(sequence)
    assert cache.free_room.slots == 4 and sequence.state.slot == -1


def test_a_fork_copies_nothing_and_the_last_holder_writes_in_place() -> None:
    cache, source, target = make_cache(), make_sequence(), make_sequence()
    compute(cache, source, 20)
    shared = source.state.slot
    cache.fork(source, target, 20)
    assert target.state.slot == shared and cache.free_room.slots == 3
    assert cache.room_needed(source, 21).slots == cache.room_needed(target, 21).slots == 1
    assert compute(cache, source, 21) and source.state.slot != shared
    assert compute(cache, target, 21) and target.state.slot == shared
    cache.check_integrity([source, target])


def test_what_is_not_known_is_computed_again() -> None:
    cache, sequence, fork = make_cache(), make_sequence(), make_sequence()
    compute(cache, sequence, 40)
    cache.fork(sequence, fork, 39)
    assert fork.num_computed == 0 and not fork.block_table
    cache.truncate(sequence, 40)
    assert sequence.num_computed == 40
    cache.truncate(sequence, 39)
    assert sequence.num_computed == 0 and not sequence.block_table and cache.free_room.slots == 4
    cache.check_integrity([sequence, fork])


def test_without_a_slot_nothing_is_taken() -> None:
    cache, sequences = make_cache(num_slots=2), [make_sequence() for _ in range(3)]
    assert compute(cache, sequences[0], 16) and compute(cache, sequences[1], 16)
    blocks = cache.num_free_blocks
    assert not cache.admit(sequences[2], 16) and cache.num_free_blocks == blocks
    cache.free(sequences[0])
    assert cache.admit(sequences[2], 16)
    cache.free(sequences[2])  # before its first step
    assert cache.free_room.slots == 1
    cache.check_integrity(sequences)


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, KVSpec((State(heads=4, key_dim=64, value_dim=64),), torch.float32)])
def test_the_budget_is_divided(spec: KVSpec) -> None:
    for budget in (300_000, 1 << 20, 1 << 30):
        cache = CacheManager(spec, budget, max_drafts=3)
        assert cache.free_room.slots >= 2
        assert budget - spec.block_bytes <= cache.budget_bytes + cache.states.spec.slot_bytes
        assert cache.budget_bytes <= budget
    is_pure = spec is not SPEC
    assert (cache.states.budget_bytes / budget > 0.7) == is_pure


@pytest.mark.parametrize("num_tokens", [1, 100, 5000, 100_000])
def test_the_advised_budget_is_enough(num_tokens: int) -> None:
    budget = budget_for(SPEC, num_tokens, 512, max_drafts=2)
    cache = CacheManager(SPEC, budget, max_drafts=2)
    assert cache.capacity >= num_tokens and cache.bytes_for(num_tokens) == budget


def test_a_budget_without_slots_is_refused() -> None:
    slot_bytes = SPEC.slots().slot_bytes
    with pytest.raises(ValueError, match=f"2 slots for states of {slot_bytes} bytes each"):
        CacheManager(SPEC, SPEC.block_bytes + slot_bytes)


# -- at work -----------------------------------------------------------------------------------------------------------


def generate(generator: Generator, prompts: list[list[int]], num_tokens: int = 20, used_bytes: int | None = 0) -> None:
    """Generates, and checks the tokens and the slots."""
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=num_tokens))
    assert out.generated_token_ids == [greedy(generator.engine.model, prompt, num_tokens) for prompt in prompts]
    check_idle(generator, used_bytes)


@pytest.mark.parametrize("kind", ["paged", "bmc", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_that_compete_for_slots_and_blocks(name: str, kind: str) -> None:
    for num_blocks, num_slots in ((1000, 100), (24, 3), (1000, 2)):
        limits = {"max_tokens_per_step": 23, "cache_options": {"kv_cache_type": kind}}
        generate(make_generator(make_model(name), num_blocks, num_slots, **limits), random_prompts(1, 8))


@pytest.mark.parametrize("num_slots", [2, 3, 50])
def test_samples_share_a_prompt_and_wait_for_slots(num_slots: int) -> None:
    generator = make_generator(make_model("hybrid"), num_slots=num_slots, max_tokens_per_step=30)
    computed = []
    generator.engine.model.hook = lambda batch: computed.append(len(batch.tokens))
    prompts = random_prompts(2, 5)
    sampled = {"do_sample": True, "seed": 3}
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=12, num_return_sequences=3, **sampled))
    expected = make_generator(FakeModel(eos_bias=-50.0)).generate(
        prompts, SamplingConfig(max_new_tokens=12, num_return_sequences=3, **sampled)
    )
    assert out.generated_token_ids == expected.generated_token_ids
    check_idle(generator)
    if num_slots == 50:  # each prompt once
        assert sum(computed) == sum(map(len, prompts)) + 5 * 3 * 11 + 5 * 2


@pytest.mark.parametrize("num_slots", [2, 4, 30])
def test_beams(num_slots: int) -> None:
    config = SamplingConfig(max_new_tokens=8, num_beams=4)
    prompts = random_prompts(3, 2, longest=20)
    out = make_generator(make_model("hybrid"), num_slots=num_slots).generate(prompts, config)
    assert (
        out.generated_token_ids
        == make_generator(FakeModel(eos_bias=-50.0)).generate(prompts, config).generated_token_ids
    )


@pytest.mark.parametrize("name", MODELS)
def test_sessions_are_cut_and_forked_at_every_position(name: str) -> None:
    model = make_model(name)
    generator = make_generator(model)
    (tokens,) = random_prompts(4, 1, longest=40)
    session = Session(generator.driver)
    for cut in range(len(tokens) + 1):
        session.truncate(0)
        session.append(tokens)
        fork = session.fork()
        session.truncate(cut)
        for one, text in ((session, [*tokens[:cut], 7, 8]), (fork, [*tokens, 7, 8])):
            assert torch.equal(one.append([7, 8])[0], model.logits_of(text))
        fork.close()
    session.close()
    check_idle(generator)


# -- marks -------------------------------------------------------------------------------------------------------------


def test_a_prompt_leaves_marks_near_its_end_and_at_regular_distances() -> None:
    places = MarkPlaces(interval=100, max_marks=5)
    assert places.of(1000, 0, 1000, branch=0) == [208, 416, 624, 752, 832, 880, 944, 976, 992]
    assert places.of(1000, 832, 944, branch=848) == [848, 880, 944]
    assert MarkPlaces(16, 1).of(100, 0, 100, branch=0) == [80], "the next turn departs before the end"
    assert places.of(16, 0, 16, branch=0) == []
    few = MarkPlaces(interval=1648, max_marks=3).of(8100, 0, 8100, branch=0)
    assert few == [2704, 5408, 7904, 8080, 8096], "another question of 100 tokens reads 200 tokens again, not 2,700"
    assert len(MarkPlaces(16, 10**6).of(100, 0, 100, branch=0)) == 6, "as many as there are blocks"


def marked(model: FakeModel, num_slots: int = 100, **limits) -> Generator:
    options = {"cache_options": {"prefix_cache_bytes": None}} | limits
    return make_generator(model, num_slots=num_slots, **options)


def num_computed_of(generator: Generator, prompt: list[int], num_tokens: int = 4) -> int:
    """Generates, checks the tokens, and returns the number of computed tokens of the prompt."""
    model, computed = generator.engine.model, []
    model.hook = lambda batch: computed.append(len(batch.tokens))
    out = generator.generate([prompt], SamplingConfig(max_new_tokens=num_tokens))
    assert out.generated_token_ids == [greedy(model, prompt, num_tokens)]
    check_idle(generator, used_bytes=None)
    return sum(computed) - num_tokens + 1


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_found_again(name: str) -> None:
    generator = marked(make_model(name))
    (prompt,) = random_prompts(7, 1, longest=1)
    prompt = [*prompt, *range(1, 40), *range(1, 40)]  # 79 tokens
    assert num_computed_of(generator, prompt) == 79
    assert num_computed_of(generator, prompt) == 79 - 64
    assert num_computed_of(generator, [*prompt[:70], 7, 8, 9, 7, 7]) == 75 - 64, "the next turn"
    answer = greedy(generator.engine.model, prompt, 40)
    num_computed_of(generator, prompt, 40)
    assert num_computed_of(generator, [*prompt, *answer, 5]) == 120 - 112, "the mark of the answer"


def test_a_branching_point_is_marked_by_the_second_text_and_used_by_the_third() -> None:
    generator = marked(make_model("hybrid"), num_slots=8)
    system = [token % 49 + 1 for token in range(100)]
    questions = [[number] * 70 for number in (5, 6, 7)]
    computed = [num_computed_of(generator, system + question) for question in questions]
    assert computed[0] == 170 and computed[1] > 170 - 96 and computed[2] == 170 - 96


def test_one_mark_moves_along_with_a_text() -> None:
    generator = marked(make_model("hybrid"))
    assert num_computed_of(generator, [5, 6, 7], 100) == 3
    assert generator.engine.cache.states.pool.num_kept == 1
    answer = greedy(generator.engine.model, [5, 6, 7], 100)
    assert num_computed_of(generator, [5, 6, 7, *answer]) == 103 - 96


def test_salts_share_no_marks() -> None:
    engine = marked(make_model("pure")).engine
    prompt = [token % 49 + 1 for token in range(60)]
    assert [salted(engine, prompt, salt) for salt in ("a", "b", "a", None)] == [0, 0, 48, 0]


def test_a_mark_gives_way_to_a_sequence() -> None:
    generator = marked(make_model("hybrid"), num_slots=2)
    prompt = [token % 49 + 1 for token in range(60)]
    assert num_computed_of(generator, prompt) == 60
    assert num_computed_of(generator, prompt) in (12, 28), "with one slot more than its mark"
    generate(generator, random_prompts(8, 5), used_bytes=None)


@pytest.mark.parametrize("num_slots", [2, 3, 6, 40])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_with_the_same_beginning(name: str, num_slots: int) -> None:
    """All of them at once, and again, with few blocks and slots."""
    generator = marked(make_model(name), num_slots, num_blocks=30, max_tokens_per_step=37)
    chance = random.Random(9)
    stem = [chance.randrange(1, 50) for _ in range(90)]
    prompts = [stem[: chance.randint(1, 90)] + [chance.randrange(1, 50)] * chance.randint(1, 30) for _ in range(8)]
    for _ in range(2):
        generate(generator, prompts, used_bytes=None)


def test_a_session_goes_back_to_a_mark() -> None:
    model = make_model("hybrid")
    generator = marked(model)
    session = Session(generator.driver)
    tokens = [token % 49 + 1 for token in range(100)]
    session.append(tokens)
    computed = []
    model.hook = lambda batch: computed.append(len(batch.tokens))
    fork = session.fork()
    for one, cut, known in ((session, 90, 80), (fork, 70, 64)):
        one.truncate(cut)
        assert torch.equal(one.append([7, 8])[0], model.logits_of([*tokens[:cut], 7, 8]))
        assert computed.pop() == cut + 2 - known and not computed


@pytest.mark.parametrize("seed", sample(range(3), lambda seed: seed == 1))
@pytest.mark.parametrize("name", MODELS)
def test_everything_at_once(name: str, seed: int) -> None:
    """With drafts, in 24 blocks and 6 slots."""
    model = FakeModel(eos_bias=1.0, num_states=2, **MODELS[name])
    spec = model.kv_spec
    options = {"num_slots": 6, "max_drafts": 5, "prefix_cache_bytes": None}
    everything_at_once(model, 24 * spec.block_bytes + 6 * spec.slots(5).slot_bytes, options, seed)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(6))
def test_a_step_that_fails_leaves_no_slot(step: int) -> None:
    generator = make_generator(make_model("hybrid"), num_slots=5)
    calls = []

    def hook(batch) -> None:
        calls.append(0)
        if len(calls) == step + 1:
            raise RuntimeError("planted")

    generator.engine.model.hook = hook
    with pytest.raises(RuntimeError, match="planted"):
        generator.generate(random_prompts(5, 3), SamplingConfig(max_new_tokens=8))
    check_idle(generator)
    generate(generator, random_prompts(6, 3))
