"""Adapters that peft has saved: every field of its config, and everything that is refused by name."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from pace.assets import TINY
from pace.llm.adapters.read import read_adapter
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.loading.checkpoint import Checkpoint

peft = pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import weights_of  # noqa: E402
from tests.llm.adapters.saved import CONFIG, MODULE, PREFIX, pair, save_adapter, tensors_of, write  # noqa: E402

BASE = Checkpoint(TINY)


def read(path) -> AdapterWeights:
    return read_adapter(path, "adapter", BASE)


def check_same(ours: AdapterWeights, theirs: AdapterWeights) -> None:
    assert ours.modules.keys() == theirs.modules.keys()
    for path, module in theirs.modules.items():
        found = ours.modules[path]
        assert torch.equal(found.a, module.a) and torch.equal(found.b, module.b) and found.scale == module.scale, path
        assert (found.bias is None) == (module.bias is None)
        assert module.bias is None or torch.equal(found.bias, module.bias)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"r": 8, "lora_alpha": 3, "use_rslora": True},
        {"rank_pattern": {"v_proj": 3, r"layers\.[01]\.mlp\.down_proj": 5}, "alpha_pattern": {"down_proj": 7}},
        {"lora_bias": True},
        {"target_modules": r".*layers\.[12]\.(self_attn\.(q|o)|mlp\.up)_proj"},
        {"target_modules": "all-linear", "layers_to_transform": None, "lora_dropout": 0.1},
        {"layers_to_transform": [1], "layers_pattern": "layers", "bias": "none"},
        {"init_lora_weights": "gaussian", "use_rslora": True, "alpha_pattern": {"model.layers.0.self_attn.q_proj": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_fields_of_peft(tmp_path, fields, safe):
    adapted = save_adapter(tmp_path, 1, save={"safe_serialization": safe}, **fields)
    check_same(read(tmp_path), weights_of(adapted, ""))


def test_dtypes_and_digests(tmp_path):
    tensors = pair()
    plain = read(write(tmp_path / "a", CONFIG, tensors))
    assert plain.modules[MODULE].scale == 2.0 and plain.rank == 2
    assert read(write(tmp_path / "b", CONFIG, tensors, "bin")).digest == plain.digest
    assert read(write(tmp_path / "c", CONFIG | {"lora_alpha": 5}, tensors)).digest != plain.digest
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert read(write(tmp_path / "d", CONFIG, half)).modules[MODULE].a.dtype == torch.bfloat16
    double = {name: tensor.double() for name, tensor in tensors.items()}
    assert read(write(tmp_path / "e", CONFIG, double)).digest == plain.digest


def test_the_rank_is_that_of_the_matrices(tmp_path):
    """`r` of the config may differ, as when peft writes patterns whose order it has lost."""
    found = read(write(tmp_path, CONFIG | {"r": 64, "use_rslora": True}, pair(r=9)))
    assert found.modules[MODULE].scale == 4 / math.sqrt(9)


def test_patterns_that_contradict_each_other(tmp_path):
    patterns = {"q_proj": 1, r"self_attn\..*": 2, "v_proj": 3}
    with pytest.raises(ValueError, match=r"alpha_pattern match model.layers.0.self_attn.q_proj.*q_proj.*self_attn"):
        read(write(tmp_path, CONFIG | {"alpha_pattern": patterns}, pair()))
    same = CONFIG | {"alpha_pattern": {**patterns, "q_proj": 2}}
    assert read(write(tmp_path, same, pair())).modules[MODULE].scale == 1.0


REFUSED_FIELDS = [
    ({"use_dora": True}, "use_dora.*DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save names 'lm_head', and adapter_model.safetensors has none"),
    ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names"),
    ({"bias": "all"}, "bias='all'"),
    ({"bias": "lora_only"}, "bias='lora_only'"),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"use_qalora": True}, "use_qalora"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ({"arrow_config": {"top_k": 1}}, "arrow_config"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
    ({"peft_type": "IA3"}, "peft_type"),
    ({"peft_type": None}, "peft_type"),
    ({"new_field": "on"}, "unknown field 'new_field'"),
    ({"new_field": 0}, "unknown field 'new_field'"),
    ({"r": 0}, "r must be"),
    ({"r": True}, "r must be"),
    ({"lora_alpha": "16"}, "lora_alpha must be"),
    ({"use_rslora": 1}, "use_rslora must be"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be"),
    ({"rank_pattern": {"q_proj": 1.5}}, r"rank_pattern\['q_proj'\]"),
    ({"alpha_pattern": {"(": 1}}, "not a regular expression"),
    ({"alpha_pattern": {"(?=q)q_proj": 1}}, r"alpha_pattern.*\(\?=.*not implemented"),
    ({"alpha_pattern": {"q" * 1025: 1}}, "more than 1024 characters"),
    ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\]"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_FIELDS, ids=[str(fields) for fields, _ in REFUSED_FIELDS])
def test_fields_that_are_refused(tmp_path, fields, message):
    with pytest.raises((NotImplementedError, ValueError), match=f"adapter_config.json.*{message}"):
        read(write(tmp_path, CONFIG | fields, pair()))


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_fields_that_ask_for_nothing(tmp_path, value):
    assert read(write(tmp_path, CONFIG | {"new_field": value, "use_dora": value}, pair()))


def without(name: str) -> dict:
    return {key: tensor for key, tensor in pair().items() if name not in key}


REFUSED_TENSORS = [
    ({}, "no tensors of a LoRA adapter"),
    (without("lora_B"), "has .*lora_A.weight, but no lora_B.weight"),
    (without("lora_A"), "has .*lora_B.weight, but no lora_A.weight"),
    (pair() | {f"{MODULE}.lora_magnitude_vector": torch.ones(256)}, "DoRA"),
    (pair() | {"model.embed_tokens.lora_embedding_A": torch.ones(2, 2048)}, "but no lora_embedding_B for it"),
    (pair() | {f"{MODULE}.lora_embedding_A": torch.ones(2, 256)}, "but no lora_embedding_B for it"),
    (pair() | {f"{MODULE}.lora_B.bias": torch.ones(256)}, "lora_bias is not true"),
    (pair() | {f"{MODULE}.lora_A.default.weight": torch.ones(2, 256)}, "own name is not expected"),
    (pair() | {"model.layers.0.self_attn.q_proj.scale": torch.ones(3)}, "neither a part of a LoRA adapter"),
    ({f"{MODULE}.lora_A.weight": torch.ones(2, 256), f"{MODULE}.lora_B.weight": torch.ones(256, 3)}, "fit together"),
    ({f"{MODULE}.lora_A.weight": torch.ones(2, 9, 4), f"{MODULE}.lora_B.weight": torch.ones(256, 2)}, "be a matrix"),
    ({f"{MODULE}.lora_A.weight": torch.ones(2, 256).long(), f"{MODULE}.lora_B.weight": torch.ones(256, 2)}, "floats"),
    (pair() | {f"{MODULE}.lora_A.weight": torch.full((2, 256), math.inf)}, "not finite"),
    (pair() | {f"{MODULE}.lora_B.weight": torch.full((256, 2), math.nan)}, "not finite"),
    (pair() | {"lm_head.weight": torch.ones(2048, 256)}, "in full, with other values"),
    (pair() | {"model.embed_tokens.base_layer.weight": torch.ones(2050, 256)}, "in full, with other values"),
    (pair() | {"model.norm.weight": torch.full((256,), 7.0)}, "in full, with other values"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), REFUSED_TENSORS, ids=[message for _, message in REFUSED_TENSORS])
def test_tensors_that_are_refused(tmp_path, tensors, message):
    with pytest.raises((NotImplementedError, ValueError), match=f"adapter_model.*{message}"):
        read(write(tmp_path, CONFIG, tensors))


@pytest.mark.parametrize("name", ["lm_head.base_layer.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_copies_of_the_base_are_passed_over(tmp_path, name):
    from pace.checkpoints.reader import CheckpointReader

    own = "model.embed_tokens.weight" if "norm" not in name else name
    with CheckpointReader(TINY) as reader:
        copy = reader.read(own).clone()
    for dtype in (copy.dtype, torch.float32):
        assert list(read(write(tmp_path, CONFIG, pair() | {name: copy.to(dtype)})).modules) == [MODULE]


def test_modules_that_were_trained_in_full(tmp_path):
    tensors = pair() | {"model.norm.weight": torch.full((256,), 7.0)}
    found = read(write(tmp_path, CONFIG | {"modules_to_save": ["norm"]}, tensors))
    assert list(found.wholes) == ["model.norm.weight"] and torch.equal(
        found.wholes["model.norm.weight"], torch.full((256,), 7.0)
    )
    only = {"model.norm.weight": tensors["model.norm.weight"]}
    other = read(write(tmp_path / "b", CONFIG | {"modules_to_save": ["model.norm"]}, only))
    assert not other.modules and other.rank == 0 and other.digest != found.digest
    with pytest.raises(NotImplementedError, match="in full, with other values"):
        read(
            write(
                tmp_path / "c",
                CONFIG | {"modules_to_save": ["norm"]},
                tensors | {"lm_head.weight": torch.ones(2048, 256)},
            )
        )


def test_an_embedding_whose_adapter_is_also_the_heads(tmp_path):
    embedding = {
        f"model.embed_tokens.lora_embedding_{part}": torch.ones(*shape)
        for part, shape in (("A", (2, 2048)), ("B", (256, 2)))
    }
    assert read(write(tmp_path, CONFIG, embedding)).modules["model.embed_tokens"].of_embedding
    with pytest.raises(NotImplementedError, match="ensure_weight_tying"):
        read(write(tmp_path, CONFIG | {"ensure_weight_tying": True}, embedding))
    read(write(tmp_path, CONFIG | {"ensure_weight_tying": True}, embedding | pair("lm_head", n=2048)))


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match="not downloaded"):
        read(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no adapter_config.json"):
        read(tmp_path)
    path = write(tmp_path / "a", CONFIG, pair())
    (path / "adapter_model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match="adapter_model.safetensors"):
        read(path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors or adapter_model.bin"):
        read(path)
    (path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        read(path)
    with pytest.raises(TypeError, match="by its path"):
        read(5)


def test_a_pickle_that_would_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("gotcha",)

    path = write(tmp_path, CONFIG, pair(), "bin")
    torch.save({PREFIX + f"{MODULE}.lora_A.weight": Evil()}, path / "adapter_model.bin")
    with pytest.raises(ValueError, match="never allowed"):
        read(path)


def test_peft_keeps_what_the_reader_needs(tmp_path):
    """Every field that this version of peft writes is known."""
    from pace.llm.adapters.peft_config import READ, REFUSED, WITHOUT_EFFECT

    save_adapter(tmp_path, 1)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written.keys() <= READ | REFUSED.keys() | WITHOUT_EFFECT
    assert all(re.match(re.escape(PREFIX), name) for name in tensors_of(tmp_path))
