"""Texts of models with a layer for multi-token prediction, and with EAGLE-3, are those without drafts."""

from __future__ import annotations

import pytest
import torch

from pace.llm import DraftModelConfig, LLMModel, MtpConfig, SamplingConfig
from tests.llm.generators import check_idle, what_matters
from tests.llm.models.draft_heads import MTP, save_eagle3, save_mtp
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

PROMPTS = [
    torch.randint(3, 99, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (3, 17, 40)
]
CONFIGS = {
    "greedy": SamplingConfig(max_new_tokens=35, ignore_eos=True, logprobs=1),
    "sampled": SamplingConfig(
        max_new_tokens=30, ignore_eos=True, do_sample=True, temperature=0.7, seed=3, num_return_sequences=2, logprobs=1
    ),
    "processed": SamplingConfig(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.2, do_sample=True, seed=5),
}


def opened(folder, spec_config=None, **options) -> LLMModel:
    options = {"dtype": "float32", "progress": False, "kv_cache_bytes": "8MiB", **options}
    return LLMModel(folder, spec_config=spec_config, **options)


def check_same(plain: LLMModel, drafted: LLMModel) -> tuple[int, int]:
    """Compares texts of a batch, and of single prompts. Returns the numbers of drafts and of accepted ones."""
    num_drafted = num_accepted = 0
    for asked in (PROMPTS, *PROMPTS[::2]):
        for config in CONFIGS.values():
            out = drafted.generate(asked, config)
            assert what_matters(out) == what_matters(plain.generate(asked, config))
            num_drafted += out.metrics.num_drafted_tokens
            num_accepted += out.metrics.num_accepted_tokens
    check_idle(drafted, used_bytes=None)
    assert drafted.generator.engine.drafter.memory().cache_used == 0
    return num_drafted, num_accepted


@pytest.mark.parametrize("model_type", sample(list(MTP), lambda name: name in ("qwen3_5_text", "glm4_moe")))
def test_multi_token_prediction(model_type, tmp_path) -> None:
    save_mtp(tmp_path, model_type, agrees=True)
    with opened(tmp_path) as plain:
        for spec in (MtpConfig(num_draft_tokens=3, adaptive=False), "mtp"):
            with opened(tmp_path, spec) as drafted:
                num_drafted, num_accepted = check_same(plain, drafted)
                assert num_accepted > num_drafted / 3 or spec == "mtp"  # which drafts only if that pays


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "opt"])
def test_eagle3(model_type, tmp_path) -> None:
    save_tiny(tmp_path / "target", model_type, {})
    save_eagle3(tmp_path / "draft")
    spec = DraftModelConfig(tmp_path / "draft", num_draft_tokens=2, adaptive=False)
    with opened(tmp_path / "target") as plain, opened(tmp_path / "target", spec) as drafted:
        num_drafted, _ = check_same(plain, drafted)
        assert num_drafted > 100


def test_quantised_and_op_by_op(tmp_path) -> None:
    save_mtp(tmp_path, "qwen3_5_text", agrees=True)
    spec = MtpConfig(num_draft_tokens=2, adaptive=False)
    for options in ({"quantization": "int8", "dtype": "bfloat16"}, {"backend": "native-eager"}):
        with opened(tmp_path, **options) as plain, opened(tmp_path, spec, **options) as drafted:
            num_drafted, num_accepted = check_same(plain, drafted)
            assert num_accepted > num_drafted / 3


def test_memory_is_planned_and_reported(tmp_path) -> None:
    save_mtp(tmp_path, "qwen3_5_text")
    with opened(tmp_path) as plain, opened(tmp_path, "mtp") as drafted:
        before, after = plain.memory_report(), drafted.memory_report()
        assert after.cache_budget <= 8 << 20
        assert after.weights.keys() - before.weights.keys() == {"MultiTokenLayer"}
        size, count = (found["MultiTokenLayer"] for found in (after.weights, after.weight_counts))
        assert 0 < 4 * count <= size < 1.1 * 4 * count  # with headers
        engine = drafted.generator.engine
        drafts = engine.drafter.memory()
        assert 0 < drafts.cache_budget < engine.cache.budget_bytes
        assert engine.drafter.bytes_for(100) > 0
