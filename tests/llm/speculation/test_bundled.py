"""The bundled model with its draft model on the native kernels: the same text, and the counts of drafts."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from pace.assets import TINY, TINY_DRAFT
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig, SamplingConfig
from tests.llm.generators import check_idle, what_matters

ENTRIES = [entry for entry in json.loads((TINY / "prompts.json").read_text(encoding="utf-8")) if "messages" in entry]
WAYS = {
    "lookup": PromptLookupConfig(),
    "lookup, fixed": PromptLookupConfig(adaptive=False),
    "draft": DraftModelConfig(TINY_DRAFT),
    "draft, fixed": DraftModelConfig(TINY_DRAFT, num_draft_tokens=5, adaptive=False),
}
CONFIGS = {
    "greedy": SamplingConfig(max_new_tokens=48),
    "sampled": SamplingConfig(max_new_tokens=48, do_sample=True, temperature=0.8, seed=7),
    "all": SamplingConfig(max_new_tokens=40, do_sample=True, top_p=0.9, repetition_penalty=1.1, seed=3, logprobs=2),
    "stop strings": SamplingConfig(max_new_tokens=40, stop_strings=[" the", "."]),
}


@pytest.fixture(scope="module")
def plain():
    return LLMModel(TINY)


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def drafted(request):
    return LLMModel(TINY, spec_config=request.param)


def encoded(model, entries: list[dict]) -> list[list[int]]:
    template = functools.partial(model.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    return [template(entry["messages"], tools=entry.get("tools")) for entry in entries]


@pytest.fixture(scope="module")
def without_drafts(plain):
    """Returns `without_drafts(name) -> outputs` of all rows in one batch, and of every fourth row alone."""
    rows = encoded(plain, ENTRIES[::6])
    return functools.cache(
        lambda name: [what_matters(plain.generate(asked, CONFIGS[name])) for asked in (rows, *rows[::4])]
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_text(plain, drafted, without_drafts, name: str) -> None:
    rows = encoded(plain, ENTRIES[::6])
    for asked, expected in zip((rows, *rows[::4]), without_drafts(name), strict=True):
        assert what_matters(drafted.generate(asked, CONFIGS[name])) == expected
    check_idle(drafted)


def test_copying_by_looking_up(plain) -> None:
    """Prompt lookup finds most of the copied text, so that there are far fewer steps than tokens."""
    model = LLMModel(TINY, spec_config=PromptLookupConfig(adaptive=False))
    rows = encoded(plain, [entry for entry in ENTRIES if entry["category"] == "copying"])
    metrics = model.generate(rows, SamplingConfig(max_new_tokens=80)).metrics
    assert metrics.num_accepted_tokens > 0.5 * metrics.num_generated_tokens


def test_stories_by_the_draft_model(plain) -> None:
    model = LLMModel(TINY, spec_config=DraftModelConfig(TINY_DRAFT, num_draft_tokens=3, adaptive=False))
    rows = encoded(plain, [entry for entry in ENTRIES if "story" in json.dumps(entry["messages"])])
    greedy = SamplingConfig(max_new_tokens=100)
    for config in (greedy, SamplingConfig(max_new_tokens=100, do_sample=True, temperature=0.7, seed=1)):
        metrics = model.generate(rows, config).metrics
        assert metrics.num_accepted_tokens > 0.5 * metrics.num_drafted_tokens > 0
    assert "".join(model.stream(rows[0], greedy)) == plain.generate(rows[0], greedy).texts[0]


in_int8 = functools.cache(lambda: LLMModel(TINY, kv_cache_dtype="int8"))


@pytest.mark.parametrize("spec_config", WAYS.values(), ids=WAYS)
def test_with_keys_and_values_in_int8(spec_config) -> None:
    plain, drafted = in_int8(), LLMModel(TINY, kv_cache_dtype="int8", spec_config=spec_config)
    rows = encoded(plain, ENTRIES[::8])
    ours, theirs = (model.generate(rows, CONFIGS["sampled"]) for model in (drafted, plain))
    assert what_matters(ours) == what_matters(theirs)
    engine, has_model = drafted._engine, isinstance(spec_config, DraftModelConfig)
    caches = [engine.cache, *([engine.drafter.source.cache] if has_model else [])]
    assert {cache.spec.dtype for cache in caches} == {torch.int8}
