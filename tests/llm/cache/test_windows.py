"""Layers with a window free blocks that no later position attends to. The bits stay the same in less memory, also when
sequences are cut, forked or preempted."""

from __future__ import annotations

import itertools

import pytest
import torch

from pace.batch import BLOCK_SIZE, Group, KVSpec, Latent, Positions, Shares
from pace.llm.cache.groups import by_lifetime, first_kept, most_blocks, most_kept, most_tokens
from pace.llm.cache.manager import CacheManager
from pace.llm.clients.session import Session
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sequence import Sequence
from tests.llm.cache.test_allocators_at_work import everything_at_once
from tests.llm.fake_model import OPS, FakeModel
from tests.llm.generators import check_idle, generate, ids
from tests.plugins.tiers import sample
from tests.waiting import PATIENCE

WINDOWS = {
    "half": (None, 20, None, 20), "most": (None, 20, 20, 20), "short": (None, 5, 5), "two windows": (None, 7, 40, 40),
    "blocks": (None, 32, 32), "all": (20, 20), "all short": (3, 3), "all, two windows": (33, 9),
}  # fmt: skip
"""Windows of the layers of a model, by name."""


def groups_of(*windows: int | None, layer: Positions | None = None) -> list[tuple[int, int | None]]:
    """Returns the number of layers and the window of each group."""
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


def test_layers_of_two_widths_are_in_groups_of_about_equal_bytes() -> None:
    """Gemma 4 E2B has heads of 256 or 512 elements, and 26B-A4B has 8 or 2 of these. The last layers of E2B keep
    nothing."""
    few = tuple(Positions(1, 512, 512) if index % 5 == 4 else Positions(1, 256, 256, 512) for index in range(15))
    spec = by_lifetime(KVSpec((*few, *[Shares(13), Shares(14)] * 10), torch.bfloat16))
    assert [(len(group.layers), group.window) for group in spec.groups] == [(3, None), (6, 512), (6, 512)]
    assert {spec.content_bytes(group) for group in spec.groups} == {16 * 3 * 2048}
    many = tuple(Positions(2, 512, 512) if index % 6 == 5 else Positions(8, 256, 256, 1024) for index in range(30))
    spec = by_lifetime(KVSpec(many, torch.bfloat16))
    assert spec.groups[0] == Group((5, 11, 17, 23, 29), None) and spec.groups[1].window == 1024
    assert spec.group_bytes <= 1.2 * 5 * 4096


def test_layers_that_share_keys_have_the_blocks_of_others() -> None:
    layers = (Positions(2, 8, 8, 5), Positions(2, 8, 8), Shares(0), Shares(1))
    kv = KVSpec(layers, torch.float32).allocate(2)
    assert kv[2] is kv[0] and kv[3] is kv[1]
    with pytest.raises(ValueError, match="layer 1 can only share keys and values that layer 0 keeps"):
        KVSpec((None, Shares(0), Positions(1, 4, 4)), torch.float32)


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


def test_a_window_and_a_step_never_take_more_than_is_counted() -> None:
    for window, step in itertools.product([1, 15, 16, 17, 31, 100], [1, 7, 64]):
        most = max(-(-(start + step) // BLOCK_SIZE) - first_kept(start, window) for start in range(2 * window + 100))
        assert most == most_kept(window, step), f"window {window}, {step} tokens a step"


def test_capacity_is_what_fits() -> None:
    spec = by_lifetime(FakeModel(windows=WINDOWS["half"]).kv_spec)
    for num_blocks in (2, 3, 9, 14, 40):
        tokens = most_tokens(spec, num_blocks, 7)
        assert most_blocks(spec, tokens, 7) <= num_blocks < most_blocks(spec, tokens + 1, 7)
    assert most_tokens(by_lifetime(FakeModel(windows=(20, 20)).kv_spec), 9, 7) > 10**9


def test_blocks_that_another_holds_too_are_room_for_neither() -> None:
    """A fork that frees blocks it shares gains no room. An admitted sequence still gets all blocks it needs."""
    spec = FakeModel(windows=(40, 40)).kv_spec
    outcomes = []
    for num_blocks in range(6, 16):
        cache = CacheManager(spec, num_blocks * spec.block_bytes, step_tokens=16)
        source, target = (Sequence([1] * length, None, None, 400) for length in (48, 300))
        assert cache.reserve(source, 48)
        cache.commit(source, 48)
        cache.fork(source, target, 48)
        outcomes.append(cache.admit(target, 300))
        while outcomes[-1] and target.num_computed < 300:
            end = min(300, target.num_computed + 16)
            assert cache.reserve(target, end), f"{num_blocks} blocks, {target.num_computed} computed"
            cache.commit(target, end)
            cache.check_integrity([source, target])
    assert outcomes == sorted(outcomes) and set(outcomes) == {False, True}


# -- the engine --------------------------------------------------------------------------------------------------------


CASES = list(itertools.product(WINDOWS, [0, None], range(2)))


@pytest.mark.parametrize("case", sample(CASES, lambda case: case in CASES[::3]), ids=str)
def test_everything_at_once_leaks_nothing_and_changes_no_token(case: tuple[str, int | None, int]) -> None:
    name, prefix, seed = case
    model = FakeModel(eos_bias=1.0, windows=WINDOWS[name])
    spec = by_lifetime(model.kv_spec)
    num_blocks = most_blocks(spec, 200, 64) + 3
    everything_at_once(model, num_blocks * spec.block_bytes, {"prefix_cache_bytes": prefix}, seed)


def make_generator(name: str, num_blocks: int = 1000, prefix: int | None = 0, **limits: int) -> Generator:
    """Returns a generator with `num_blocks` blocks of the layer groups."""
    model = FakeModel(eos_bias=-50.0, windows=WINDOWS[name])
    num_bytes = num_blocks * by_lifetime(model.kv_spec).block_bytes
    return Generator(Engine.create(model, OPS, num_bytes, cache_options={"prefix_cache_bytes": prefix}, **limits))


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
    """The session is cut back into blocks that the prefix cache also holds, with no free block for a copy."""
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
            generator.driver.call(begin).result(PATIENCE)
            expected = [model.logits_of(text[: length - cut] + tokens[:count]) for count in range(1, cut + 1)]
            assert torch.equal(strategy.outcome.result(PATIENCE), torch.stack(expected))
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
        pool._idle = {block: None} | pool._idle  # as if it had been idle the longest
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
