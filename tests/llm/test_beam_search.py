"""Beam search: the texts and scores of transformers, whatever the batch, the cache and the interruptions."""

from __future__ import annotations

import functools
import io
import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.llm import beam_oracle as oracle
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, greedy

from pace.llm import CallbackStreamer, LLMModel, SamplingConfig, TextStreamer
from pace.llm.beam_search import BeamSearch
from pace.llm.block_pool import BlockPool
from pace.llm.cache import CacheManager
from pace.llm.engine import Engine
from pace.llm.generator import Generator
from pace.llm.logits import largest
from pace.llm.session import Session
from tests.support import backends

BACKENDS = [{"reference": "torch"}.get(name, name) for name in backends()]
BEAMS = SamplingConfig(num_beams=4, num_return_sequences=3, max_new_tokens=20)


def make_generator(num_blocks: int = 1000, model: FakeModel | None = None, **limits: Any) -> Generator:
    model = model or FakeModel(eos_bias=1.0)
    return Generator(Engine.create(model, OPS, num_blocks * model.kv_spec.block_bytes, **limits), FakeTokenizer(), SamplingConfig(eos_token_id=0))


def random_prompts(seed: int, count: int, longest: int = 70) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1, 50) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def rows_of(out) -> list[tuple]:
    return list(zip(out.generated_token_ids, out.finish_reasons, out.sequence_scores))


def searches_of(generator: Generator, prompts: list[list[int]], config: SamplingConfig = BEAMS) -> list[BeamSearch]:
    prepared = generator.prepare_for_generate(prompts, config)
    return [generator._search_of(prepared, index) for index in range(len(prompts))]


def rows_found(searches: list[BeamSearch]) -> list[tuple]:
    return [(row.generated, row.finish_reason, row.score) for search in searches for row in search.rows]


# -- against transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_searches_are_those_of_transformers(seed: int) -> None:
    """All fields at random, on random logits that many tokens end. (The sweep of beam_oracle.py goes on from here.)"""
    assert oracle.check_fake_case(seed) is None


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-2.0, -0.5, 0.0, 3.0])
def test_when_most_tokens_end_a_text(early_stopping: bool | str, length_penalty: float) -> None:
    """The search ends by its rule, long before the greatest length, and most candidates are finished texts."""
    for seed in range(12):
        fake = FakeModel(vocab_size=14)
        fake.sharpness = 1.0
        fields = dict(num_beams=2 + seed % 3, num_return_sequences=2, early_stopping=early_stopping, length_penalty=length_penalty)
        fields |= dict(max_new_tokens=14, eos_token_id=list(range(2 + seed % 9)))
        out = oracle.ours(Generator(Engine.create(fake, OPS, 1 << 20)), [[13, seed]], fields)
        assert oracle.difference(out.generated_token_ids, out.sequence_scores, *oracle.theirs(oracle.FakeTransformer(fake), [13, seed], fields)) is None


@functools.cache
def load(folder, backend: str) -> LLMModel:
    return LLMModel(folder, dtype=torch.float32, backend=backend, progress=False)


