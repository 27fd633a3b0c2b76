"""Files of older families: against transformers, and against the checkpoint that each was made from."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.models.model_list import read_config
from tests.checkpoints.gguf.files import load
from tests.checkpoints.gguf.older.older_files import write_older
from tests.llm.models.variants import IDS, VARIANTS, save_tiny
from tests.llm.models.visit import TOLERANCE, oracle, relative_error
from tests.support import prefill

CLIP = {"attn_config": {"clip_qkv": 0.6}}
HELD = {name: VARIANTS[IDS.index(name)] for name in (
    "apertus-default", "apertus-yarn", "bloom-default", "bloom-twelve-untied", "falcon-default", "falcon-40b",
    "falcon-11b", "gpt_bigcode-default", "mpt-default", "olmo-default", "olmo-tied-linear",
)} | {"mpt-clip": ("mpt", "clip", CLIP), "olmo-clip": ("olmo", "clip", {"clip_qkv": 0.5})}  # fmt: skip
"""The variants that a file can describe."""
UNSTATED = {"bos_token_id", "eos_token_id", "pad_token_id", "qkv_by_head", "qkv_by_group", "max_position_embeddings"}
"""Fields that come from a file's vocabulary, or that a file does not have or expresses differently."""
UNSTATED_OF = {
    "apertus": "xielu|rope",
    "falcon": "new_decoder_architecture|num_ln_in_parallel_attn|num_kv_heads|rope",
}
IDS_OF_TOKENS = torch.randint(2, 99, (45,), generator=torch.Generator().manual_seed(1))


def written(tmp_path, name, **options):
    """Returns transformers' model, and writes it as a checkpoint and as a file."""
    model_type, _, fields = HELD[name]
    theirs = save_tiny(tmp_path / "hub", model_type, fields)
    write_older(tmp_path / "hub", tmp_path / "model.gguf", **options)
    return theirs


@pytest.mark.parametrize("name", HELD)
def test_float32_logits(tmp_path, name):
    theirs = written(tmp_path, name)
    logits, of_hub = (prefill(load(tmp_path / path), IDS_OF_TOKENS) for path in ("model.gguf", "hub"))
    assert relative_error(logits, oracle(theirs, IDS_OF_TOKENS)) < TOLERANCE
    if name != "apertus-default":  # factors of llama3 are rounded to float32 in files
        assert torch.equal(logits, of_hub), "the bits of the checkpoint"


@pytest.mark.parametrize("name", HELD)
def test_the_config_is_that_of_the_hub(tmp_path, name):
    """All fields are equal, except those that a file does not have or expresses differently."""
    written(tmp_path, name)
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        model_class, found = read_config(reader.config)
    other_class, expected = read_config(json.loads((tmp_path / "hub" / "config.json").read_text()))
    assert model_class is other_class
    other = [field for field in vars(expected) if re.fullmatch(UNSTATED_OF.get(HELD[name][0], ""), field)]
    same = [field for field in vars(expected) if field not in UNSTATED and field not in other]
    assert {field: vars(found)[field] for field in same} == {field: vars(expected)[field] for field in same}
    assert found.num_key_value_heads == expected.num_key_value_heads


@pytest.mark.parametrize("model_type", ["apertus", "bloom", "falcon", "gpt_bigcode", "mpt", "olmo"])
def test_blocks_have_the_weights_of_the_file(tmp_path, model_type):
    wide = {"hidden_size": 64}
    width = {"falcon": "ffn_hidden_size", "gpt_bigcode": "n_inner", "apertus": "intermediate_size"}
    wide |= {width.get(model_type, "intermediate_size"): 64} if model_type not in ("bloom", "mpt") else {}
    save_tiny(tmp_path / "hub", model_type, wide)
    for as_floats, path in ((False, "blocks.gguf"), (True, "floats.gguf")):
        write_older(tmp_path / "hub", tmp_path / path, "Q8_0", as_floats)
    blocks, floats = (load(tmp_path / path, backend="torch") for path in ("blocks.gguf", "floats.gguf"))
    assert any(matrix.plan.layouts for matrix in blocks.matrices())
    assert relative_error(*(prefill(model, IDS_OF_TOKENS) for model in (blocks, floats))) < TOLERANCE


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
