"""Prefixes of texts are computed once. Reused positions have the same bits as computed ones, and no position of another
text is reused."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pace.batch import KVSpec, Positions
from pace.llm.cache.manager import CacheManager
from pace.llm.cache.prefix_cache import tokens_of
from pace.llm.clients.scoring import score
from pace.llm.clients.session import Session, logits_collector
from pace.llm.configs import SamplingConfig
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import StoppingCriteria
from tests.llm.fake_model import FakeModel, make_engine
from tests.llm.generators import by_hand, check_idle, generate, ids
from tests.llm.models.variants import VARIANTS, save_tiny
from tests.plugins.tiers import sample
from tests.support import backend, backends, load_model

SPEC = KVSpec((Positions(1, 2, 2),) * 2, torch.float32)
ON = {"prefix_cache_bytes": None}
"""Options for a prefix cache of the default size, a quarter of the cache."""


def prefix_generator(num_blocks: int = 1000, kept: int | None = None, **limits: int) -> Generator:
    """Returns a generator with a prefix cache of `kept` blocks, by default a quarter of all."""
    options = {"prefix_cache_bytes": kept and kept * SPEC.block_bytes}
    return Generator(make_engine(num_blocks, cache_options=options, **limits))


@pytest.mark.parametrize(("length", "reused"), [(100, 96), (97, 96), (96, 80), (81, 80), (16, 0), (17, 16), (5, 0)])
def test_a_prompt_that_was_there_is_computed_from_its_last_block_on(length: int, reused: int) -> None:
    generator, prompt = prefix_generator(), ids(1, length)
    first, computed = generate(generator, [prompt])
    assert (first.metrics.num_reused_tokens, computed) == (0, length + 7)
    assert "reused" not in str(first.metrics)
    second, computed = generate(generator, [prompt])
    assert (second.metrics.num_reused_tokens, computed) == (reused, length - reused + 7)
    assert second.metrics.prefill_tokens_per_second * second.metrics.seconds_to_first_token == pytest.approx(
        length - reused
    )
    assert f"{length} prompt ({reused} of them reused) +" in str(second.metrics) or not reused


def test_what_was_generated_is_known_too() -> None:
    """The second turn of a conversation reuses the generated tokens of the first."""
    generator = prefix_generator()
    first, _ = generate(generator, [ids(1, 30)], num_tokens=40)
    turn = ids(1, 30) + first.generated_token_ids[0] + ids(2, 20)
    second, computed = generate(generator, [turn], num_tokens=1)
    assert second.metrics.num_reused_tokens == 64, "69 positions were computed: the last generated token was not"
    assert computed == 90 - 64


def test_texts_that_differ_share_what_they_begin_with() -> None:
    generator, common = prefix_generator(), ids(1, 40)
    generate(generator, [common + ids(2, 30)])
    out, _ = generate(generator, [common + ids(3, 30), [7] + common])
    assert out.metrics.num_reused_tokens == 32, "and what comes at another position is another text"


def test_equal_prompts_in_a_batch_are_computed_about_once() -> None:
    generator, prompt = prefix_generator(max_tokens_per_step=64), ids(1, 200)
    _, computed = generate(generator, [prompt] * 4, num_tokens=1)
    assert computed == 200 + 3 * 8, "all but the last block is there when the others begin"


def test_what_two_texts_computed_at_once_is_held_once() -> None:
    generator, prompt = prefix_generator(), ids(1, 40)
    sessions = [Session(generator.driver) for _ in range(2)]
    sequences = [session._sequence for session in sessions]
    with by_hand(generator) as hand:
        for sequence in sequences:  # the same as `append` does before the step
            sequence.tokens, sequence.num_prompt_tokens = list(prompt), 40
            sequence.strategy = logits_collector(39, 1, hand.engine.model.vocab_size)
            hand.engine.scheduler.add(sequence)
        hand.step()
        assert [sequence.num_computed for sequence in sequences] == [40, 40]
        assert hand.engine.cache.used_bytes == 4 * SPEC.block_bytes, "two shared blocks, and one of each"
        hand.engine.check_idle()


def test_without_it_nothing_is_reused() -> None:
    generator = Generator(make_engine())
    for _ in range(2):
        out, computed = generate(generator, [ids(1, 100)])
        assert (out.metrics.num_reused_tokens, computed, generator.engine.cache.prefix_bytes) == (0, 107, 0)


PRESSURES = list(itertools.product([None, 1, 5, 14], range(4)))


@pytest.mark.parametrize("case", sample(PRESSURES, lambda case: case in PRESSURES[::5]), ids=str)
def test_reuse_under_pressure_changes_no_token(case: tuple[int | None, int]) -> None:
    """Prompts share prefixes, and the cache holds only a few of them, so blocks are taken from the prefix cache all the
    time."""
    kept, seed = case
    chance = random.Random(seed)
    generator = prefix_generator(14, kept, max_tokens_per_step=chance.choice([10, 33, 512]), max_sequences_per_step=4)
    stems = [ids(stem, 80) for stem in range(2)]
    reused = 0
    for _ in range(12):
        prompts = [
            chance.choice(stems)[: chance.randint(1, 80)] + ids(chance.randrange(3), chance.randint(0, 20))
            for _ in range(chance.randint(1, 5))
        ]
        out, _ = generate(generator, prompts, chance.randint(1, 40))
        reused += out.metrics.num_reused_tokens
        cache = generator.engine.cache
        assert cache.used_bytes == 0 and cache.prefix_bytes <= (kept or 3) * SPEC.block_bytes
    assert reused > 0


def test_who_was_preempted_finds_what_it_had_computed() -> None:
    prompts, computed = [ids(1, 60), ids(2, 60)], []
    for generator in (Generator(make_engine(10)), prefix_generator(10, kept=10)):
        out, count = generate(generator, prompts, num_tokens=50)
        computed.append(count)
        assert out.metrics.num_reused_tokens == 0, "of its prompt nothing was spared"
    assert 2 * 109 <= computed[1] < computed[0], "both computed something twice, with the prefix cache less"


def test_the_room_of_texts_at_work_is_not_the_prefix_caches() -> None:
    """Four blocks of an old text are idle. A new text that needs all blocks gets all of them."""
    generator = prefix_generator(8, kept=4)
    generate(generator, [ids(1, 70)], num_tokens=2)
    cache = generator.engine.cache
    assert cache.prefix_bytes == 4 * SPEC.block_bytes and cache.num_free_blocks == 8
    generate(generator, [ids(2, 100)], num_tokens=28)


def test_what_was_used_least_lately_goes_first_and_ends_before_beginnings() -> None:
    generator = prefix_generator(12, kept=12)
    old, new = ids(1, 65), ids(2, 65)
    generate(generator, [old], 1)
    generate(generator, [new], 1)
    generate(generator, [ids(3, 81)], 1)  # 6 blocks; 4 were free
    assert len(generator.engine.cache.pool.idle_blocks) == 11
    assert reusable(generator, old) == 32 and reusable(generator, new) == 64
    generate(generator, [old[:33]], 1)  # now the blocks of `new` are the oldest
    generate(generator, [ids(4, 100)], 1)  # 7 blocks; 1 is free
    assert reusable(generator, old) == 32 and reusable(generator, new) == 0


def reusable(generator: Generator, tokens: list[int]) -> int:
    """Returns the number of tokens that a text would reuse. Frees them again and restores the order of idle blocks."""

    def look(engine: Engine) -> int:
        sequence, before = Sequence(tokens, None, None, 4096), engine.cache.pool.idle_blocks
        engine.cache.reuse(sequence)
        found = sequence.num_computed
        engine.cache.free(sequence)
        engine.cache.pool._idle = dict.fromkeys(before)
        return found

    return generator.driver.call(look).result(60)


def test_the_budget_keeps_beginnings() -> None:
    generator, prompt = prefix_generator(100, kept=3), ids(1, 150)
    generate(generator, [prompt])
    assert generator.engine.cache.prefix_bytes == 3 * SPEC.block_bytes
    assert generate(generator, [prompt])[0].metrics.num_reused_tokens == 48


def test_a_hash_alone_finds_nothing() -> None:
    """Python's hash of an int is its remainder modulo 2**61 - 1. Texts with equal hashes in every block are still
    distinguished."""
    cache = CacheManager(SPEC, 100 * SPEC.block_bytes, prefix_cache_bytes=50 * SPEC.block_bytes)
    tokens = ids(1, 60)
    texts = [
        tokens,
        [token + 2**61 - 1 for token in tokens],
        tokens[:20] + [token + 2**61 - 1 for token in tokens[20:]],
    ]
    found = []
    for text in texts * 2:
        sequence = Sequence(text, None, None, 4096)
        assert [hash(tokens_of(sequence, index)) for index in range(3)] == [
            hash(tuple(tokens[i : i + 16])) for i in (0, 16, 32)
        ]
        cache.reuse(sequence)
        found.append(sequence.num_computed)
        assert cache.reserve(sequence, 60)
        cache.commit(sequence, 60)
        cache.publish(sequence)
        cache.check_integrity([sequence])
        cache.free(sequence)
    assert found == [0, 0, 16, 48, 48, 48]


# -- sessions, scores, errors ------------------------------------------------------------------------------------------


def expected(model: FakeModel, tokens: list[int], num_rows: int) -> torch.Tensor:
    return torch.stack([model.logits_of(tokens[: end + 1]) for end in range(len(tokens) - num_rows, len(tokens))])


def test_sessions_reuse_all_but_the_tokens_whose_logits_are_wanted() -> None:
    generator, computed, text = prefix_generator(), [], ids(1, 100)
    model = generator.engine.model
    model.hook = lambda batch: computed.append(len(batch.tokens))
    for wanted, num_computed in (("last", 100), ("last", 4), (20, 20), (21, 36), ("all", 100)):
        with Session(generator.driver) as session:
            num_rows = {"last": 1, "all": 100}.get(wanted, wanted)
            assert torch.equal(session.append(text, wanted), expected(model, text, num_rows))
        assert computed.pop() == num_computed and not computed
    score(generator.driver, [text])
    assert computed == [99], "the logits of every token that another follows are looked at"
    with Session(generator.driver) as session:
        session.append(text[:40])
        session.append(text[40:])
    assert computed[1:] == [8, 4], "what follows is found in the middle of a block as well"
    check_idle(generator)


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_session_that_goes_on_differently_spoils_nothing(is_forked: bool) -> None:
    generator, text = prefix_generator(), ids(1, 60)
    with Session(generator.driver) as session:
        session.append(text)
        twin = session.fork() if is_forked else None
        session.truncate(40)
        assert torch.equal(session.append([3] * 30, 30), expected(generator.engine.model, text[:40] + [3] * 30, 30))
        if twin:
            assert torch.equal(twin.append([4]), expected(generator.engine.model, text + [4], 1))
            twin.close()
    out, _ = generate(generator, [text, text[:40] + [3] * 30])
    assert out.metrics.num_reused_tokens == 48 + 64


def test_after_an_error_everything_is_computed_again() -> None:
    generator, prompt = prefix_generator(), ids(1, 50)
    generate(generator, [prompt])

    def fail(batch) -> None:
        raise RuntimeError("planted")

    generator.engine.model.hook = fail
    with pytest.raises(RuntimeError, match="planted"):
        generator.generate(prompt)
    assert generator.engine.cache.prefix_bytes == 0
    assert generate(generator, [prompt])[0].metrics.num_reused_tokens == 0


@pytest.mark.parametrize("damage", ["content", "order", "kept", "lost"])
def test_check_integrity_sees(damage: str) -> None:
    generator = prefix_generator()
    session = Session(generator.driver)
    session.append(ids(1, 60))
    generate(generator, [ids(2, 60)])
    cache, pool = generator.engine.cache, generator.engine.cache.pool
    if damage == "content":
        session._sequence.tokens[20] += 1
    elif damage == "order":
        pool._idle = dict.fromkeys(reversed(pool._idle))
    elif damage == "kept":
        pool._kept.remove(session._sequence.block_table[0])
    else:
        cache.prefix._nodes.pop(session._sequence.block_table[1])
    with pytest.raises(AssertionError):
        check_idle(generator, used_bytes=None)


# -- models with angles that depend on the length ----------------------------------------------------------------------


def test_texts_of_different_regimes_share_nothing() -> None:
    generator = prefix_generator()
    generator.engine.cache.prefix.rope_regime = lambda length: int(length > 40)
    text = ids(1, 80)
    reused = [generate(generator, [text[:length]], 1)[0].metrics.num_reused_tokens for length in (40, 60, 35, 70, 41)]
    assert reused == [0, 0, 32, 48, 32]


def engine_by_hand(num_blocks: int = 1000, kept: int | None = None) -> Engine:
    """Returns an engine like that of `prefix_generator`, for tests that step it themselves."""
    return make_engine(num_blocks, cache_options={"prefix_cache_bytes": kept and kept * SPEC.block_bytes})


def salted(engine: Engine, prompt: list[int], salt: str | None = None) -> int:
    """Runs the prompt under a salt, and returns the number of its tokens that were reused."""
    sequence = Sequence(prompt, Sampling(), StoppingCriteria(len(prompt) + 1, []), len(prompt) + 1)
    sequence.cache_salt = salt
    engine.submit([sequence])
    while not sequence.is_finished:
        engine.step()
    engine.check_idle()
    return sequence.stats.num_reused


def test_two_salts_never_share_a_block() -> None:
    engine, prompt = engine_by_hand(), ids(1, 50)
    assert [salted(engine, prompt, salt) for salt in (None, "a", "b", "", None, "a", "b", "")] == [0] * 4 + [48] * 4
    blocks = [block for node in engine.cache.prefix._nodes.values() for block in node.blocks]
    assert len(set(blocks)) == 4 * 3, "the three full blocks of each"


def test_a_request_has_the_salt_it_asks_for() -> None:
    generator, prompt, config = prefix_generator(), ids(1, 50), SamplingConfig(max_new_tokens=1)

    def reused(salt: str | None) -> int:
        return generator.add_request(prompt, config, cache_salt=salt).result().metrics.num_reused_tokens

    assert [reused(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 48, 48, 48]


def test_a_fork_has_the_salt_of_its_source() -> None:
    """A preempted fork finds its own text again, and texts with another salt do not find it."""
    generator, prompt = prefix_generator(), ids(1, 50)
    with Session(generator.driver) as session:
        session._sequence.cache_salt = "a"
        session.append(prompt)
        with session.fork() as twin:
            assert twin._sequence.cache_salt == "a"


def test_a_salt_is_forgotten_with_its_last_block() -> None:
    engine = engine_by_hand(8, 4)
    for number in range(20):
        salted(engine, ids(number, 33), salt=str(number))
    assert len(engine.cache.prefix._roots) <= 2, "four blocks are kept, two of a text"


@pytest.mark.parametrize(
    ("model_type", "special"),
    [("llama", "gqa"), ("llama", "dynamic-beyond"), ("llama", "dynamic-within"), ("llama", "longrope-long"),
     ("phi3", "longrope-long")],
)  # fmt: skip
@pytest.mark.skipif("native" not in backends(), reason="bits are promised for the kernels")
def test_logits_and_text_are_the_same_bits_with_and_without(tmp_path, model_type: str, special: str) -> None:
    """Prompts share prefixes. They are shorter and longer than the length at which the angles change (16, or 64 for
    dynamic-within), and some texts grow past it."""
    save_tiny(
        tmp_path, model_type, next(fields for name, what, fields in VARIANTS if (name, what) == (model_type, special))
    )
    native = backend("native")
    model = load_model(tmp_path, torch.float32, native)
    text = torch.randint(2, 99, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    kept, reused = Generator(Engine.create(model, native, 1 << 22, cache_options=ON)), 0
    for length in (60, 12, 50, 40, 16, 60, 33):
        fresh = Generator(Engine.create(model, native, 1 << 22))
        rows = [
            torch.cat([session.append(text[:length], min(length, 5)), session.append([5, 7, 9], "all")])
            for session in (Session(kept.driver), Session(fresh.driver))
        ]
        assert torch.equal(*rows)
        config = SamplingConfig(
            max_new_tokens=64 - length if special == "dynamic-within" else 20,
            do_sample=True,
            seed=length,
            logprobs=3,
            ignore_eos=True,
        )
        outs = [generator.generate(text[:length], config) for generator in (kept, fresh)]
        assert outs[0].generated_token_ids == outs[1].generated_token_ids and outs[0].logprobs == outs[1].logprobs
        reused += outs[0].metrics.num_reused_tokens
        check_idle(kept)
    assert reused > 0


@pytest.mark.skipif("native" not in backends(), reason="bits are promised for the kernels")
@pytest.mark.parametrize("special", ["dynamic-beyond", "longrope-long"])
def test_a_session_that_was_cut_back_has_the_same_logits_when_its_cache_was_dropped(tmp_path, special: str) -> None:
    save_tiny(tmp_path, "llama", next(fields for name, what, fields in VARIANTS if (name, what) == ("llama", special)))
    native = backend("native")
    model = load_model(tmp_path, torch.float32, native)
    rows = []
    for drops in (False, True):
        driver = EngineDriver(Engine.create(model, native, 1 << 22))
        session = Session(driver)
        session.append(list(range(5, 45)))
        session.truncate(10)
        if drops:
            driver.call(lambda engine, dropped=session._sequence: engine.cache.free(dropped)).result(60)
        rows.append(session.append([50, 51, 52], "all"))
    assert torch.equal(*rows)
