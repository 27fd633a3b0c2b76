"""Beam search: its texts and scores equal those of transformers, and outputs contain what the config requests."""

from __future__ import annotations

import functools
import io
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from pace.llm import CallbackStreamer, SamplingConfig, TextStreamer
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sampling.filters import largest
from tests.llm.clients import beam_oracle as oracle
from tests.llm.clients.beams import BEAMS, make_generator, rows_of
from tests.llm.fake_model import OPS, FakeModel
from tests.llm.generation.loaded import BACKENDS, load
from tests.llm.generators import random_prompts
from tests.llm.models.variants import IN_TRANSFORMERS
from tests.plugins.tiers import quarter, sample

# -- comparison with transformers --------------------------------------------------------------------------------------


def seeds(pytestconfig, count: int) -> range:
    """Returns every other of `count` seeds, which differ by commit, or all of them in make test-all."""
    return range(count) if pytestconfig.getoption("tier") == "all" else range(quarter() % 2, count, 2)


def test_random_searches_are_those_of_transformers(pytestconfig) -> None:
    """Random fields, on random logits with up to four end tokens. The sweep of beam_oracle.py runs more cases."""
    for seed in seeds(pytestconfig, 60):
        wrong = oracle.check_fake_case(seed)
        assert wrong is None, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-2.0, -0.5, 0.0, 1.0, 3.0])
def test_when_most_tokens_end_a_text(early_stopping: bool | str, length_penalty: float, pytestconfig) -> None:
    """Most candidates are finished texts. The search ends by its own rule, after the same number of steps as that of
    transformers."""
    fake = FakeModel(vocab_size=14)
    fake.sharpness = 1.0
    transformer = oracle.FakeTransformer(fake)
    for seed in seeds(pytestconfig, 12):
        fields = dict(num_beams=2 + seed % 3, num_return_sequences=2, max_new_tokens=14)
        fields |= dict(early_stopping=early_stopping, length_penalty=length_penalty)
        fields |= dict(eos_token_id=list(range(2 + seed % 9)))
        fake.num_calls = transformer.num_calls = 0
        out = oracle.ours(Generator(Engine.create(fake, OPS, 1 << 20)), [[13, seed]], fields)
        expected = oracle.theirs(transformer, [13, seed], fields)
        assert oracle.difference(out.generated_token_ids, out.sequence_scores, *expected) is None
        assert fake.num_calls == transformer.num_calls


ENDS = list(range(2, 280, 9))
SEARCHES = [
    {"num_beams": 4, "max_new_tokens": 24, "eos_token_id": 1},
    {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 20, "eos_token_id": ENDS, "early_stopping": "never",
     "length_penalty": 2.0},
    {"num_beams": 5, "num_return_sequences": 2, "max_new_tokens": 20, "eos_token_id": list(range(2, 280, 7)),
     "early_stopping": True, "length_penalty": 0.0, "min_new_tokens": 4},
    {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 12, "eos_token_id": [9, 8], "length_penalty": -1.0,
     "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
]  # fmt: skip


PROMPTS = [
    torch.randint(2, 280, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 5, 33, 70)
]


DISTINCT = ("llama", "phi3", "gemma2", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_vl")
"""Models with each kind of cache: plain, rotated anew when a text grows, windows, latent, sinks, chunks, vision."""


@pytest.mark.parametrize("family", sample(IN_TRANSFORMERS, lambda family: family in DISTINCT))
def test_a_search_on_every_architecture(checkpoint, family: str) -> None:
    """Each architecture runs one search on one prompt."""
    number = IN_TRANSFORMERS.index(family)
    assert_found(checkpoint, family, BACKENDS[-1], SEARCHES[number % 4], PROMPTS[2 + number % 2 :][:1])


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in IN_TRANSFORMERS[1:])]
)
def test_every_search(checkpoint, family: str) -> None:
    for fields in SEARCHES:
        assert_found(checkpoint, family, BACKENDS, fields, PROMPTS)


def assert_found(checkpoint, family: str, backends: str | list[str], fields: dict, prompts: list[list[int]]) -> None:
    """Raises AssertionError unless each backend finds the same rows and scores as transformers."""
    folder, theirs, tokenizer = checkpoint(family)
    expected = [oracle.theirs(theirs, prompt, fields) for prompt in prompts]
    num_rows = fields.get("num_return_sequences", 1)
    for backend in [backends] if isinstance(backends, str) else backends:
        out = oracle.ours(load(folder, backend), prompts, fields)
        for index, (their_rows, their_scores) in enumerate(expected):
            mine = slice(index * num_rows, (index + 1) * num_rows)
            rows, scores = out.generated_token_ids[mine], out.sequence_scores[mine]
            wrong = oracle.difference(rows, scores, their_rows, their_scores)
            assert wrong is None, f"{family} on {backend}, prompt {index}, {fields}: {wrong}"
            assert out.texts[mine] == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_grows_to_where_the_angles_change(tmp_path, backend: str) -> None:
    """Phi-3 with longrope recomputes all tokens at that length, also in transformers."""
    from tests.llm.models.rotations import longrope, rope
    from tests.llm.models.variants import save_tiny

    model = save_tiny(tmp_path, "phi3", rope(longrope(4), original_max_position_embeddings=16))
    fields = dict(num_beams=3, num_return_sequences=3, max_new_tokens=12, eos_token_id=3)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    out, expected = oracle.ours(load(tmp_path, backend), [prompt], fields), oracle.theirs(model, prompt, fields)
    assert oracle.difference(out.generated_token_ids, out.sequence_scores, *expected) is None


