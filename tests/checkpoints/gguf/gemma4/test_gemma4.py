"""Files of Gemma 4: against transformers, and against the checkpoint that each was made from."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.gguf.config import special_tokens
from pace.checkpoints.gguf.file import GgufFile
from pace.llm import LLMModel
from pace.llm.models.model_list import read_config
from pace.tokenizer.loading import load_tokenizer
from tests.checkpoints.gguf.checks import IDS as IDS_OF_TOKENS
from tests.checkpoints.gguf.checks import check_blocks, check_logits
from tests.checkpoints.gguf.files import add_tokenizer, load
from tests.checkpoints.gguf.gemma4.gemma4_files import write_gemma4
from tests.checkpoints.gguf.test_tokenizer import STRANGE, file_with, random_texts
from tests.llm.text.tokenizer_zoo import with_first_blank
from tests.support import prefill

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = {
    "vocab_size": 99, "vocab_size_per_layer_input": 99, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 16, "max_position_embeddings": 128, "final_logit_softcapping": 30.0,
    "layer_types": [SLIDING, FULL, SLIDING, FULL], "hidden_size_per_layer_input": 0, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
HELD = {
    "e4b": {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2},
    "e2b": {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "num_key_value_heads": 1},
    "31b": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "26b": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, **EXPERTS},
    "12b": {"layer_types": [FULL] * 4, "final_logit_softcapping": None},
}  # fmt: skip


def saved(folder, **fields):
    """Saves a random model, and returns it."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(3)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SMALL | fields)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", HELD)
def test_float32_logits(tmp_path, name):
    theirs = saved(tmp_path / "hub", **HELD[name])
    for apart in (False, True) if name == "26b" else (False,):
        write_gemma4(tmp_path / "hub", tmp_path / "model.gguf", apart=apart)
        check_logits(tmp_path, theirs)


@pytest.mark.parametrize("name", HELD)
def test_the_config_is_that_of_the_hub(tmp_path, name):
    saved(tmp_path / "hub", **HELD[name])
    write_gemma4(tmp_path / "hub", tmp_path / "model.gguf")
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        model_class, found = read_config(reader.config)
    other_class, expected = read_config(json.loads((tmp_path / "hub" / "config.json").read_text()))
    assert model_class is other_class and found.ropes == expected.ropes
    layers = range(expected.num_hidden_layers)
    for read in ("heads", "source", "inner_size", "values_are_keys", "window"):
        assert [getattr(found, read)(layer) for layer in layers] == [getattr(expected, read)(layer) for layer in layers]
    unstated = {"bos_token_id", "eos_token_id", "pad_token_id", "global_head_dim", "num_global_key_value_heads"}
    unstated |= {"per_layer_config", "rope", "local_rope"}
    if not expected.hidden_size_per_layer_input:
        unstated.add("vocab_size_per_layer_input")
    fields = [field for field in vars(expected) if field not in unstated]
    assert {name: vars(found)[name] for name in fields} == {name: vars(expected)[name] for name in fields}


def test_keys_that_no_layer_reads(tmp_path):
    """The published E2B has projections of keys in layers that share those of another."""

    def add(writer):
        for name, shape in (("attn_k", (16, 32)), ("attn_v", (16, 32)), ("attn_k_norm", (16,))):
            writer.add_tensor(f"blk.2.{name}.weight", torch.ones(shape).numpy())

    saved(tmp_path / "hub", **HELD["e2b"])
    write_gemma4(tmp_path / "hub", tmp_path / "model.gguf", add=add)
    assert torch.equal(*(prefill(load(tmp_path / path), IDS_OF_TOKENS) for path in ("model.gguf", "hub")))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["e4b", "26b"])
def test_blocks_have_the_weights_of_the_file(tmp_path, name, kind):
    wide = {"hidden_size": 64, "intermediate_size": 64}
    saved(tmp_path / "hub", **HELD[name] | wide)
    check_blocks(tmp_path, write_gemma4, kind)


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "message"),
    [
        ("e2b", "feed_forward_length", [48, 48, 96, 48], NotImplementedError, "doubled in the last 2 layers; got .48"),
        ("31b", "attention.head_count_kv", [2, 1, 1, 1], NotImplementedError, "differs between layers with a window"),
        ("31b", "attention.head_count_kv", [2, 1], ValueError, "an integer for each of 4 layers; got 2"),
        ("31b", "attention.value_length_swa", 8, NotImplementedError, "key_length_swa and attention.value_length_swa"),
        ("e4b", "attention.sliding_window_pattern", [True], ValueError, "an integer for each of 4 layers; got 1"),
    ],
)
def test_what_is_refused(tmp_path, name, key, value, error, message):
    def change(writer):
        writer.kv_data[0].pop(f"gemma4.{key}")
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"gemma4.{key}", value)

    saved(tmp_path / "hub", **HELD[name])
    write_gemma4(tmp_path / "hub", tmp_path / "model.gguf", add=change)
    with pytest.raises(error, match=message) as raised:
        GgufCheckpoint(tmp_path / "model.gguf")
    assert "model.gguf" in str(raised.value)


def test_tokens_that_are_never_generated(tmp_path):
    """generation_config.json of the 12B names some, and so does its file."""

    def first(path):
        with LLMModel(path, dtype="float32", progress=False) as model:
            return model.generate([3, 4, 5], max_new_tokens=1, ignore_eos=True).generated_token_ids[0][0]

    saved(tmp_path / "hub", **HELD["31b"])
    likely = first(tmp_path / "hub")
    (tmp_path / "hub" / "generation_config.json").write_text(json.dumps({"suppress_tokens": [likely, 900]}))
    add = lambda writer: writer.add_array("tokenizer.ggml.suppress_tokens", [likely])
    write_gemma4(tmp_path / "hub", tmp_path / "model.gguf", add=add)
    assert first(tmp_path / "hub") == first(tmp_path / "model.gguf") != likely


MARKS = ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>']


def gemma_tokenizer():
    """A vocabulary of sentencepiece's form, without a blank before a text, and with Gemma's marks."""
    from tokenizers import normalizers, processors

    tokenizer = copy.deepcopy(with_first_blank())
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def test_the_vocabulary(tmp_path, caplog):
    """Its pieces have merges and no useful scores. Some marks are text, and <|tool_response> ends one."""
    expected = gemma_tokenizer()

    def add(writer):
        add_tokenizer(writer, expected)
        keys, merges = writer.kv_data[0], json.loads(expected.backend_tokenizer.to_str())["model"]["merges"]
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token"):
            del keys[key]
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_add_bos_token(False)  # which llama.cpp ignores
        for mark in MARKS[2:]:
            keys["tokenizer.ggml.token_type"].value[expected.convert_tokens_to_ids(mark)] = 4

    path = file_with(tmp_path / "t.gguf", add, architecture="gemma4")
    found = load_tokenizer(path)
    texts = [*STRANGE, *random_texts(30), "a\n\n\nb\n", '<|turn>user\nHi<turn|>\n<|tool_call>call:f{a:<|"|>x<|"|>}']
    for text in texts:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids and found.decode(ids) == expected.decode(ids), text
    ends = special_tokens(GgufFile(path).metadata)["eos_token_id"]
    assert found.convert_ids_to_tokens(ends) == ["</s>", "<turn|>", "<|tool_response>"]
    assert {"<turn|>", "<|tool_response>"} <= set(found.all_special_tokens) and not caplog.records
    assert '<|"|>' not in found.all_special_tokens
