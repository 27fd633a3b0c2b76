"""GGUF files of EAGLE-3 drafters: the drafter of the checkpoint that a file was made from, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("gguf", reason="the gguf package is not installed")

import gguf

from benchmarks.comparison.gguf_families import permute, rope_factors
from pace.llm import DraftModelConfig, LLMModel
from tests.checkpoints.gguf.files import finish
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
NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_layernorm": "blk.0.attn_norm",
    "hidden_norm": "blk.0.attn_norm_2",
    "post_attention_layernorm": "blk.0.ffn_norm",
    **{f"self_attn.{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "blk.0.attn_output",
    **{f"mlp.{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
}
"""The names of llama.cpp's converter."""


def write_eagle3(path, state, config, left_out=(), **keys) -> None:
    """Writes a drafter as llama.cpp's converter does. `keys` replace keys; None leaves one out."""
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_vocab_size(config["vocab_size"])
    known = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": 1,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        **{f"attention.{part}_length": config["head_dim"] for part in ("key", "value")},
        "rope.dimension_count": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "target_layers": config["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": config["target_hidden_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    adders = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (known | keys).items():
        if value is not None:
            adders[type(value)](f"eagle3.{key}", value)
    for name, tensor in state.items():
        module = name.removeprefix("midlayer.").removesuffix(".weight")
        if module.endswith(("q_proj", "k_proj")):
            tensor = permute(tensor, config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"])
        if name == "d2t" and name not in left_out:
            ids = (tensor + torch.arange(len(tensor))).numpy()
            writer.add_tensor("d2t", ids, raw_dtype=gguf.GGMLQuantizationType.I64)
        elif module in NAMES and name not in left_out:
            writer.add_tensor(f"{NAMES[module]}.weight", tensor.contiguous().numpy())
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", rope_factors({"rope_theta": 10000.0, **config}))
    finish(writer)


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
