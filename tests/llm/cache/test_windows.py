"""Layers with a window give back what no later position sees: the same bits, in less memory, whatever happens to a
sequence meanwhile."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pace.batch import BLOCK_SIZE, KVSpec, Latent, Positions
from pace.llm.cache.groups import by_lifetime, first_kept, most_blocks, most_kept, most_tokens
from pace.llm.cache.manager import CacheManager
from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sequence import Sequence
from tests.llm.cache.test_allocators import everything_at_once
from tests.llm.fake_model import OPS, FakeModel, greedy
from tests.llm.generators import check_idle

WINDOWS = {
    "half": (None, 20, None, 20),
    "most": (None, 20, 20, 20),
    "short": (None, 5, 5),
    "two windows": (None, 7, 40, 40),
    "blocks": (None, 32, 32),
    "all": (20, 20),
    "all short": (3, 3),
    "all, two windows": (33, 9),
}


def groups_of(*windows: int | None, layer: Positions | None = None) -> list[tuple[int, int | None]]:
    """How many layers are in a group, and its window."""
    layer = layer or Positions(2, 8, 8)
    layers = tuple(Positions(layer.kv_heads, layer.key_dim, layer.value_dim, window) for window in windows)
    return [(len(group.layers), group.window) for group in by_lifetime(KVSpec(layers, torch.float32)).groups]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_layers_of_one_lifetime_are_in_groups_of_about_equal_size() -> None:
    assert groups_of(*[128, None] * 12) == [(12, None), (12, 128)]  # gpt-oss
    assert groups_of(*[4096] * 32) == [(32, 4096)]  # Mistral 7B v0.1
    assert groups_of(*[None] * 24) == [(24, None)]
    gemma_27b = groups_of(*[None if index % 6 == 5 else 1024 for index in range(62)])
    assert gemma_27b == [(10, None), *((count, 1024) for count in (10, 10, 11, 10, 11))]
    gemma_1b = groups_of(*[None if index % 6 == 5 else 512 for index in range(26)])
    assert gemma_1b == [(4, None), *((count, 512) for count in (3, 4, 4, 3, 4, 4))]
    assert groups_of(*[None] * 21, *[4096] * 7) == [(7, None)] * 3 + [(7, 4096)]
    assert groups_of(None, 7, 40, 40) == [(1, None), (1, 7), (1, 40), (1, 40)]


def test_layers_stay_together_where_that_saves_nothing() -> None:
    one_small = (Positions(8, 64, 64), Positions(1, 4, 4, window=16))
    assert len(by_lifetime(KVSpec(one_small, torch.float32)).groups) == 1
    assert by_lifetime(KVSpec(one_small, torch.float32)).groups[0].window is None
    latents = (Latent(32, 8), None, Latent(32, 8))
    assert by_lifetime(KVSpec(latents, torch.float32)) == KVSpec(latents, torch.float32)


def test_every_layer_is_in_one_group_and_groups_share_the_bytes_of_a_block() -> None:
    layers = (Positions(3, 5, 5), None, Positions(1, 20, 33, window=7), Positions(3, 5, 5, window=7), Latent(40, 6))
    spec = by_lifetime(KVSpec(layers, torch.int8))
    assert sorted(index for group in spec.groups for index in group.layers) == [0, 2, 3, 4]
    assert spec.block_bytes < KVSpec(layers, torch.int8).block_bytes
    kv = spec.allocate(3)
    assert kv[1] is None and kv[2].v.shape == (3, 1, 16, 48) and kv[2].value_dim == 33
    for number, group in enumerate(spec.groups):
        tensors = [tensor for index in group.layers for tensor in kv[index].tensors]
        assert all(kv[index].group == number for index in group.layers)
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        assert all((tensor == value).all() for value, tensor in enumerate(tensors)), "two layers share bytes"
        assert sum(tensor[0].nbytes for tensor in tensors) <= spec.block_bytes


@pytest.mark.parametrize("step_tokens", [1, 7, 64])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 31, 100])
def test_a_window_and_a_step_never_take_more_than_is_counted(window: int, step_tokens: int) -> None:
    most = max(-(-(start + step_tokens) // BLOCK_SIZE) - first_kept(start, window) for start in range(2 * window + 100))
    assert most == most_kept(window, step_tokens)


def test_capacity_is_what_fits() -> None:
    spec = by_lifetime(FakeModel(windows=WINDOWS["half"]).kv_spec)
    for num_blocks in (2, 3, 9, 14, 40):
        tokens = most_tokens(spec, num_blocks, 7)
        assert most_blocks(spec, tokens, 7) <= num_blocks < most_blocks(spec, tokens + 1, 7)
    assert most_tokens(by_lifetime(FakeModel(windows=(20, 20)).kv_spec), 9, 7) > 10**9


# -- books -------------------------------------------------------------------------------------------------------------


class WindowMachine(RuleBasedStateMachine):
    """Any order of the verbs, with a prefix cache or without: a sequence has what its next positions see, and every
    block holds what its tokens say."""

    windows = WINDOWS["half"]
    prefix_blocks = 9
    num_blocks = 24

    def __init__(self) -> None:
        super().__init__()
        self.spec = by_lifetime(FakeModel(windows=self.windows).kv_spec)
        self.cache = CacheManager(
            FakeModel(windows=self.windows).kv_spec,
            self.num_blocks * self.spec.block_bytes,
            prefix_cache_bytes=self.prefix_blocks * self.spec.block_bytes,
            step_tokens=30,
        )
        self.sequences: list[Sequence] = []

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.sequences))

    @rule(stem=st.integers(0, 1), length=st.integers(1, 120), split=st.integers(0, 120))
    def begin(self, stem: int, length: int, split: int) -> None:
        """Two stems, each left at some place."""
        tokens = [stem + (position >= split) for position in range(length)]
        self.sequences.append(Sequence(tokens, None, None, 4096))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 30), is_admitted=st.booleans())
    def compute(self, data: st.DataObject, count: int, is_admitted: bool) -> None:
        sequence = self.pick(data)
        self.cache.reuse(sequence)
        self.check(sequence)
        needed = self.cache.blocks_needed(sequence, len(sequence.tokens))
        if is_admitted:
            fits = needed <= self.cache.num_free_blocks
            assert self.cache.admit(sequence, len(sequence.tokens)) == fits
            if fits:  # then all steps of this sequence find room
                free = self.cache.num_free_blocks
                while sequence.num_computed < len(sequence.tokens):
                    assert self.step(sequence, count)
                assert self.cache.num_free_blocks >= free or self.prefix_blocks or len(self.sequences) > 1
        else:
            self.step(sequence, count)

    def step(self, sequence: Sequence, count: int) -> bool:
        end = min(sequence.num_computed + count, len(sequence.tokens))
        if not self.cache.reserve(sequence, end):
            return False
        for kv in self.cache.kv:
            for position in range(sequence.num_computed, end):
                block = sequence.block_tables[kv.group][position // BLOCK_SIZE]
                kv.k[block, 0, 0, position % BLOCK_SIZE] = self.content(sequence, position)
        self.cache.commit(sequence, end)
        self.cache.publish(sequence)
        return True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), least=st.sampled_from([0, 0.5, 0.9]))
    def truncate(self, data: st.DataObject, least: float) -> None:
        sequence = self.pick(data)
        length = data.draw(st.integers(int(least * len(sequence.tokens)), len(sequence.tokens)))
        self.cache.truncate(sequence, length)
        assert sequence.num_computed <= length
        sequence.tokens[length:] = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 40))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self.pick(data)
        target = Sequence(source.tokens, None, None, 4096)
        count = data.draw(st.integers(0, source.num_computed))
        self.cache.fork(source, target, count)
        assert target.num_computed in (0, count)
        self.sequences.append(target)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.sequences.remove(sequence)
        self.cache.free(sequence)
        assert not self.cache.blocks_held(sequence)

    @precondition(lambda self: self.sequences)
    @rule()
    def drop(self) -> None:
        self.cache.reset(self.sequences)

    def content(self, sequence: Sequence, position: int) -> float:
        """What a model would store, which depends on all tokens so far: here, exactly representable."""
        return float(hash(tuple(sequence.tokens[: position + 1])) % 2**20)

    def check(self, sequence: Sequence) -> None:
        """All that the next position sees is there."""
        for kv, layer in zip(self.cache.kv, self.spec.layers):
            table, window = sequence.block_tables[kv.group] if sequence.num_computed else [], layer.window
            first = 0 if window is None else max(0, sequence.num_computed - window + 1)
            for position in range(first, sequence.num_computed):
                block = table[position // BLOCK_SIZE]
                assert block >= 0, "a block is gone that is still seen"
                assert kv.k[block, 0, 0, position % BLOCK_SIZE] == self.content(sequence, position)

    @invariant()
    def books_and_content_are_right(self) -> None:
        self.cache.check_integrity(self.sequences)
        for sequence in self.sequences:
            self.check(sequence)


def machine(name: str, prefix: int) -> type:
    kind = type("Machine", (WindowMachine,), {"windows": WINDOWS[name], "prefix_blocks": prefix})
    kind.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
    return kind.TestCase


TestHalf = machine("half", 9)
TestMost = machine("most", 11)
TestTwoWindows = machine("two windows", 5)
TestAll = machine("all", 6)
TestAllShort = machine("all short", 3)
TestAllOfTwoWindows = machine("all, two windows", 8)
TestWithoutPrefixCache = machine("half", 0)


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, None])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once_leaks_nothing_and_changes_no_token(name: str, seed: int, prefix: int | None) -> None:
    model = FakeModel(eos_bias=1.0, windows=WINDOWS[name])
    spec = by_lifetime(model.kv_spec)
    num_blocks = most_blocks(spec, 200, 64) + 3
    everything_at_once(model, num_blocks * spec.block_bytes, {"prefix_cache_bytes": prefix}, seed)


def make_generator(name: str, num_blocks: int = 1000, prefix: int | None = 0, **limits: int) -> Generator:
    """`num_blocks` of the groups."""
    model = FakeModel(eos_bias=-50.0, windows=WINDOWS[name])
    num_bytes = num_blocks * by_lifetime(model.kv_spec).block_bytes
    return Generator(Engine.create(model, OPS, num_bytes, cache_options={"prefix_cache_bytes": prefix}, **limits))


def ids(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, 50) for _ in range(length)]


def generate(generator: Generator, prompts: list[list[int]], num_tokens: int = 8):
    """Checks the tokens by the definition; returns the output and the number of tokens that were computed."""
    computed, model = [], generator.engine.model
    model.hook = lambda batch: computed.append(len(batch.tokens))
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=num_tokens))
    assert out.generated_token_ids == [greedy(model, prompt, num_tokens) for prompt in prompts]
    check_idle(generator, used_bytes=None)
    return out, sum(computed)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_long_text_takes_a_window_of_the_layers_that_have_one(name: str) -> None:
    generator = make_generator(name, max_tokens_per_step=32)
    cache = generator.engine.cache
    generate(generator, [ids(1, 700)], 100)
    groups = cache.spec.groups
    most = sum(50 if group.window is None else most_kept(group.window, 32) for group in groups)
    assert cache.touched_bytes <= most * cache.spec.block_bytes == cache.bytes_for(800)
    kept = len(WINDOWS[name]) * 50 * by_lifetime(KVSpec(cache.spec.layers[:1], torch.float32)).block_bytes
    assert cache.touched_bytes < 0.8 * kept, "of what all positions take"


@pytest.mark.parametrize("name", ["all", "all short", "all, two windows"])
def test_where_all_layers_have_a_window_a_text_may_be_longer_than_the_pool(name: str) -> None:
    generator = make_generator(name, 12, max_tokens_per_step=16)
    pool = 12 * BLOCK_SIZE
    out, _ = generate(generator, [ids(1, 4 * pool), ids(2, 3 * pool), ids(3, 20)], 30)
    assert out.finish_reasons == ["length"] * 3


def test_a_text_that_does_not_fit_is_refused_and_told_what_would() -> None:
    generator = make_generator("half", 30, max_tokens_per_step=16)
    engine = generator.engine
    assert engine.max_length == engine.cache.capacity == (30 - most_kept(20, 16)) * BLOCK_SIZE
    generate(generator, [ids(1, engine.max_length - 9)], 9)
    with pytest.raises(ValueError, match="kv_cache_bytes=") as error:
        generator.generate(ids(1, engine.max_length + 1))
    wanted = int(str(error.value).split("kv_cache_bytes=")[1].split()[0])
    assert wanted == engine.cache.bytes_for(engine.max_length + 2) or wanted == engine.cache.bytes_for(
        engine.max_length + 1
    )


@pytest.mark.parametrize("name", WINDOWS)
def test_a_session_that_goes_back_beyond_a_window_computes_again(name: str) -> None:
    for prefix in (0, None):
        generator = make_generator(name, prefix=prefix, max_tokens_per_step=24)
        model, text = generator.engine.model, ids(1, 300)
        with Session(generator.driver) as session:
            session.append(text)
            for length in (299, 270, 120, 5, 0):
                session.truncate(length)
                twin = session.fork()
                tokens = text[:length] + ids(length, 9)
                expected = torch.stack([model.logits_of(tokens[: length + count]) for count in range(1, 10)])
                assert torch.equal(session.append(tokens[length:], "all"), expected)
                assert torch.equal(twin.append(tokens[length:], "all"), expected)
                twin.close()
                session.truncate(length)
                session.append(text[length:])
        check_idle(generator)


@pytest.mark.parametrize("prefix", [0, None])
@pytest.mark.parametrize("windows", [(None, None), *WINDOWS.values()], ids=str)
def test_a_session_as_long_as_the_pool_may_be_cut_back_and_go_on(
    windows: tuple[int | None, ...], prefix: int | None
) -> None:
    """Into blocks that the prefix cache knows: nothing is free for a copy of them."""
    model = FakeModel(eos_bias=-50.0, windows=windows)
    num_bytes = 24 * by_lifetime(model.kv_spec).block_bytes
    engine = Engine.create(model, OPS, num_bytes, cache_options={"prefix_cache_bytes": prefix}, max_tokens_per_step=16)
    generator = Generator(engine)
    length = min(engine.max_length, 600)
    text = ids(1, length)
    with Session(generator.driver) as session:
        session.append(text)
        for cut in (3, 1, 17, 20):
            session.truncate(length - cut)
            begin, strategy = session._plan(tokens := ids(cut, cut), "all")
            generator.driver.call(begin).result(20)
            expected = [model.logits_of(text[: length - cut] + tokens[:count]) for count in range(1, cut + 1)]
            assert torch.equal(strategy.outcome.result(20), torch.stack(expected))
            text[length - cut :] = tokens
    check_idle(generator)


# -- the prefix cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWS)
def test_what_was_computed_is_found_again(name: str) -> None:
    generator = make_generator(name, prefix=None)
    text = ids(1, 200)
    generate(generator, [text])
    out, computed = generate(generator, [text])
    assert out.metrics.num_reused_tokens == 192 and computed == 16 - 1
    out, _ = generate(generator, [text[:100] + ids(2, 50)])
    assert out.metrics.num_reused_tokens == 96, "where the text was left, the windows of then are still known"


def test_a_lost_block_of_a_window_leaves_what_stands_behind_it() -> None:
    generator = make_generator("half", prefix=None)
    engine, text = generator.engine, ids(1, 200)
    generate(generator, [text])
    [node] = [node for node in engine.cache.prefix._nodes.values() if node.tokens == tuple(text[80:96])][:1]

    def lose(engine: Engine) -> None:
        pool, block = engine.cache.pool, node.blocks[1]
        pool._idle = {block: None} | pool._idle  # as if it had been idle for longest
        pool._drop_idle()

    generator.driver.call(lose).result(60)
    assert node.blocks[0] >= 0 and node.blocks[1] == -1
    short = [generate(generator, [text[:length]], 1)[0].metrics.num_reused_tokens for length in (97, 81)]
    assert short == [80, 80], "the first 96 tokens lack what the next one sees"
    assert node.blocks[1] >= 0, "it was computed again"
    assert generate(generator, [text], 1)[0].metrics.num_reused_tokens == 192


def test_a_lost_block_of_all_positions_takes_the_others_along() -> None:
    generator = make_generator("half", prefix=None)
    engine, text = generator.engine, ids(1, 64)
    generate(generator, [text], 1)
    cache = engine.cache
    [node] = [node for node in cache.prefix._nodes.values() if node.tokens == tuple(text[48:])][:1]
    assert min(node.blocks) >= 0

    def lose(engine: Engine) -> None:
        pool, block = engine.cache.pool, node.blocks[0]
        pool._idle = {block: None} | pool._idle
        pool._drop_idle()

    kept = cache.pool.num_kept
    generator.driver.call(lose).result(60)
    assert node.blocks == [-1, -1] and cache.pool.num_kept == kept - 2
    check_idle(generator)


def test_nodes_without_blocks_go_with_the_last_behind_them() -> None:
    generator = make_generator("all short", prefix=None, max_tokens_per_step=24)
    engine = generator.engine
    for seed in range(4):
        generate(generator, [ids(seed, 100)], 1)

    def lose_all(engine: Engine) -> int:
        while engine.cache.pool.num_idle:
            engine.cache.pool._drop_idle()
            engine.cache.check_integrity([])
        return len(engine.cache.prefix._roots)

    assert generator.driver.call(lose_all).result(60) == 0 and not engine.cache.prefix._nodes
