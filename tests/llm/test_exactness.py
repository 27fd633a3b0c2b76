"""The bits of a text depend only on the text. They do not depend on the batch, chunks, the number of threads,
preemption, kept keys and values, or drafts. Tests one model of each kind with every kind of weight."""

from __future__ import annotations

import itertools

import pytest
import torch

from pace import _C
from pace.llm import LLMModel, PromptLookupConfig, SamplingConfig
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample

KINDS = {
    "dense with windows": ("gemma2", {"sliding_window": 20}),
    "experts": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}),
    "experts and a shared one": (
        "qwen2_moe",
        dict(num_experts=10, num_experts_per_tok=3, moe_intermediate_size=64, shared_expert_intermediate_size=96),
    ),
    "experts, sinks, windows": ("gpt_oss", {"num_local_experts": 8, "sliding_window": 20}),
    "latents": (
        "deepseek_v3",
        dict(kv_lora_rank=40, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=24)
        | dict(moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=4),
    ),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256}
FORMATS = {name: {"dtype": name} for name in ("float32", "bfloat16")}
FORMATS |= {name: {"quantization": name} for name in ("int8", "int4", "mxfp4")}
GREEDY = SamplingConfig(max_new_tokens=24, ignore_eos=True, logprobs=0)
LONGER = SamplingConfig(max_new_tokens=48, ignore_eos=True, logprobs=0)


def prompts():
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(2, 99, (37,), generator=generator).tolist()
    lengths = (1, 5, 64, 17, 90)
    own = [torch.randint(2, 99, (length,), generator=generator).tolist() for length in lengths]
    repeated = (own[1] * 9)[:41]  # prompt lookup finds drafts here
    return [*own, repeated, shared + own[0], shared + own[3]]


def answers(model, rows, config=GREEDY):
    return read(model.generate(rows, config))


def singly(model, rows):
    return [answers(model, [row])[0] for row in rows]


def read(output):
    """Returns the generated ids of each row and their log-probabilities, which reveal the bits of the logits."""
    return [
        (ids, [token.logprob for token in told])
        for ids, told in zip(output.generated_token_ids, output.logprobs, strict=True)
    ]


CASES = list(itertools.product(KINDS, FORMATS))


@pytest.mark.parametrize("case", sample(CASES, lambda case: case in CASES[::6]), ids=str)
def test_bits_are_a_texts_own(case: tuple[str, str], tmp_path, subtests) -> None:
    kind, format = case
    model_type, fields = KINDS[kind]
    sizes = dict(SIZES)
    if model_type in ("qwen2_moe", "deepseek_v3"):
        del sizes["head_dim"]
    save_tiny(tmp_path, model_type, sizes | fields)

    def load(**more) -> LLMModel:
        return LLMModel(tmp_path, **{"progress": False, "num_threads": 2, **FORMATS[format], **more})

    with load(prefix_cache_bytes=0) as model:
        alone = singly(model, prompts())
        assert len({tuple(ids) for ids, _ in alone}) > 5, "the model says different things"
        for holds in (among_others, in_chunks, on_any_number_of_threads):
            with subtests.test(holds.__name__):
                holds(model, alone)
        for holds in (after_preemption, from_a_kept_prefix, with_drafts):
            with subtests.test(holds.__name__):
                holds(model, alone, load)


def among_others(model, alone):
    assert answers(model, prompts()[::-1]) == alone[::-1]


def in_chunks(model, alone):
    row = prompts()[2]
    with model.session() as session:
        whole = session.append(row, logits="all")
    for chunk in (1, 3, 16, 17):
        with model.session() as session:
            pieces = [session.append(row[i : i + chunk], logits="all") for i in range(0, len(row), chunk)]
        assert torch.equal(torch.cat(pieces), whole), chunk


def on_any_number_of_threads(model, alone):
    before = _C.get_num_threads()
    try:
        for threads in (1, 3, 8):
            _C.set_num_threads(threads)
            assert answers(model, prompts()) == alone, threads
    finally:
        _C.set_num_threads(before)


def after_preemption(model, alone, load):
    undisturbed = answers(model, prompts(), LONGER)
    room = model.generator.engine.cache.bytes_for(90 + LONGER.max_new_tokens)  # for the longest text and a few more
    begin = GREEDY.max_new_tokens
    assert [(ids[:begin], logprobs[:begin]) for ids, logprobs in undisturbed] == alone
    with load(kv_cache_bytes=room, prefix_cache_bytes=0) as model:
        output = model.generate(prompts(), LONGER)
        assert read(output) == undisturbed
        assert output.metrics.num_preemptions > 0


def from_a_kept_prefix(model, alone, load):
    with load() as model:
        for _ in range(2):
            assert answers(model, prompts()) == alone
        assert singly(model, prompts()[-3:]) == alone[-3:]


def with_drafts(model, alone, load):
    with load(spec_config=PromptLookupConfig()) as model:
        assert answers(model, prompts()) == alone
        assert singly(model, prompts()[-3:]) == alone[-3:]
