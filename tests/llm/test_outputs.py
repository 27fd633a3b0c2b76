"""Outputs other than tokens: log-probabilities of the prompt and the text, and metrics, with and without processors and
drafts."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import re
import time
from dataclasses import replace

import pytest
import torch

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
from pace.llm.engine.drafter import NoDraft
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from tests.llm.bundled import bundled
from tests.llm.engine.test_engine import ScriptedDrafter
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer
from tests.llm.generators import CONFIGS, by_hand, check_idle, make_generator, random_prompts, with_length
from tests.plugins.tiers import sample


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens_per_step": 1}, {"max_tokens_per_step": 7}, {"max_logit_rows_per_step": 3}]
)
@pytest.mark.parametrize("num_blocks", [7, 100])
def test_prompt_logprobs_are_those_of_the_model(limits: dict[str, int], num_blocks: int) -> None:
    model = FakeModel()
    generator = make_generator(model, num_blocks=num_blocks, **limits)
    prompts = [*random_prompts(4, 5, longest=60), [7], [7, 8]]
    config = SamplingConfig(max_new_tokens=25, ignore_eos=True, prompt_logprobs=2)
    out = generator.generate(prompts, config)
    for prompt, told in zip(prompts, out.prompt_logprobs):
        assert told[0] is None and len(told) == len(prompt)
        for index in range(1, len(prompt)):
            logits, token = model.logits_of(prompt[:index]), prompt[index]
            own, _, _ = OPS.token_logprobs(logits[None], torch.tensor([0]), torch.tensor([token]), 0)
            assert told[index].token == token and told[index].logprob == float(own[0])
            assert told[index].logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)
            assert [token for token, _ in told[index].top] == logits.topk(2).indices.tolist()
    plain = make_generator(model).generate(prompts, SamplingConfig(max_new_tokens=25, ignore_eos=True))
    assert out.generated_token_ids == plain.generated_token_ids and plain.prompt_logprobs is None
    check_idle(generator)


class CoarseModel(FakeModel):
    """A model with many exact ties between tokens."""

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        return super().logits_of(tokens).round()


def test_the_rank_of_a_prompts_token_counts_those_that_are_likelier() -> None:
    model, [prompt] = CoarseModel(), random_prompts(6, 1, longest=60)
    told = make_generator(model).generate([prompt], SamplingConfig(max_new_tokens=2, prompt_logprobs=1))
    rows = [model.logits_of(prompt[:index]) for index in range(1, len(prompt))]
    likelier = [int((row > row[token]).sum()) for row, token in zip(rows, prompt[1:])]
    assert [entry.rank for entry in told.prompt_logprobs[0][1:]] == [1 + count for count in likelier]
    assert likelier != [int((row >= row[token]).sum()) - 1 for row, token in zip(rows, prompt[1:])], "there are ties"


def test_prompt_logprobs_are_scores_and_those_of_transformers(checkpoint) -> None:
    folder, oracle, _ = checkpoint("llama")
    with LLMModel(folder, dtype="float32", progress=False) as model:
        prompt = torch.randint(2, 280, (150,), generator=torch.Generator().manual_seed(1))
        out = model.generate(prompt.tolist(), SamplingConfig(max_new_tokens=2, prompt_logprobs=True))
        told = torch.tensor([entry.logprob for entry in out.prompt_logprobs[0][1:]])
        assert torch.equal(told, model.score(prompt.tolist())[0]), "bit by bit"
        with torch.no_grad():
            theirs = oracle(prompt[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(
            told, theirs[:-1].gather(1, prompt[1:, None])[:, 0], rtol=1e-3, atol=1e-4
        )  # the tolerance of logits


def test_more_prompt_logprobs_than_words_are_told() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs=51 asks for more tokens than the vocabulary's 50"):
        make_generator().generate([1], SamplingConfig(prompt_logprobs=51))


def test_each_row_has_metrics_of_its_own() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=2)
    generator.engine.model.hook = lambda batch: time.sleep(0.002)
    out = generator.generate([[1, 2, 3], [4], [5, 6]], SamplingConfig(max_new_tokens=5))
    assert [metrics.num_prompt_tokens for metrics in out.request_metrics] == [3, 1, 2]
    assert [metrics.num_generated_tokens for metrics in out.request_metrics] == [5, 5, 5]
    for metrics in out.request_metrics:
        assert (
            0
            <= metrics.seconds_waiting
            < metrics.seconds_to_first_token
            < metrics.total_seconds
            <= out.metrics.total_seconds
        )
        assert (
            metrics.prefill_tokens_per_second > 0
            and metrics.decode_tokens_per_second > 0
            and metrics.num_preemptions == 0
        )
        assert f"{metrics.num_prompt_tokens} prompt + 5 new tokens" in str(metrics)
    whole = out.metrics
    after_the_firsts = whole.decode_tokens_per_second * (whole.total_seconds - whole.seconds_to_first_token)
    assert after_the_firsts == pytest.approx(3 * 4)
    with by_hand(generator):  # paused until all requests are added
        requests = [generator.add_request([token], SamplingConfig(max_new_tokens=5)) for token in (1, 2, 3)]
    waits = [request.result(60).metrics.seconds_waiting for request in requests]
    assert waits[2] > 4 * 0.002 + min(waits[:2]), f"two at a time, the third waits for five steps of theirs: {waits}"
    assert str(replace(out.metrics, seconds_waiting=1.5)).endswith(", waited 1.50 s")


COMPOSED = list(itertools.product([1, 7], range(len(CONFIGS))))


@pytest.mark.parametrize("case", sample(COMPOSED, lambda case: sum(case) % 2), ids=str)
def test_processors_of_every_kind_compose_with_drafts(case: tuple[int, int]) -> None:
    length, model, config = case[0], FakeModel(), with_length(CONFIGS[case[1]], 40)
    engine = Engine.create(
        model, OPS, 30 * model.kv_spec.block_bytes, drafter=PlainContinuation(random.Random(1), length, config)
    )
    generator = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))
    out = generator.generate(prompts := random_prompts(length, 8), config)
    plain = make_generator().generate(prompts, config)
    assert (out.generated_token_ids, out.texts, out.finish_reasons) == (
        plain.generated_token_ids,
        plain.texts,
        plain.finish_reasons,
    )
    assert out.logprobs == plain.logprobs and out.prompt_logprobs == plain.prompt_logprobs
    assert 0 < out.metrics.num_accepted_tokens < out.metrics.num_drafted_tokens, "some were taken, some rolled back"
    check_idle(generator)


class PlainContinuation(NoDraft):
    """Proposes the continuation that the same config gives without drafts, with wrong tokens at random places."""

    def __init__(self, chance: random.Random, length: int, config: SamplingConfig) -> None:
        self.chance, self.length, self.config = chance, length, config
        self.known: dict[tuple[int, ...], list[int]] = {}

    def extend(self, spans, cache) -> None:
        for span in spans:
            sequence = span.sequence
            room = min(self.length, sequence.max_length - len(sequence.tokens) - 1)
            if span.num_rows == 1 and room > 0 and cache.reserve(sequence, len(sequence.tokens) + room):
                prompt = sequence.tokens[: sequence.num_prompt_tokens]
                if tuple(prompt) not in self.known:
                    self.known[tuple(prompt)] = make_generator().generate(prompt, self.config).generated_token_ids[0]
                drafts = self.known[tuple(prompt)][sequence.num_generated :][:room]
                span.drafts = [token if self.chance.random() < 0.7 else (token + 1) % 50 for token in drafts]


def test_no_logprob_is_told_of_a_draft_beyond_the_end() -> None:
    model = FakeModel(eos_bias=1.0)
    engine = Engine.create(model, OPS, 1 << 20, drafter=ScriptedDrafter(model, random.Random(1), 8))
    generator = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))
    prompts, config = random_prompts(9, 20), SamplingConfig(max_new_tokens=30, logprobs=1)
    out, plain = generator.generate(prompts, config), make_generator(FakeModel(eos_bias=1.0)).generate(prompts, config)
    assert "stop" in out.finish_reasons and out.logprobs == plain.logprobs
    assert [[entry.token for entry in row] for row in out.logprobs] == out.generated_token_ids


# -- repr of outputs ---------------------------------------------------------------------------------------------------


def test_tokens_have_their_texts_beside_log_probabilities() -> None:
    model = bundled()
    out = model.generate("The capital of Japan is", SamplingConfig(max_new_tokens=4, logprobs=2, prompt_logprobs=1))
    assert "".join(entry.text for entry in out.logprobs[0]) == out.texts[0]
    for entry in [*out.logprobs[0], *out.prompt_logprobs[0][1:]]:
        assert entry.text == model.tokenizer.decode(entry.token)
        assert entry.top_texts == tuple(model.tokenizer.decode(token) for token, _ in entry.top)
    assert out.prompt_logprobs[0][0] is None
    answer = model.chat("What is 7 + 8?", SamplingConfig(logprobs=1))
    assert "15" in "".join(entry.text for entry in answer.logprobs)


def test_names_of_other_tools_are_answered_with_the_field() -> None:
    output = bundled().generate("1, 2,", max_new_tokens=2)
    for name, field in (("text", "texts"), ("finish_reason", "finish_reasons"), ("sequences", "output_token_ids")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{field}'"):
            getattr(output, name)
    for misuse in (lambda: output[0], lambda: list(output)):
        with pytest.raises(TypeError, match=r"texts\[0\] has the text of a row"):
            misuse()
    assert not hasattr(output, "shape") and copy.deepcopy(output).texts == pickle.loads(pickle.dumps(output)).texts


def test_outputs_are_short_in_a_notebook() -> None:
    model = bundled()
    out = model.generate(["Once upon a time"] * 7, SamplingConfig(max_new_tokens=60))
    lines = repr(out).splitlines()
    assert lines[0] == "GenerateOutput of 7 texts:" and len(lines) == 7 and lines[-1] == "  and 2 more"
    assert lines[1].startswith(f"  {out.texts[0][:80]!r}... (60 tokens, 'length')")
    one = model.generate("The capital of Japan is", SamplingConfig(max_new_tokens=2))
    assert repr(one) == f"GenerateOutput of 1 text:\n  {one.texts[0]!r} (2 tokens, 'length')"
    assert re.fullmatch(
        r"MemoryReport\(weights: [\d.]+ MiB, cache: .* of .*, process: .*\)", repr(model.memory_report())
    )
    ids = make_generator().generate([1], SamplingConfig(max_new_tokens=1, ignore_eos=True))
    assert "(1 tokens, 'length')" in repr(replace(ids, texts=[])) and "tokens [" in repr(replace(ids, texts=[]))


def test_a_model_says_what_it_is() -> None:
    with LLMModel(TINY, quantization="int4", max_seq_len=100, progress=False) as model:
        assert re.fullmatch(
            rf"LLMModel\('{TINY}': LlamaForCausalLM, \d million weights, int4.*, up to 100 tokens\)", repr(model)
        )
    assert repr(model) == f"LLMModel('{TINY}', closed)"
