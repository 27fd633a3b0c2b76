"""Files of older families: against transformers, and against the checkpoint that each was made from."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.models.model_list import read_config
from tests.checkpoints.gguf.checks import check_blocks, check_config, check_logits
from tests.checkpoints.gguf.older.older_files import write_older
from tests.llm.models.variants import IDS, VARIANTS, save_tiny

CLIP = {"attn_config": {"clip_qkv": 0.6}}
HELD = {name: VARIANTS[IDS.index(name)] for name in (
    "apertus-default", "apertus-yarn", "bloom-default", "bloom-twelve-untied", "falcon-default", "falcon-40b",
    "falcon-11b", "gpt_bigcode-default", "mpt-default", "olmo-default", "olmo-tied-linear",
)} | {"mpt-clip": ("mpt", "clip", CLIP), "olmo-clip": ("olmo", "clip", {"clip_qkv": 0.5})}  # fmt: skip
"""The variants that a file can describe."""
UNSTATED = "qkv_by_head|qkv_by_group|max_position_embeddings|"
"""Pattern of fields that a file does not have or expresses differently; more of them by model_type."""
UNSTATED_OF = {
    "apertus": "xielu|rope",
    "falcon": "new_decoder_architecture|num_ln_in_parallel_attn|num_kv_heads|rope",
}


def written(tmp_path, name, **options):
    """Returns transformers' model, and writes it as a checkpoint and as a file."""
    model_type, _, fields = HELD[name]
    theirs = save_tiny(tmp_path / "hub", model_type, fields)
    write_older(tmp_path / "hub", tmp_path / "model.gguf", **options)
    return theirs


@pytest.mark.parametrize("name", HELD)
def test_float32_logits_and_the_config(tmp_path, name):
    # Factors of llama3 are rounded to float32 in files.
    check_logits(tmp_path, written(tmp_path, name), same_bits=name != "apertus-default")
    found, expected = check_config(tmp_path, UNSTATED + UNSTATED_OF.get(HELD[name][0], ""))
    assert found.num_key_value_heads == expected.num_key_value_heads


@pytest.mark.parametrize("model_type", ["apertus", "bloom", "falcon", "gpt_bigcode", "mpt", "olmo"])
def test_blocks_have_the_weights_of_the_file(tmp_path, model_type):
    wide = {"hidden_size": 64}
    width = {"falcon": "ffn_hidden_size", "gpt_bigcode": "n_inner", "apertus": "intermediate_size"}
    wide |= {width.get(model_type, "intermediate_size"): 64} if model_type not in ("bloom", "mpt") else {}
    save_tiny(tmp_path / "hub", model_type, wide)
    check_blocks(tmp_path, write_older)


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "message"),
    [
        ("mpt-default", "attention.max_alibi_bias", 0.0, NotImplementedError, "alibi = False is not implemented"),
        ("olmo-default", "attention.layer_norm_epsilon", 0.5, NotImplementedError, "epsilon = 0.5 is not implemented"),
        ("apertus-default", "xielu.beta", [0.5], ValueError, "beta must have a number for each of 2 layers; got 1"),
        ("apertus-default", "xielu.eps", [1, 2], ValueError, "eps must have a number for each of 2 layers; got 2 of"),
        ("apertus-default", "xielu.eps", None, ValueError, "xielu.eps"),
    ],
)
def test_what_is_refused(tmp_path, name, key, value, error, message):
    def change(writer):
        whole = key if key.startswith("xielu") else f"{writer.arch}.{key}"
        writer.kv_data[0].pop(whole)
        if value is not None:
            (writer.add_array if isinstance(value, list) else writer.add_float32)(whole, value)

    written(tmp_path, name, add=change)
    with pytest.raises(error, match=message):
        with GgufCheckpoint(tmp_path / "model.gguf") as reader:
            read_config(reader.config)


def test_a_number_of_xielu_may_be_the_same_for_all_layers(tmp_path):
    def change(writer):
        writer.kv_data[0].pop("xielu.beta")
        writer.add_float32("xielu.beta", 0.25)

    written(tmp_path, "apertus-default", add=change)
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        assert [numbers[2] for numbers in reader.config["xielu"]] == [0.25, 0.25]