SEARCHES = [
    dict(num_beams=4, max_new_tokens=24, eos_token_id=1),
    dict(num_beams=3, num_return_sequences=3, max_new_tokens=20, eos_token_id=list(range(2, 280, 9)), early_stopping="never", length_penalty=2.0),
    dict(num_beams=5, num_return_sequences=2, max_new_tokens=20, eos_token_id=list(range(2, 280, 7)), early_stopping=True, length_penalty=0.0, min_new_tokens=4),
    dict(num_beams=2, num_return_sequences=2, max_new_tokens=12, eos_token_id=[9, 8], length_penalty=-1.0, repetition_penalty=1.3, no_repeat_ngram_size=2),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_every_architecture(checkpoint, backend: str, family: str) -> None:
    folder, model, tokenizer = checkpoint(family)
    prompts = [torch.randint(2, 280, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (1, 5, 33, 70)]
    for fields in SEARCHES:
        out = oracle.ours(load(folder, backend), prompts, fields)
        num_rows = fields.get("num_return_sequences", 1)
        for index, prompt in enumerate(prompts):
            mine = slice(index * num_rows, (index + 1) * num_rows)
            their_rows, their_scores = oracle.theirs(model, prompt, fields)
            assert oracle.difference(out.generated_token_ids[mine], out.sequence_scores[mine], their_rows, their_scores) is None
            assert out.texts[mine] == [tokenizer.decode(row, skip_special_tokens=True) for row in out.generated_token_ids[mine]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_grows_to_where_the_angles_change(tmp_path, backend: str) -> None:
    """Phi-3 with longrope computes all tokens again from there on, in transformers too."""
    from tests.llm.models.variants import longrope, rope, save_tiny

    model = save_tiny(tmp_path, "phi3", rope(longrope(4), original_max_position_embeddings=16))
    fields = dict(num_beams=3, num_return_sequences=3, max_new_tokens=12, eos_token_id=3)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    out = oracle.ours(load(tmp_path, backend), [prompt], fields)
    assert oracle.difference(out.generated_token_ids, out.sequence_scores, *oracle.theirs(model, prompt, fields)) is None


def test_the_comparison_sees_a_wrong_text_and_a_wrong_score() -> None:
    assert oracle.difference([[1, 2]], [-1.0], [[1, 2]], [-1.000001]) is None
    assert "scores" in oracle.difference([[1, 2]], [-1.0], [[1, 2]], [-1.001])
    assert "texts" in oracle.difference([[1, 2]], [-1.00005], [[1, 3]], [-1.0])
    assert oracle.difference([[1, 2]], [-1.000001], [[1, 3]], [-1.0]) is None, "a tie"


def test_stop_strings_cut_the_text(checkpoint) -> None:
    folder, model, tokenizer = checkpoint("llama")
    free = load(folder, BACKENDS[-1]).generate([5, 6], SamplingConfig(num_beams=3, max_new_tokens=12, ignore_eos=True))
    stop = next(letter for letter in free.texts[0][1:] if letter.isalpha() and letter.isascii())
    out = load(folder, BACKENDS[-1]).generate([5, 6], SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=12, ignore_eos=True, stop_strings=stop))
    stopped = [row for row, reason in enumerate(out.finish_reasons) if reason == "stop"]
    assert stopped and not any(stop in text for text in out.texts)
    for row in stopped:
        assert stop in tokenizer.decode(out.generated_token_ids[row][-1:]) or stop in tokenizer.decode(out.generated_token_ids[row])


# -- drawn beams ----------------------------------------------------------------------------------------------------------


def chi_square_is_plausible(ours: Counter, theirs: Counter) -> bool:
    """Two samples of the same size, of one distribution? Outcomes seen less than 20 times are counted together; the bound is five
    standard deviations of the statistic above its mean."""
    common = [outcome for outcome, count in (ours + theirs).items() if count >= 20]
    counts = np.array([[seen[outcome] for outcome in common] + [sum(seen.values()) - sum(seen[outcome] for outcome in common)] for seen in (ours, theirs)], dtype=float)
    counts = counts[:, counts.sum(axis=0) > 0]
    statistic = ((counts[0] - counts[1]) ** 2 / counts.sum(axis=0)).sum()
    freedom = counts.shape[1] - 1
    return freedom > 1 and statistic < freedom + 5 * (2 * freedom) ** 0.5


DRAWN = [
    dict(num_beams=2, max_new_tokens=2, top_k=0),
    dict(num_beams=3, max_new_tokens=2, top_k=4, temperature=0.7, eos_token_id=[0, 3], num_return_sequences=2),
    dict(num_beams=2, max_new_tokens=3, top_k=0, top_p=0.3, eos_token_id=2, length_penalty=0.0),
    dict(num_beams=2, max_new_tokens=2, top_k=0, typical_p=0.5, min_p=0.4, eos_token_id=2, early_stopping=True),
]


@pytest.mark.parametrize("fields", DRAWN, ids=["plain", "top_k", "top_p", "typical and min_p"])
def test_drawn_beams_are_distributed_as_in_transformers(fields: dict) -> None:
    fake = FakeModel(vocab_size=6)
    fake.sharpness = 1.0
    known = functools.cache(lambda tokens, logits_of=fake.logits_of: logits_of(list(tokens)))
    fake.logits_of = lambda tokens: known(tuple(tokens))
    num_draws, num_rows = 2000, fields.get("num_return_sequences", 1)
    generator = Generator(Engine.create(fake, OPS, 1 << 22), None)
    # Without a seed every prompt of a batch draws from a stream of its own; in transformers too.
    torch.manual_seed(5)
    fields = dict(fields, do_sample=True)
    mine = oracle.ours(generator, [[1, 4]] * num_draws, fields).generated_token_ids
    others, _ = oracle.theirs(oracle.FakeTransformer(fake), [1, 4], fields, copies=num_draws)
    ours, theirs = (Counter(str(rows[first : first + num_rows]) for first in range(0, len(rows), num_rows)) for rows in (mine, others))
    assert ours.total() == theirs.total() == num_draws
    assert chi_square_is_plausible(ours, theirs)
    shifted = Counter({outcome: count + (count // 3 if index % 2 else -(count // 3)) for index, (outcome, count) in enumerate(ours.items())})
    assert not chi_square_is_plausible(shifted, theirs), "a third more or less of each would be seen"


def test_draws_depend_on_the_seed_alone() -> None:
    generator = make_generator()
    prompts = random_prompts(4, 5)
    config = SamplingConfig(num_beams=3, num_return_sequences=3, do_sample=True, seed=7, max_new_tokens=12, temperature=1.5)
    together = rows_of(generator.generate(prompts, config))
    alone = [row for prompt in prompts for row in rows_of(make_generator(max_tokens_per_step=2).generate(prompt, config))]
    assert together == alone
    config.seed = 8
    assert rows_of(generator.generate(prompts, config)) != together


# -- the engine around it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"max_tokens_per_step": 1}, {"max_tokens_per_step": 5, "max_sequences_per_step": 3}, {"max_sequences_per_step": 8}])
def test_a_ragged_batch_gives_what_each_prompt_gives_alone(limits: dict) -> None:
    prompts = random_prompts(1, 9)
    alone = [row for prompt in prompts for row in rows_of(make_generator().generate(prompt, BEAMS))]
    generator = make_generator(**limits)
    assert rows_of(generator.generate(prompts, BEAMS)) == alone
    generator.engine.check_idle()
    assert generator.engine.cache.used_bytes == 0 and not generator.engine.between_steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_are_bit_identical_on_the_kernels(checkpoint, backend: str) -> None:
    model = load(checkpoint("qwen2")[0], backend)
    prompts = [list(range(2, 2 + length)) for length in (1, 17, 40)]
    config = SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=12)
    together, alone = rows_of(model.generate(prompts, config)), [row for prompt in prompts for row in rows_of(model.generate(prompt, config))]
    assert [row[0] for row in together] == [row[0] for row in alone]
    if backend == "native":
        assert together == alone


CACHES = [{}, {"prefix_cache_bytes": 1 << 13}, {"kv_cache_type": "bmc", "bmc_rows": 8}, {"kv_cache_type": "dynamic"}]


@pytest.mark.parametrize("options", CACHES, ids=["paged", "prefix", "bmc", "dynamic"])
@pytest.mark.parametrize("num_blocks", [6, 7, 9, 14, 25, 200])
def test_a_cache_of_any_kind_too_small_for_all_changes_nothing(num_blocks: int, options: dict) -> None:
    prompts = random_prompts(num_blocks, 4, longest=50)
    config = SamplingConfig(num_beams=4, num_return_sequences=4, max_new_tokens=40, ignore_eos=True)
    expected = rows_of(make_generator().generate(prompts, config))
    generator = make_generator(num_blocks, max_tokens_per_step=24, cache_options=options)
    check = generator.engine.cache.check_integrity
    generator.engine.model.hook = lambda batch: check(generator.engine.scheduler.sequences())
    assert rows_of(generator.generate(prompts, config)) == expected
    generator.engine.check_idle()


def test_beams_share_blocks(monkeypatch) -> None:
    """Ten beams of a prompt of 10 blocks hold those once; what is copied is a block that several would write."""
    copies, most = [], 0
    copy = BlockPool.copy
    monkeypatch.setattr(BlockPool, "copy", lambda self, *args: copies.append(args) or copy(self, *args))
    generator = make_generator(model=FakeModel(eos_bias=-50.0))
    cache = generator.engine.cache

    def watch(batch: object) -> None:
        nonlocal most
        most = max(most, cache.num_blocks - cache.num_free_blocks)

    generator.engine.model.hook = watch
    generator.generate([list(range(1, 50)) * 4][0][:160], SamplingConfig(num_beams=10, max_new_tokens=14))
    assert most <= 10 + 10, "10 of the prompt, one of its own for each beam"
    assert len(copies) <= 9 * 13, "never more than one for each fork"
    num_calls = generator.engine.model.num_calls
    assert num_calls == 14, "a step for the prompt, and one for all beams together each token"


def test_a_beam_that_goes_on_alone_copies_nothing(monkeypatch) -> None:
    copies = []
    copy = BlockPool.copy
    monkeypatch.setattr(BlockPool, "copy", lambda self, *args: copies.append(args) or copy(self, *args))
    model = FakeModel()
    table = model.logits_of
    model.logits_of = lambda tokens: table(tokens) if len(tokens) == 20 else torch.full((50,), -30.0).index_fill(0, torch.tensor(tokens[-1]), 30.0)
    generator = make_generator(model=model)
    out = generator.generate(list(range(1, 21)), SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=30, ignore_eos=True))
    assert all(len(set(tokens)) == 1 for tokens in out.generated_token_ids)
    assert len(copies) == 2, "when three beams leave the prompt's last block, and never again"


def test_beside_other_requests_and_sessions() -> None:
    generator = make_generator(40, max_tokens_per_step=16, model=FakeModel(eos_bias=-50.0))
    prompts = random_prompts(8, 6, longest=60)
    config = SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=25)
    expected = [rows_of(make_generator(model=FakeModel(eos_bias=-50.0)).generate(prompt, config)) for prompt in prompts[:3]]
    results: dict[int, object] = {}

    def search(index: int) -> None:
        results[index] = rows_of(generator.generate(prompts[index], config))

    def plain(index: int) -> None:
        results[index] = generator.generate(prompts[index], SamplingConfig(max_new_tokens=40)).generated_token_ids[0]

    def session(index: int) -> None:
        with Session(generator.engine) as s:
            results[index] = [int(s.append([token]).argmax()) for token in prompts[index]]

    threads = [threading.Thread(target=work, args=(index,)) for index, work in enumerate([search, search, search, plain, plain, session])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    model = generator.engine.model
    assert [results[index] for index in range(3)] == expected
    assert [results[index] for index in (3, 4)] == [greedy(model, prompts[index], 40) for index in (3, 4)]
    assert results[5] == [int(model.logits_of(prompts[5][: end + 1]).argmax()) for end in range(len(prompts[5]))]
    generator.engine.check_idle()


def test_anyone_who_steps_moves_a_search() -> None:
    generator = make_generator()
    prompts = random_prompts(2, 2)
    expected = rows_of(generator.generate(prompts, BEAMS))
    searches = searches_of(generator, prompts)
    for search in searches:
        search.start(generator.engine)
    while generator.engine.step():
        generator.engine.cache.check_integrity(generator.engine.scheduler.sequences())
    assert all(search.is_over for search in searches)
    assert rows_found(searches) == expected
    generator.engine.check_idle()


def test_no_more_beams_at_once_than_there_are_places() -> None:
    generator = make_generator(max_sequences_per_step=8)
    widths = []
    generator.engine.model.hook = lambda batch: widths.append(len(batch.spans.kv_len))
    generator.generate(random_prompts(5, 12, longest=9), SamplingConfig(num_beams=3, max_new_tokens=10, ignore_eos=True))
    assert max(widths) == 6
    widths.clear()
    generator.generate([[5]], SamplingConfig(num_beams=11, max_new_tokens=3, ignore_eos=True))
    assert max(widths) == 11, "one search runs in any case"


# -- what goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [1, 2, 5, 11])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_search_leaves_nothing(fail_at: int, error: type[BaseException]) -> None:
    generator = make_generator(20)
    prompts = random_prompts(3, 3)
    config = SamplingConfig(num_beams=4, num_return_sequences=3, max_new_tokens=20, ignore_eos=True)
    expected = rows_of(generator.generate(prompts, config))
    model = generator.engine.model

    def strike(batch: object) -> None:
        if model.num_calls == fail_at:
            raise error

    model.num_calls, model.hook = 0, strike
    with pytest.raises(error):
        generator.generate(prompts, config)
    generator.engine.check_idle()
    assert generator.engine.cache.used_bytes == 0 and not generator.engine.between_steps
    model.hook = lambda batch: None
    assert rows_of(generator.generate(prompts, config)) == expected


@pytest.mark.parametrize("where", ["fork", "free"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_a_search_goes_on_after_another_thread_was_interrupted_within_it(where: str, count: int, monkeypatch) -> None:
    """Ctrl-C in the middle of moving beams, in a thread that only happened to step: the owner notices nothing."""
    generator = make_generator()
    prompts = random_prompts(6, 2)
    config = SamplingConfig(num_beams=4, num_return_sequences=3, max_new_tokens=20, ignore_eos=True)
    expected = rows_of(generator.generate(prompts, config))
    searches = searches_of(generator, prompts, config)
    for search in searches:
        search.start(generator.engine)
    original, calls = getattr(CacheManager, where), 0

    def strike(self, *args):
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(CacheManager, where, strike)
    is_struck = False
    while not all(search.is_over for search in searches):
        try:
            generator.engine.step()
        except KeyboardInterrupt:
            is_struck = True
        generator.engine.cache.check_integrity(generator.engine.scheduler.sequences())
    assert is_struck
    assert rows_found(searches) == expected
    generator.engine.check_idle()


def test_a_cancelled_search_tells_the_best_so_far() -> None:
    generator = make_generator(model=FakeModel(eos_bias=-50.0))
    (search,) = searches_of(generator, [[5, 6, 7]])
    search.start(generator.engine)
    for _ in range(6):
        generator.engine.step()
    search.cancel()
    assert [row.finish_reason for row in search.rows] == ["cancelled"] * 3
    assert [row.num_generated for row in search.rows] == [5] * 3
    scores = [row.score for row in search.rows]
    assert scores == sorted(scores, reverse=True) and len({tuple(row.tokens) for row in search.rows}) == 3
    generator.engine.check_idle()
    search.cancel()
    (early,) = searches_of(generator, [[5, 6, 7]])
    early.cancel()
    assert [row.finish_reason for row in early.rows] == ["cancelled"] * 3 and early.rows[0].num_generated == 0


def test_an_error_of_one_search_is_told_and_ends_it_alone() -> None:
    generator = make_generator()
    other = searches_of(generator, [[9, 8]])[0]
    other.start(generator.engine)

    def broken(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise RuntimeError("the processor's own")
        return logits

    config = SamplingConfig(num_beams=3, max_new_tokens=20, logits_processors=[broken], ignore_eos=True)
    with pytest.raises(RuntimeError, match="processor's own"):
        generator.generate([[5], [6, 7]], config)
    while not other.is_over:
        generator.engine.step()
    assert other.rows[0].error is None
    generator.engine.check_idle()


def test_bans_may_leave_less_texts_than_beams() -> None:
    """Only tokens 4 and 5 are left, for two tokens: four texts."""
    bans = {token: -np.inf for token in range(50) if token not in (4, 5)}
    config = dict(num_beams=6, max_new_tokens=2, logit_bias=bans, ignore_eos=True)
    out = make_generator().generate([[7]], SamplingConfig(num_return_sequences=4, **config))
    assert sorted(out.generated_token_ids) == [[4, 4], [4, 5], [5, 4], [5, 5]]
    with pytest.raises(ValueError, match="found 4 texts and has to return num_return_sequences=5"):
        make_generator().generate([[7]], SamplingConfig(num_return_sequences=5, **config))
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or inf"):
            make_generator().generate([[7]], SamplingConfig(num_beams=2, logits_processors=[lambda ids, logits, wrong=wrong: logits + wrong]))
    with pytest.raises(ValueError, match="found 0 texts"):
        make_generator().generate([[7]], SamplingConfig(num_beams=2, logits_processors=[lambda ids, logits: logits - np.inf]))


# -- what is asked for ----------------------------------------------------------------------------------------------------


def test_streams_are_refused_as_in_transformers(checkpoint) -> None:
    model = load(checkpoint("llama")[0], BACKENDS[0])
    for streamer in (TextStreamer(model.tokenizer, file=io.StringIO()), CallbackStreamer(print)):
        with pytest.raises(ValueError, match="num_beams=1"):
            model.generate([5], BEAMS, streamer)
    for call in (model.stream, model.add_request):
        with pytest.raises(ValueError, match="num_beams=1"):
            call([5], SamplingConfig(num_beams=2))
    model._engine.check_idle()


def test_a_length_penalty_out_of_range_is_told() -> None:
    for penalty in (1e4, -1e4):
        with pytest.raises(ValueError, match="length_penalty"):
            make_generator().generate([[5]], SamplingConfig(num_beams=2, length_penalty=penalty))


def test_the_context_ends_a_search(checkpoint) -> None:
    model = load(checkpoint("llama")[0], BACKENDS[-1])
    out = model.generate([5] * 250, SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=50, ignore_eos=True))
    assert [len(tokens) for tokens in out.generated_token_ids] == [6] * 3 and out.finish_reasons == ["length"] * 3
    with pytest.raises(ValueError, match="256 tokens"):
        model.generate([5] * 256, BEAMS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_are_those_of_the_text(checkpoint, backend: str) -> None:
    """Along the beam that the text came by: what `score` says of it, and what its score is made of."""
    model = load(checkpoint("llama")[0], backend)
    config = SamplingConfig(num_beams=4, num_return_sequences=4, max_new_tokens=15, eos_token_id=list(range(2, 280, 9)), length_penalty=0.7, logprobs=3)
    out = model.generate([[5, 6, 7], [8]], config)
    for row, (tokens, logprobs) in enumerate(zip(out.generated_token_ids, out.logprobs, strict=True)):
        prompt = [[5, 6, 7], [8]][row // 4]
        expected = model.score([prompt + tokens])[0][len(prompt) - 1 :]
        assert [entry.token for entry in logprobs] == tokens
        torch.testing.assert_close(torch.tensor([entry.logprob for entry in logprobs]), expected, rtol=1e-5, atol=1e-5)
        assert out.sequence_scores[row] == pytest.approx(float(expected.double().sum()) / len(tokens) ** 0.7, rel=1e-5)
        assert all(len(entry.top) == 3 and list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1]) for entry in logprobs)
    punished = model.generate([[5, 6, 7]], SamplingConfig(num_beams=2, logit_bias=dict.fromkeys(range(0, 280, 2), 9.0), max_new_tokens=4, logprobs=0, ignore_eos=True))
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in punished.logprobs[0]]),
        model.score([[5, 6, 7] + punished.generated_token_ids[0]])[0][2:],
        rtol=1e-5,
        atol=1e-5,
    )


def test_the_output_without_beams_has_no_scores() -> None:
    assert make_generator().generate([[5]], SamplingConfig(max_new_tokens=2)).sequence_scores is None


@pytest.mark.parametrize("when", [0, 1, 5, 30])
def test_a_call_is_cancelled_from_another_thread(when: int) -> None:
    generator = make_generator(model=FakeModel(eos_bias=-50.0), max_sequences_per_step=8)
    event, model = threading.Event(), generator.engine.model
    model.hook = lambda batch: event.set() if model.num_calls >= when - 1 else None
    if not when:
        event.set()
    out = generator.generate(random_prompts(7, 6, longest=9), SamplingConfig(num_beams=4, num_return_sequences=2, max_new_tokens=20), cancel=event)
    assert len(out.finish_reasons) == 12 and "cancelled" in out.finish_reasons and ("length" in out.finish_reasons) == (when == 30)
    assert all(len(tokens) == 20 for tokens, reason in zip(out.generated_token_ids, out.finish_reasons) if reason == "length")
    generator.engine.check_idle()
    assert generator.engine.cache.used_bytes == 0 and not generator.engine.between_steps


def test_many_prompts_in_few_sequences() -> None:
    generator = make_generator(max_sequences_per_step=8)
    prompts = random_prompts(9, 60, longest=5)
    most, model = 0, generator.engine.model

    def watch(batch: object) -> None:
        nonlocal most
        most = max(most, len(list(generator.engine.scheduler.sequences())))

    model.hook = watch
    config = SamplingConfig(num_beams=2, max_new_tokens=3)
    out = generator.generate(prompts, config)
    assert most <= 8 and len(out.texts) == 60
    assert rows_of(out)[41:43] == [row for prompt in prompts[41:43] for row in rows_of(make_generator().generate(prompt, config))]


def test_log_probabilities_of_the_prompt(checkpoint) -> None:
    model = load(checkpoint("llama")[0], BACKENDS[-1])
    out = model.generate([[5, 6, 7], [8]], SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=3, prompt_logprobs=2))
    plain = model.generate([[5, 6, 7], [8]], SamplingConfig(max_new_tokens=3, prompt_logprobs=2))
    assert out.prompt_logprobs == [plain.prompt_logprobs[row // 2] for row in range(4)]
    assert rows_of(out) == rows_of(model.generate([[5, 6, 7], [8]], SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=3)))


def test_metrics_count_the_texts_returned() -> None:
    out = make_generator().generate([[5, 6], [7]], SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=6, ignore_eos=True))
    assert (out.metrics.num_prompt_tokens, out.metrics.num_generated_tokens) == (6, 24)
    assert 0 < out.metrics.seconds_to_first_token < out.metrics.total_seconds


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 700, 5000])
def test_the_largest_are_those_of_a_sort(size: int) -> None:
    for seed, values in enumerate([5, 1000, 10**7]):
        numbers = np.random.default_rng(seed).integers(0, values, size).astype(np.float32)
        numbers[np.random.default_rng(seed).random(size) < 0.3] = -np.inf
        order = [index for index in sorted(range(size), key=lambda index: (-numbers[index], index)) if numbers[index] > -np.inf]
        for count in (1, 2, 7, 70, 6000):
            assert largest(numbers, count).tolist() == order[:count]