def test_the_comparison_sees_a_wrong_text_and_a_wrong_score() -> None:
    assert oracle.difference([[1, 2]], [-1.0], [[1, 2]], [-1.000001]) is None
    assert "scores" in oracle.difference([[1, 2]], [-1.0], [[1, 2]], [-1.001])
    assert "texts" in oracle.difference([[1, 2]], [-1.00005], [[1, 3]], [-1.0])
    assert oracle.difference([[1, 2]], [-1.000001], [[1, 3]], [-1.0]) is None, "a tie"


def test_stop_strings_cut_the_text(checkpoint) -> None:
    folder, _, tokenizer = checkpoint("llama")
    model, config = load(folder, BACKENDS[-1]), SamplingConfig(num_beams=3, max_new_tokens=12, ignore_eos=True)
    free = model.generate([5, 6], config).texts[0]
    stop = next(letter for letter in free[1:] if letter.isalpha() and letter.isascii())
    config.num_return_sequences, config.stop_strings = 3, stop
    out = model.generate([5, 6], config)
    stopped = [row for row, reason in zip(out.generated_token_ids, out.finish_reasons) if reason == "stop"]
    assert stopped and not any(stop in text for text in out.texts)
    assert all(stop in tokenizer.decode(row) for row in stopped)


# -- sampled beams -----------------------------------------------------------------------------------------------------


def chi_square_is_plausible(ours: Counter, theirs: Counter) -> bool:
    """True if two samples of equal size may come from one distribution. Outcomes seen less than 20 times are counted
    together. The bound is five standard deviations of the statistic above its mean."""
    common = [outcome for outcome, count in (ours + theirs).items() if count >= 20]
    rows = [[seen[outcome] for outcome in common] for seen in (ours, theirs)]
    counts = np.array([[*row, seen.total() - sum(row)] for row, seen in zip(rows, (ours, theirs))], dtype=float)
    counts = counts[:, counts.sum(axis=0) > 0]
    statistic = ((counts[0] - counts[1]) ** 2 / counts.sum(axis=0)).sum()
    freedom = counts.shape[1] - 1
    return freedom > 1 and statistic < freedom + 5 * (2 * freedom) ** 0.5


DRAWN = {
    "plain": dict(num_beams=2, max_new_tokens=2, top_k=0),
    "top_k": dict(num_beams=3, max_new_tokens=2, top_k=5, temperature=1.7, eos_token_id=[0, 3], num_return_sequences=2),
    "top_p": dict(num_beams=2, max_new_tokens=3, top_k=0, top_p=0.95, temperature=2.0, eos_token_id=2,
                  length_penalty=0.0),
    "typical and min_p": dict(num_beams=2, max_new_tokens=2, top_k=0, typical_p=0.9, min_p=0.1, temperature=2.0,
                              eos_token_id=2, early_stopping=True),
}  # fmt: skip


ALL_DRAWN = [pytest.param(name, 2000, marks=pytest.mark.thorough) for name in DRAWN]


