"""The assistant of Gemma 4: logits of transformers, and the texts without drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.llm import DraftModelConfig, LLMModel
from pace.llm.engine.engine import Engine
from pace.llm.loading.load import open_model
from pace.llm.loading.options import LoadOptions
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sequence import Sequence, Span
from tests.llm.models.families.gemma4_variants import LARGE
from tests.llm.models.variants import save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.llm.speculation.assistants import change_config, make_agree, oracle_drafts, save_pair
from tests.llm.speculation.test_head_models import check_same, opened
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 11, "centroid_intermediate_top_k": 3}
OWN_WIDTHS = {n: {"head_dim": 16, "num_key_value_heads": 1} for n in (1, 4, 6)}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "shared": ("gemma4_text", {}, {}),
    "clusters": ("gemma4_text", {"sliding_window": 20}, CLUSTERS),
    "large": ("gemma4_text", LARGE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, {}),
    "own-widths": ("gemma4_text", {"per_layer_config": OWN_WIDTHS, "use_double_wide_mlp": False}, {}),
    "unified": ("gemma4_unified_text", {}, {}),
}  # fmt: skip
"""Kind of target, its fields and those of the assistant."""


def engine_of(folder, backend: str = "native", assistant: str = "assistant") -> Engine:
    options = {"dtype": "float32", "progress": False, "num_threads": 1, "kv_cache_bytes": "4MiB"}
    spec = DraftModelConfig(folder / assistant)
    return open_model(LoadOptions(folder / "target", spec_config=spec, backend=backend, **options)).engine


def drafts_of(engine: Engine, texts: list[torch.Tensor], count: int) -> torch.Tensor:
    """Logits `[T, count, V]` of drafts for some texts. The model has computed all of their tokens but the last."""
    source, cache, found = engine.drafter.source, engine.cache, []
    strategy = SimpleNamespace(rules=None, takes_drafts=True)
    sequences = [Sequence(ids.tolist(), strategy=strategy, stopping=None, max_length=80) for ids in texts]
    for sequence in sequences:
        length = len(sequence.tokens) - 1
        last = sequence.tokens.pop()
        assert cache.admit(sequence, length)
        spans = [Span(sequence, 0, length)]
        batch = BatchBuilder(kept_width=engine.model.kept_width).build(spans, cache.kv)
        engine.model.forward(batch)
        cache.commit(sequence, length)
        sequence.append(last)
        source.observe(spans, [[last]], batch.kept)
        assert source.kind(sequence, count) == 0 and cache.reserve(sequence, length + count + 1)
    forward = source._forward
    source._forward = lambda batch: found.append(forward(batch)) or found[-1]
    assert [len(drafts) for drafts in source.propose(sequences, [count] * len(texts), cache.kv)] == [count] * len(texts)
    source._forward = forward
    for sequence in sequences:
        source.forget(sequence)
        cache.free(sequence)
    return torch.stack(found, 1)


CASES = [("native", form) for form in FORMS] + [("native-eager", "clusters"), ("torch", "clusters")]
ALWAYS = ("native", "shared"), ("native", "clusters")


@pytest.mark.parametrize("case", sample(CASES, lambda case: case in ALWAYS), ids=" ".join)
def test_logits_are_those_of_transformers(case, tmp_path) -> None:
    """For texts within windows and beyond, one at a time and together. After 37 tokens, a window of 20 begins with the
    last position of a block. The target does not need that block any more."""
    backend, form = case
    oracle = save_pair(tmp_path, *FORMS[form])
    texts = [torch.randint(3, 99, (length,), generator=torch.Generator().manual_seed(1)) for length in (37, 5, 60)]
    expected = [oracle_drafts(*oracle, ids, 3) for ids in texts]
    engine = engine_of(tmp_path, backend)
    alone = [drafts_of(engine, [ids], 3)[0] for ids in texts]
    for logits, wanted in zip(alone, expected):
        assert relative_error(logits, wanted) < TOLERANCE
    together = drafts_of(engine, texts, 3)
    assert torch.equal(together, torch.stack(alone)) or backend == "torch"
    assert engine.cache.used_bytes == 0
    engine.drafter.check_integrity()


@pytest.mark.parametrize("agrees", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_texts_are_those_without_drafts(agrees, tmp_path) -> None:
    fields = {"tie_word_embeddings": False, "sliding_window": 20}
    save_pair(tmp_path, "gemma4_text", fields, {} if agrees else CLUSTERS, hidden_size=32)
    if agrees:
        make_agree(tmp_path)
    spec = DraftModelConfig(tmp_path / "assistant", num_draft_tokens=3, adaptive=False)
    with opened(tmp_path / "target") as plain, opened(tmp_path / "target", spec) as drafted:
        num_drafted, num_accepted = check_same(plain, drafted)
        assert num_drafted > 100 and (not agrees or num_accepted > num_drafted / 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
        {"backend": "native-eager"},
        {"kv_cache_type": "bmc"},
        {"kv_cache_type": "dynamic"},
    ],
    ids=str,
)
def test_texts_in_other_forms(options, tmp_path) -> None:
    save_pair(tmp_path, "gemma4_text", {}, CLUSTERS)
    spec = DraftModelConfig(tmp_path / "assistant", num_draft_tokens=2, adaptive=False)
    with opened(tmp_path / "target", **options) as plain, opened(tmp_path / "target", spec, **options) as drafted:
        assert check_same(plain, drafted)[0] > 100


@pytest.mark.thorough
def test_a_session_of_other_windows_is_refused(tmp_path) -> None:
    save_pair(tmp_path, "gemma4_text", {}, {})
    spec = DraftModelConfig(tmp_path / "assistant")
    with opened(tmp_path / "target") as plain, opened(tmp_path / "target", spec) as drafted:
        with plain.session() as session:
            session.append([3, 4, 5])
            session.save(tmp_path / "saved")
        with pytest.raises(ValueError, match="kept before windows for a drafter was 0 .* the same spec_config"):
            drafted.load_session(tmp_path / "saved")


def test_its_memory_is_its_weights(tmp_path) -> None:
    """It has no cache. The model's windows keep two more positions for it, and its last layers still run for the last
    token of a prompt only."""
    save_pair(tmp_path, "gemma4_text", {}, {})
    engine = engine_of(tmp_path)
    memory = engine.drafter.memory()
    assert memory.cache_budget == engine.drafter.bytes_for(100) == 0 and sum(memory.weights.values()) > 0
    assert sorted({group.window for group in engine.cache.spec.groups} - {None}) == [9]
    assert engine.model.model.stages is not None


WRONG = {
    "hidden_size 64, and this Gemma4ForConditionalGeneration has 32": ({}, {"backbone_hidden_size": 64}),
    "vocab_size 98, and this Gemma4ForConditionalGeneration has 99": ({"vocab_size": 98}, {}),
    r"width \(1, 20\), and the model has \(2, 20\)": ({"num_key_value_heads": 1}, {}),
    "num_kv_shared_layers of an assistant must be all 3 layers; got 2": ({"num_kv_shared_layers": 2}, {}),
    "use_double_wide_mlp of an assistant must be False": ({"use_double_wide_mlp": True}, {}),
    "vocab_size must be a multiple of num_centroids; got 99 and 10": (
        {}, {"use_ordered_embeddings": True, "num_centroids": 10, "centroid_intermediate_top_k": 3}
    ),
    "centroid_intermediate_top_k must be at most num_centroids": (
        {}, {"use_ordered_embeddings": True, "num_centroids": 11, "centroid_intermediate_top_k": 12}
    ),
}  # fmt: skip


@pytest.mark.thorough
def test_an_assistant_of_another_model(tmp_path) -> None:
    save_pair(tmp_path, "gemma4_text", {}, {})
    before = (tmp_path / "assistant" / "config.json").read_text()
    for message, (text, fields) in WRONG.items():
        change_config(tmp_path / "assistant", text, **fields)
        with pytest.raises(ValueError, match=message):
            engine_of(tmp_path)
        (tmp_path / "assistant" / "config.json").write_text(before)
    save_tiny(tmp_path / "target", "llama", {})
    with pytest.raises(ValueError, match="this is an assistant of Gemma 4, and the model is LlamaForCausalLM"):
        engine_of(tmp_path)


@pytest.mark.thorough
def test_clusters_that_are_wrong(tmp_path) -> None:
    save_pair(tmp_path, "gemma4_text", {}, CLUSTERS)
    path = tmp_path / "assistant" / "model.safetensors"
    state = load_file(path)
    name = "masked_embedding.token_ordering"
    for ordering in (None, state[name][:-1].clone(), state[name].clamp(max=97)):
        rest = {other: tensor for other, tensor in state.items() if other != name}
        save_file(rest | ({} if ordering is None else {name: ordering}), path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="token_ordering"):
            engine_of(tmp_path)


@pytest.mark.thorough
def test_a_gguf_file(tmp_path) -> None:
    """It has the bits of the checkpoint. llama.cpp writes it without clusters."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.gemma4.gemma4_files import write_gemma4

    save_pair(tmp_path, "gemma4_text", {}, {})
    write_gemma4(tmp_path / "assistant", tmp_path / "assistant.gguf")
    texts = [torch.arange(3, 40)]
    found, expected = (
        drafts_of(engine_of(tmp_path, assistant=name), texts, 3) for name in ("assistant.gguf", "assistant")
    )
    assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="Gemma4AssistantForCausalLM drafts for another model"):
        LLMModel(tmp_path / "assistant.gguf", progress=False)


def test_how_an_assistant_is_given(tmp_path) -> None:
    save_pair(tmp_path, "gemma4_text", {}, {})
    with pytest.raises(NotImplementedError, match=r'assistant, such as DraftModelConfig\("google'):
        LLMModel(tmp_path / "target", spec_config="mtp", progress=False)
    with pytest.raises(NotImplementedError, match="Gemma4AssistantForCausalLM drafts for another model"):
        LLMModel(tmp_path / "assistant", progress=False)
