"""Models with windows on the kernels. Freeing positions outside the window changes no bit of logits or texts, compared
with a cache that keeps every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
from pace.llm.cache.groups import by_lifetime, most_kept
from pace.llm.clients.session import Session
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.runners import make_runner
from pace.llm.speculation.draft_length import FixedLength
from pace.llm.speculation.drafter import SpeculativeDrafter
from pace.llm.speculation.prompt_lookup import PromptLookup
from pace.ops import native
from tests.llm.generators import check_idle
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample
from tests.support import load_model

pytest.importorskip("transformers")

STEP, POSITIONS = 24, 512
KEPT = {"kv_cache_type": "bmc"}
"""A policy that keeps all positions in one group."""

ALWAYS = ("gemma4_text", "gpt_oss", "mistral", "llama4_text")
"""Models where layers differ in widths and share keys, some have windows, all have, or some have chunks.
test_windows.py has other lengths."""
MODELS = {
    "gpt_oss": {"sliding_window": 19, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma3_text": {"sliding_window": 7},
    "gemma4_text": {"sliding_window": 19, "num_hidden_layers": 9, "layer_types": None, "num_kv_shared_layers": 2},
    "mistral": {"sliding_window": 40},
    "cohere2": {"sliding_window": 32},
    "llama4_text": {"attention_chunk_size": 19},
}


@pytest.fixture(scope="module", params=sample(list(MODELS), lambda name: name in ALWAYS))
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param, MODELS[request.param] | {"max_position_embeddings": POSITIONS})
    return folder


def generator(folder, kv_dtype=torch.float32, backend="native", blocks=None, drafter=None, **options) -> Generator:
    """Returns a generator whose pool has `blocks` blocks of the layer groups, by default plenty."""
    model = load_model(folder, torch.float32, native)
    model.kv_dtype = kv_dtype
    cache_bytes = 1 << 24 if blocks is None else blocks * by_lifetime(model.kv_spec).block_bytes
    runner = make_runner(model, backend)
    return Generator(
        Engine.create(runner, native, cache_bytes, drafter, cache_options=options, max_tokens_per_step=STEP)
    )


def text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def most_needed(folder, length: int) -> int:
    """Returns the largest number of blocks that one sequence of this length needs."""
    spec = by_lifetime(load_model(folder, torch.float32, native).kv_spec)
    whole = -(-length // 16)
    return sum(whole if group.window is None else min(whole, most_kept(group.window, STEP)) for group in spec.groups)


def check_sessions(
    generators: list[Generator], length: int, num_logits: int, cuts: Sequence[int], used_bytes: int | None = 0
) -> None:
    """Sessions of generators with different caches have the same logits. They prefill a text of this length in chunks,
    add single tokens, and then for each of `cuts` truncate, fork and go on."""
    sessions = [Session(each.driver) for each in generators]

    def same(rows: list[torch.Tensor]) -> None:
        assert all(torch.equal(rows[0], row) for row in rows[1:]) and rows[0].isfinite().all()

    same([session.append(text(length), num_logits) for session in sessions])
    for token in text(6, 2):
        same([session.append([token]) for session in sessions])
    for cut in cuts:
        for session in sessions:
            session.truncate(cut)
        twins = [session.fork() for session in sessions]
        same([session.append(text(40, cut), "all") for session in sessions])
        same([twin.append(text(9, cut + 1), "all") for twin in twins])
        for twin in twins:
            twin.close()
    for session, each in zip(sessions, generators):
        session.close()
        check_idle(each, used_bytes)


def check_competition(
    plain: Generator,
    small: list[Generator],
    prompts: list[list[int]],
    lengths: tuple[int, int, int],
    used_bytes: int | None = 0,
) -> None:
    """Greedy, sampled and beam search texts of these lengths are the same with small caches, where they are preempted,
    drafted for and reused."""
    greedy, sampled, beams = lengths
    ends = {"ignore_eos": True, "logprobs": 1}
    num_preemptions = num_reused = num_accepted = 0
    for config in (
        SamplingConfig(max_new_tokens=greedy, **ends),
        SamplingConfig(max_new_tokens=sampled, **ends, do_sample=True, seed=3, num_return_sequences=3),
        SamplingConfig(max_new_tokens=beams, ignore_eos=True, num_beams=3, num_return_sequences=2),
    ):
        expected = plain.generate(prompts, config)
        for each in small:
            out = each.generate(prompts, config)
            assert out.generated_token_ids == expected.generated_token_ids and out.logprobs == expected.logprobs
            num_preemptions += out.metrics.num_preemptions
            num_reused += out.metrics.num_reused_tokens
            num_accepted += out.metrics.num_accepted_tokens
            check_idle(each, used_bytes)
    assert num_preemptions and num_reused and num_accepted


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_logits_of_sessions_that_grow_are_cut_back_and_forked(checkpoint, kv_dtype) -> None:
    """They are truncated by a few tokens and by many. Also with a prefix cache."""
    generators = [generator(checkpoint, kv_dtype, **options) for options in (KEPT, {"prefix_cache_bytes": None}, {})]
    check_sessions(generators, 290, 170, (292, 285, 150, 33))


def test_texts_that_compete_for_a_small_pool(checkpoint) -> None:
    """One of the small pools runs op by op, with the same bits as the program."""
    prompts = [text(length, length) for length in (150, 90, 170, 17)] + [text(150, 150)[:120] + text(9)]
    blocks = most_needed(checkpoint, 220) + 6
    drafter = SpeculativeDrafter(PromptLookup(1, 3), FixedLength(5), 5)
    small = [
        generator(checkpoint, backend=backend, blocks=blocks, prefix_cache_bytes=prefix, drafter=drafts)
        for backend, prefix, drafts in (("native", 0, drafter), ("native-eager", None, None))
    ]
    check_competition(generator(checkpoint, **KEPT), small, prompts, (30, 20, 17))


def test_a_long_text_takes_less_memory(checkpoint) -> None:
    kept, windowed = generator(checkpoint, **KEPT), generator(checkpoint)
    config = SamplingConfig(max_new_tokens=60, ignore_eos=True)
    texts = [each.generate(text(430), config).generated_token_ids for each in (kept, windowed)]
    assert texts[0] == texts[1]
    cache = windowed.engine.cache
    assert cache.touched_bytes <= cache.bytes_for(490) < 0.75 * kept.engine.cache.bytes_for(490)


def test_a_text_four_times_as_long_as_the_pool(tmp_path) -> None:
    save_tiny(tmp_path, "mistral", {"sliding_window": 19, "max_position_embeddings": POSITIONS})
    tiny, kept = generator(tmp_path, blocks=7), generator(tmp_path, **KEPT)
    config = SamplingConfig(max_new_tokens=48, ignore_eos=True, logprobs=1)
    outs = [each.generate([text(400), text(9)], config) for each in (tiny, kept)]
    assert outs[0].generated_token_ids == outs[1].generated_token_ids and outs[0].logprobs == outs[1].logprobs
    assert 400 + 48 == 4 * tiny.engine.cache.num_blocks * 16


def test_a_batch_without_the_tables_of_a_group_is_refused(tmp_path) -> None:
    save_tiny(tmp_path, "gemma3_text", MODELS["gemma3_text"])
    each = generator(tmp_path)
    forward = each.engine.model.forward
    each.engine.model.forward = lambda batch: forward(replace(batch, others=()))
    with pytest.raises(ValueError, match="groups of layers, the batch has tables for 1"):
        each.generate(text(9), SamplingConfig(max_new_tokens=2))


def test_a_block_that_is_still_seen_must_be_there(tmp_path) -> None:
    """A block table without a block of the window is refused. Blocks before the window are ignored."""
    save_tiny(tmp_path, "mistral", {"sliding_window": 19, "max_position_embeddings": POSITIONS})
    each = generator(tmp_path)
    forward, lost = each.engine.model.forward, []

    def lose(batch):
        table = batch.spans.block_table.clone()
        table[0, : lost[0]] = -1
        return forward(replace(batch, spans=replace(batch.spans, block_table=table)))

    with Session(each.driver) as session:
        session.append(text(48))
        expected = session.append([5])  # position 48 attends to 30 .. 48
        session.truncate(48)
        each.engine.model.forward, lost[:] = lose, [1]
        assert torch.equal(session.append([5]), expected)
        session.truncate(48)
        lost[:] = [2]
        with pytest.raises(ValueError, match="entry 1 of the block table is -1"):
            session.append([5])


def test_models_without_windows_keep_one_group() -> None:
    with LLMModel(TINY, progress=False) as model:
        cache = model._engine.cache
        assert len(cache.spec.groups) == 1 and cache.spec == model._model.kv_spec
        assert cache.bytes_for(1000) == 63 * cache.spec.block_bytes