@pytest.mark.parametrize("name, num_draws", [("plain", 1000), ("top_k", 1000), *ALL_DRAWN])
def test_drawn_beams_are_distributed_as_in_transformers(name: str, num_draws: int) -> None:
    fields = DRAWN[name]
    fake = FakeModel(vocab_size=6)
    fake.sharpness = 1.0
    known = functools.cache(lambda tokens, logits_of=fake.logits_of: logits_of(list(tokens)))
    fake.logits_of = lambda tokens: known(tuple(tokens))
    num_rows = fields.get("num_return_sequences", 1)
    generator = Generator(Engine.create(fake, OPS, 1 << 22), None)
    # Without a seed every prompt of a batch draws from a separate stream, also in transformers.
    torch.manual_seed(5)
    fields = dict(fields, do_sample=True)
    mine = oracle.ours(generator, [[1, 4]] * num_draws, fields).generated_token_ids
    others, _ = oracle.theirs(oracle.FakeTransformer(fake), [1, 4], fields, copies=num_draws)
    ours, theirs = (
        Counter(str(rows[first : first + num_rows]) for first in range(0, len(rows), num_rows))
        for rows in (mine, others)
    )
    assert ours.total() == theirs.total() == num_draws
    assert chi_square_is_plausible(ours, theirs)
    shifts = itertools.cycle([-1, 1])
    shifted = Counter({outcome: count + next(shifts) * (count // 3) for outcome, count in ours.items()})
    assert not chi_square_is_plausible(shifted, theirs), "a third more or less of each would be seen"


def test_draws_depend_on_the_seed_alone() -> None:
    generator = make_generator()
    prompts = random_prompts(4, 5)
    config = SamplingConfig(num_beams=3, num_return_sequences=3, do_sample=True, max_new_tokens=12, temperature=1.5)
    config.seed = 7
    together = rows_of(generator.generate(prompts, config))
    alone = [rows_of(make_generator(max_tokens_per_step=2).generate(prompt, config)) for prompt in prompts]
    assert together == [row for rows in alone for row in rows]
    config.seed = 8
    assert rows_of(generator.generate(prompts, config)) != together


# -- requested outputs -------------------------------------------------------------------------------------------------


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
    config = SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=50, ignore_eos=True)
    out = model.generate([5] * 250, config)
    assert [len(tokens) for tokens in out.generated_token_ids] == [6] * 3 and out.finish_reasons == ["length"] * 3
    with pytest.raises(ValueError, match="256 tokens"):
        model.generate([5] * 256, BEAMS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_are_those_of_the_text(checkpoint, backend: str) -> None:
    """They equal the log-probabilities of `score`, and the score of a row is their normalised sum."""
    model = load(checkpoint("llama")[0], backend)

    def scored(prompt: list[int], tokens: list[int], logprobs: list) -> torch.Tensor:
        expected = model.score([prompt + tokens])[0][len(prompt) - 1 :]
        assert [entry.token for entry in logprobs] == tokens
        torch.testing.assert_close(torch.tensor([entry.logprob for entry in logprobs]), expected, rtol=1e-5, atol=1e-5)
        return expected

    config = SamplingConfig(num_beams=4, num_return_sequences=4, max_new_tokens=15, logprobs=3)
    config.eos_token_id, config.length_penalty = ENDS, 0.7
    out = model.generate([[5, 6, 7], [8]], config)
    for row, (tokens, logprobs) in enumerate(zip(out.generated_token_ids, out.logprobs, strict=True)):
        expected = scored([[5, 6, 7], [8]][row // 4], tokens, logprobs)
        assert out.sequence_scores[row] == pytest.approx(float(expected.double().sum()) / len(tokens) ** 0.7, rel=1e-5)
        for entry in logprobs:
            assert len(entry.top) == 3 and list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])
    config = SamplingConfig(num_beams=2, max_new_tokens=4, logprobs=0, ignore_eos=True)
    config.logit_bias = dict.fromkeys(range(0, 280, 2), 9.0)
    punished = model.generate([[5, 6, 7]], config)
    scored([5, 6, 7], punished.generated_token_ids[0], punished.logprobs[0])


def test_the_output_without_beams_has_no_scores() -> None:
    assert make_generator().generate([[5]], SamplingConfig(max_new_tokens=2)).sequence_scores is None


def test_log_probabilities_of_the_prompt(checkpoint) -> None:
    model = load(checkpoint("llama")[0], BACKENDS[-1])
    prompts, config = [[5, 6, 7], [8]], SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=3)
    without = rows_of(model.generate(prompts, config))
    config.prompt_logprobs = 2
    out = model.generate(prompts, config)
    plain = model.generate(prompts, SamplingConfig(max_new_tokens=3, prompt_logprobs=2))
    assert out.prompt_logprobs == [plain.prompt_logprobs[row // 2] for row in range(4)] and rows_of(out) == without


def test_metrics_count_the_texts_returned() -> None:
    config = SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=6, ignore_eos=True)
    out = make_generator().generate([[5, 6], [7]], config)
    assert (out.metrics.num_prompt_tokens, out.metrics.num_generated_tokens) == (6, 24)
    assert 0 < out.metrics.seconds_to_first_token < out.metrics.total_seconds


def test_the_largest_are_those_of_a_sort() -> None:
    cases = itertools.product([1, 5, 63, 64, 65, 700, 5000], enumerate([5, 1000, 10**7]))
    for size, (seed, values) in cases:
        numbers = np.random.default_rng(seed).integers(0, values, size).astype(np.float32)
        numbers[np.random.default_rng(seed).random(size) < 0.3] = -np.inf
        order = np.argsort(-numbers, kind="stable")[: (numbers > -np.inf).sum()].tolist()
        for count in (1, 2, 7, 70, 6000):
            assert largest(numbers, count).tolist() == order[:count], f"{count} of {size}, seed {seed}"
