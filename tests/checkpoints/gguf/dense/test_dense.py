"""Files of dense families that are close to others: against transformers, and against the checkpoint that each was made
from."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.models.model_list import read_config
from tests.checkpoints.gguf.checks import IDS as IDS_OF_TOKENS
from tests.checkpoints.gguf.checks import check_blocks, check_config, check_logits
from tests.checkpoints.gguf.dense.dense_files import write_dense
from tests.checkpoints.gguf.files import load
from tests.editing import change_json
from tests.llm.models.variants import IDS, VARIANTS, save_tiny
from tests.plugins.tiers import sample
from tests.support import prefill

HELD = (
    "arcee-default bitnet-tied-bias-silu exaone-default exaone-llama3-tied exaone4-default exaone4-no-window "
    "exaone4-types-tied gemma-default granite_swa-default granite_swa-types granitemoe_swa-default internlm3-default "
    "iquestcoder-bias-tied jais2-default jais2-no-bias llama-gqa ministral3-default mistral-no-window nemotron-default "
    "nemotron-bias-linear seed_oss-default seed_oss-biases youtu-default"
).split()
"""The variants that a file can describe."""
ALWAYS = {"exaone4-default", "gemma-default", "granite_swa-default", "granitemoe_swa-default", "ministral3-default",
          "nemotron-default", "seed_oss-default", "youtu-default"}  # fmt: skip
OTHERS = {"exaone4": "sliding_window_pattern", "exaone": "rope", "nemotron": "rms_norm_eps", "jais2": "rms_norm_eps"}
"""model_type -> pattern of fields that a file does not have or expresses differently."""


def written(tmp_path, name, **options):
    """Returns transformers' model, and writes it as a checkpoint and as a file."""
    model_type, _, fields = VARIANTS[IDS.index(name)]
    theirs = save_tiny(tmp_path / "hub", model_type, fields)
    write_dense(tmp_path / "hub", tmp_path / "model.gguf", **options)
    return theirs


def config_of(tmp_path):
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        return read_config(reader.config)


@pytest.mark.parametrize("name", sample(HELD, ALWAYS.__contains__))
def test_float32_logits_and_the_config(tmp_path, name):
    # Their factors are rounded to float32 in files.
    check_logits(tmp_path, written(tmp_path, name), same_bits="llama3" not in name and name != "exaone4-no-window")
    saved_as = read_config(json.loads((tmp_path / "hub" / "config.json").read_text()))[0].saved_as
    if saved_as is None or "exaone" in name:  # InternLM 3 and IQuest-Coder are a Llama in files
        unstated = OTHERS.get(name.split("-")[0], "") + ("|rope" if name == "exaone4-no-window" else "")
        check_config(tmp_path, unstated)


WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize("model_type", ["granite_swa", "nemotron", "youtu"])
def test_blocks_have_the_weights_of_the_file(tmp_path, model_type):
    sizes = WIDE | (LATENT | {"num_key_value_heads": 2} if model_type == "youtu" else {})
    save_tiny(tmp_path / "hub", model_type, sizes)
    check_blocks(tmp_path, write_dense)


def change(name, value):
    """Sets a key without its architecture."""

    def add(writer):
        key = f"{writer.arch}.{name}"
        writer.kv_data[0].pop(key, None)
        kind = {list: "array", float: "float32", str: "string"}.get(type(value), "uint32")
        getattr(writer, f"add_{kind}")(key, value)

    return add


def test_layers_of_granite_that_do_not_rotate(tmp_path):
    written(tmp_path, "granite_swa-default", add=change("attention.rope_pattern", [True, False, True, True, False]))
    assert config_of(tmp_path)[1].layer_rope_theta == (1e4, 0.0, 1e4, 1e4, 0.0)
    logits = prefill(load(tmp_path / "model.gguf"), IDS_OF_TOKENS)
    change_json(tmp_path / "hub" / "config.json", layer_rope_theta=[1e4, 0, 1e4, 1e4, 0])
    assert torch.equal(logits, prefill(load(tmp_path / "hub"), IDS_OF_TOKENS))


def test_a_granite_without_rotation_is_refused(tmp_path):
    written(tmp_path, "granite_swa-default", add=lambda writer: writer.add_rope_scaling_finetuned(False))
    with pytest.raises(NotImplementedError, match="granite_swa.rope.scaling.finetuned = false"):
        config_of(tmp_path)


def test_windows_of_exaone_that_a_file_does_not_state(tmp_path):
    def without(writer):
        for name in ("attention.sliding_window", "attention.sliding_window_pattern"):
            del writer.kv_data[0][f"exaone4.{name}"]

    written(tmp_path, "exaone4-default", add=without)
    config = config_of(tmp_path)[1]
    assert config.sliding_window is None and set(config.layer_types) == {"full_attention"}
    written(tmp_path, "exaone4-default", add=lambda writer: (without(writer), change("block_count", 64)(writer)))
    config = config_of(tmp_path)[1]
    assert [config.window(layer) for layer in range(60, 64)] == [4096, 4096, 4096, None]


def test_growth_of_queries_needs_yarn(tmp_path):
    def without(writer):
        writer.kv_data[0]["mistral3.rope.scaling.type"].value = "none"

    written(tmp_path, "ministral3-default", add=without)
    with pytest.raises(NotImplementedError, match="temperature_scale without rope.scaling.type = 'yarn'"):
        config_of(tmp_path)


def test_magnitudes_of_ministral(tmp_path):
    """llama.cpp takes mscale as 1. Without the key, the cosines and sines have the usual factor of YaRN."""
    written(tmp_path, "ministral3-default", add=change("rope.scaling.yarn_log_multiplier", 0.5))
    usual = 0.1 * np.log(4.0) + 1
    assert config_of(tmp_path)[1].rope.attention_factor == pytest.approx(usual / (0.05 * np.log(4.0) + 1))
    written(
        tmp_path,
        "ministral3-default",
        add=lambda writer: writer.kv_data[0].pop("mistral3.rope.scaling.yarn_log_multiplier"),
    )
    assert config_of(tmp_path)[1].rope.attention_factor == pytest.approx(usual)
