"""Requests and sessions give the same tokens and logits on every cache allocator, also when much happens at once."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
from pace.llm.clients.requests import Request
from pace.llm.clients.session import Session
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sequence import RowPlan
from tests.llm.cache.test_allocators import OPTIONS, SPEC
from tests.llm.engine.failing import WatchedEngine, fails_before_line, in_files
from tests.llm.engine.test_engine import ScriptedDrafter, make_sequence
from tests.llm.fake_model import OPS, FakeModel, engine_of, greedy, make_engine
from tests.llm.generators import check_idle, random_prompts
from tests.plugins.tiers import sample


class GenerationDrafter(ScriptedDrafter):
    """Drafts for sequences that generate. Sessions do not use drafts."""

    def extend(self, spans, cache) -> None:
        super().extend([span for span in spans if span.sequence.strategy.plan == RowPlan()], cache)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("num_blocks", sample([6, 9, 14, 25], lambda num_blocks: num_blocks in (6, 14)))
def test_a_ragged_batch_in_a_small_cache(name: str, num_blocks: int) -> None:
    model = FakeModel()
    engine = Engine.create(
        model, OPS, num_blocks * SPEC.block_bytes, cache_options=OPTIONS[name], max_tokens_per_step=24
    )
    prompts = random_prompts(num_blocks, 9, longest=50)
    generator = Generator(engine)
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=40))
    assert out.generated_token_ids == [greedy(model, prompt, 40) for prompt in prompts]
    check_idle(generator)


@functools.cache
def samples(num_blocks: int, name: str) -> list[list[int]]:
    config = SamplingConfig(do_sample=True, num_return_sequences=4, seed=4, max_new_tokens=40, ignore_eos=True)
    generator = Generator(make_engine(num_blocks, cache_options=OPTIONS[name]))
    rows = generator.generate([[1, 2, 3] * 8, [4] * 17], config).generated_token_ids
    check_idle(generator)
    return rows


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("num_blocks", sample([5, 12, 100], lambda num_blocks: num_blocks == 5))
def test_samples_of_one_prompt(name: str, num_blocks: int) -> None:
    assert samples(num_blocks, name) == samples(1000, "paged")


class CheckedEngine(Engine):
    """Fails each step once the cache's bookkeeping is wrong, so that the driver gives up and reports why."""

    def step(self) -> bool:
        self.cache.check_integrity(self.scheduler.sequences())
        return super().step()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", sample(range(3), lambda seed: seed == 1))
def test_everything_at_once_leaks_nothing_and_changes_no_token(name: str, seed: int) -> None:
    everything_at_once(FakeModel(eos_bias=1.0), 16 * SPEC.block_bytes, OPTIONS[name], seed)


def everything_at_once(model: FakeModel, cache_bytes: int, cache_options: dict, seed: int) -> None:
    """Mixes arrivals, aborts, drafts, and sessions that grow and are cut, forked and closed, in a cache that is too
    small."""
    chance = random.Random(seed)
    limits = {
        "max_tokens_per_step": chance.choice([1, 7, 64]),
        "max_sequences_per_step": 4,
        "max_logit_rows_per_step": 5,
    }
    engine = CheckedEngine.create(
        model, OPS, cache_bytes, GenerationDrafter(model, random.Random(seed), 5), cache_options=cache_options, **limits
    )
    generator = Generator(engine, defaults=SamplingConfig(eos_token_id=0))
    stems = random_prompts(seed, 3, longest=70)
    live: list[tuple[Request, list[int], int]] = []
    sessions = [Session(generator.driver)]
    for _ in range(30):
        prompt, num_tokens = chance.choice(stems) + random_prompts(chance.random(), 1, 9)[0], chance.randint(1, 60)
        live.append((generator.add_request(prompt, SamplingConfig(max_new_tokens=num_tokens)), prompt, num_tokens))
        wait_for_steps(generator, chance.randint(0, 8))
        if chance.random() < 0.3:
            live.pop(chance.randrange(len(live)))[0].cancel()
        session = chance.choice(sessions)
        verb = chance.choice(["append", "append", "truncate", "fork", "close"])
        if verb == "append" and len(session) < 150:
            ids = chance.choice(stems)[: chance.randint(1, 40)]
            wanted = chance.randint(1, len(ids))
            tokens = session.tokens + ids
            rows = torch.stack([model.logits_of(tokens[: end + 1]) for end in range(len(tokens) - wanted, len(tokens))])
            assert torch.equal(session.append(ids, wanted), rows)
        elif verb == "truncate":
            session.truncate(chance.randint(0, len(session)))
        elif verb == "fork" and len(sessions) < 4:
            sessions.append(session.fork())
        elif verb == "close" and len(sessions) > 1:
            sessions.remove(session)
            session.close()
    for request, prompt, num_tokens in live:
        assert request.result(60).generated_token_ids[0] == greedy(model, prompt, num_tokens, (0,))
    for session in sessions:
        session.close()
    check_idle(generator)


def wait_for_steps(generator: Generator, count: int) -> None:
    """Runs `count` steps of the engine, or fewer if it runs out of work."""
    generator.driver.call(lambda engine: [engine.step() for _ in range(count)]).result(60)


