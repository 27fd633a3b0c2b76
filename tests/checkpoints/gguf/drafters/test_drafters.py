"""GGUF files of EAGLE-3 drafters: the drafter of the checkpoint that a file was made from, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("gguf", reason="the gguf package is not installed")

from pace.llm import DraftModelConfig, LLMModel
from tests.checkpoints.gguf.drafters.drafter_files import write_eagle3
from tests.llm.models.draft_heads import run, runners, save_eagle3
from tests.llm.models.variants import save_tiny

IDS = torch.randint(3, 99, (21,), generator=torch.Generator().manual_seed(7))
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FORMS = {
    "default": {},
    "norms and llama3": {"norm_before_residual": True, "norm_before_fc": True, "rope_scaling": LLAMA_3},
    "the head of the target": {"draft_vocab_size": None, "hidden_size": 32},
}


def saved(tmp_path, **fields):
    """Saves a target and a drafter. Returns the drafter's tensors and config."""
    save_tiny(tmp_path / "target", "llama", {})
    state = save_eagle3(tmp_path / "draft", **fields)
    return state, json.loads((tmp_path / "draft" / "config.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_the_drafter_of_its_checkpoint(form, tmp_path) -> None:
    state, config = saved(tmp_path, **FORMS[form])
    shared = ("embed_tokens.weight", "lm_head.weight") if "target" in form else ()
    write_eagle3(tmp_path / "draft.gguf", state, config, shared)
    if shared:
        own = {name: each for name, each in state.items() if name not in shared}
        save_file(own, tmp_path / "draft" / "model.safetensors")
    found = []
    for path in ("draft", "draft.gguf"):
        target, head = runners(tmp_path / "target", DraftModelConfig(tmp_path / path))
        rows = head.model.encode(head.run_slice, run(target, IDS)[1][:-1])
        logits, kept = run(head, IDS[1:], rows)
        found.append((rows, kept, head.model.to_target(logits)))
    assert found[0][2].isfinite().any()
    for of_hub, of_file in zip(*found, strict=True):
        if "rope_scaling" in config:  # a file has rounded factors
            of_hub, of_file = (torch.where(each > -torch.inf, each, 0.0) for each in (of_hub, of_file))
            torch.testing.assert_close(of_file, of_hub, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(of_hub, of_file)


def test_drafts_of_a_file_change_no_token(tmp_path) -> None:
    state, config = saved(tmp_path)
    write_eagle3(tmp_path / "draft.gguf", state, config)
    options = {"dtype": "float32", "progress": False, "num_threads": 1, "kv_cache_bytes": "4MiB"}
    prompt = IDS[:8].tolist()
    spec = DraftModelConfig(tmp_path / "draft.gguf", num_draft_tokens=2, adaptive=False)
    with LLMModel(tmp_path / "target", **options) as plain:
        expected = plain.generate([prompt], max_new_tokens=12, ignore_eos=True).generated_token_ids
    with LLMModel(tmp_path / "target", spec_config=spec, **options) as drafted:
        out = drafted.generate([prompt], max_new_tokens=12, ignore_eos=True)
    assert out.generated_token_ids == expected and out.metrics.num_drafted_tokens > 10


WRONG = {
    "d2t must give 40 different tokens": {"d2t": lambda ids: ids + 60},
    "no tensor d2t": {"d2t": None},
    "target_layers": {"target_layers": None},
    "a list of 3 layers": {"target_layers": [0, 1]},
    "target_hidden_size": {"target_hidden_size": None},
    "for models of hidden_size 64": {"target_hidden_size": 64},
}


@pytest.mark.parametrize("message", WRONG)
def test_files_that_are_damaged_or_for_another_model(message, tmp_path) -> None:
    state, config = saved(tmp_path)
    changes = dict(WRONG[message])
    if "d2t" in changes:
        change = changes.pop("d2t")
        state = {name: each if name != "d2t" or not change else change(each) for name, each in state.items()}
        write_eagle3(tmp_path / "draft.gguf", state, config, () if change else ("d2t",))
    else:
        write_eagle3(tmp_path / "draft.gguf", state, config, **changes)
    with pytest.raises(ValueError, match=message):
        runners(tmp_path / "target", DraftModelConfig(tmp_path / "draft.gguf"))


def test_a_drafter_alone_is_refused(tmp_path) -> None:
    state, config = saved(tmp_path)
    write_eagle3(tmp_path / "draft.gguf", state, config)
    for path in ("draft", "draft.gguf"):
        with pytest.raises(NotImplementedError, match="drafts for another model"):
            LLMModel(tmp_path / path, progress=False)