@pytest.mark.parametrize("name", ["prefix", "bmc-50", "dynamic", "states"])
@pytest.mark.parametrize("first", sample([5, 25, 45], lambda first: first == 25))
def test_a_step_that_fails_at_any_line_ends_what_it_worked_on_and_leaves_the_rest_right(name: str, first: int) -> None:
    model, num_failed, num_gone_on = FakeModel(num_states=name == "states"), 0, 0
    files = ("scheduler", "manager", "block_pool", "allocators", "prefix_cache", "state_cache", "marks")
    within = in_files(*(f"{file}.py" for file in files))
    limits = {"max_tokens_per_step": 20, "max_sequences_per_step": 2}
    options = OPTIONS.get(name, {"prefix_cache_bytes": None})
    for number in range(first, 1500, 61):
        engine = engine_of(model, 8, 4, WatchedEngine, cache_options=options, **limits)
        sequences = [make_sequence(model, prompt, 30) for prompt in ([9, 8, 7] * 8, [9, 8, 7] * 7, [5] * 20)]
        engine.submit(sequences)
        assert fails_before_line(number, engine, within)
        engine.finish()
        failed = engine.check_outcomes(sequences)
        num_failed += len(failed)
        num_gone_on += len(sequences) - len(failed)
    assert num_failed and num_gone_on


# -- the bundled model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> LLMModel:
    return LLMModel(TINY, progress=False, prefix_cache_bytes=0)


MODEL_OPTIONS = {
    "prefix": {}, "prefix-small": {"kv_cache_bytes": "600KiB", "prefix_cache_bytes": "100KiB"},
    "bmc": {"kv_cache_type": "bmc"}, "bmc-17": {"kv_cache_type": "bmc", "bmc_rows": 17},
    "bmc-small": {"kv_cache_type": "bmc", "kv_cache_bytes": "600KiB"}, "dynamic": {"kv_cache_type": "dynamic"},
    "dynamic-small": {"kv_cache_type": "dynamic", "kv_cache_bytes": "600KiB"},
}  # fmt: skip


PROMPTS = ["Once upon a time there was a little fox", "1, 2, 3, 4,", "The capital of Japan is"]
PROMPTS.append(f"{PROMPTS[0]} who lived in")
CONFIGS = [
    SamplingConfig(max_new_tokens=60, logprobs=2, ignore_eos=True),
    SamplingConfig(max_new_tokens=30, do_sample=True, temperature=1.2, seed=5, num_return_sequences=3, logprobs=1,
                   repetition_penalty=1.2),
]  # fmt: skip


def walk_of_a_session(model: LLMModel, ids: list[int]) -> list[torch.Tensor]:
    """Returns the logits of pieces of a text, of tokens after a cut, and of a fork."""
    with model.session() as session:
        rows, begin = [], 0
        for length in (17, 3, 20, 1):
            rows.append(session.append(ids[begin : begin + length], "all"))
            begin += length
        session.truncate(20)
        with session.fork() as twin:
            rows.append(twin.append(ids[:40]))
    return rows


@pytest.fixture(scope="module")
def wanted(plain: LLMModel) -> tuple:
    outs = [plain.generate(PROMPTS, config) for config in CONFIGS]
    ids = outs[1].output_token_ids[0].tolist()
    return outs, ids, walk_of_a_session(plain, ids), plain.score(PROMPTS)


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_the_bundled_model_says_the_same_bits(wanted: tuple, name: str) -> None:
    outs, ids, rows, scores = wanted
    with LLMModel(TINY, progress=False, **MODEL_OPTIONS[name]) as model:
        for config, expected in list(zip(CONFIGS, outs)) * 2:
            out = model.generate(PROMPTS, config)
            assert out.generated_token_ids == expected.generated_token_ids and out.logprobs == expected.logprobs
        assert all(map(torch.equal, walk_of_a_session(model, ids), rows))
        assert all(map(torch.equal, model.score(PROMPTS), scores))
        check_idle(model)


def test_the_second_turn_of_a_chat_computes_only_what_is_new(plain: LLMModel) -> None:
    with LLMModel(TINY, progress=False) as model:
        computed, runner = [], model._engine.model
        forward = runner.forward
        runner.forward = lambda batch: computed.append(len(batch.tokens)) or forward(batch)
        messages, config = [], SamplingConfig(max_new_tokens=200)
        known: list[int] = []
        for question in ("Tell me a story about a little fox.", "Tell me a story about a dog.", "What is 7 + 8?"):
            messages.append({"role": "user", "content": question})
            prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            computed.clear()
            out = model.generate(prompt, config)
            assert out.generated_token_ids == plain.generate(prompt, config).generated_token_ids
            same = next(
                (index for index, (a, b) in enumerate(zip(prompt, known)) if a != b), min(len(prompt), len(known))
            )
            reused = out.metrics.num_reused_tokens
            assert reused == same // 16 * 16 and reused >= len(known) - 20, "all full blocks of what was said before"
            assert computed[0] == len(prompt) - reused
            known = (prompt + out.generated_token_ids[0])[:-1]
            messages.append({"role": "assistant", "content": out.texts[0]})
        assert reused > 100
        report = model.memory_report()
        assert report.cache_used == 0 < report.cache_kept <= report.cache_touched and "cache, kept prefixes" in str(
            report
        )


def test_the_command_line_has_them(capsys) -> None:
    from pace.cli import main

    texts = []
    for options in (
        [],
        ["--kv-cache-type", "bmc", "--bmc-rows", "20"],
        ["--kv-cache-type", "dynamic"],
        ["--prefix-cache-bytes", "0"],
        ["--prefix-cache-bytes", "1MiB"],
    ):
        assert main(["generate", "Once upon a time", "--max-new-tokens", "20", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and len(texts[0]) > 20
    assert main(["generate", "Once", "--bmc-rows", "20"]) == 1
    assert "needs --kv-cache-type='bmc'" in capsys.readouterr().err
