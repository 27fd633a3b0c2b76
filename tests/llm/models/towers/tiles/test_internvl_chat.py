"""InternVL as published (`InternVLChatModel`): everything has the bits of the same weights as transformers converts
them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pace.llm import LLMModel
from pace.llm.models.model_list import read_config
from pace.llm.processors.internvl import InternVLImageProcessor
from pace.llm.processors.registry import load_processors
from pace.llm.runners import EagerRunner
from pace.media.media import MediaError
from tests.editing import change_json, edit_tensors, rename_tensors
from tests.llm.models.families.test_internlm2 import published_names
from tests.llm.models.towers import checks
from tests.llm.models.towers.seeing import NATIVE, NEW, load, oracle_tokens, results, run
from tests.llm.models.towers.tiles.making import chat
from tests.llm.models.towers.tiles.test_internvl import (
    IMAGES,
    OF_KIND,
    SETTINGS,
    SIDE,
    SIX_B,
    TILE_TOKENS,
    inputs_of,
    pixels_of,
    save_internvl,
    save_processor,
    their_processor,
)
from tests.media.samples import draw
from tests.support import backends

NAMES = {
    "multi_modal_projector.layer_norm.": "mlp1.0.", "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.", "vision_tower.embeddings.cls_token":
    "vision_model.embeddings.class_embedding", "vision_tower.embeddings.position_embeddings":
    "vision_model.embeddings.position_embedding", "vision_tower.embeddings.patch_embeddings.projection.":
    "vision_model.embeddings.patch_embedding.", "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
}  # fmt: skip
OF_BLOCKS = {
    "attention.projection_layer.": "attn.proj.", "attention.": "attn.", "layernorm_before.": "norm1.",
    "layernorm_after.": "norm2.", "lambda_": "ls",
}  # fmt: skip
"""Prefixes of names in transformers, and those in published checkpoints; the second ones within a block."""
OF_TOWER = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}
FIELDS: dict[str, Any] = {
    "architectures": ["InternVLChatModel"], "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
    "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": SIDE, "max_dynamic_patch": 6,
    "min_dynamic_patch": 1, "model_type": "internvl_chat", "output_attentions": False, "pad2square": False,
    "ps_version": "v2", "select_layer": -1, "template": "internvl2_5", "torch_dtype": "float32", "use_backbone_lora": 0,
    "use_llm_lora": 0, "use_thumbnail": True,
}  # fmt: skip


def publish(folder: Path, converted: Path, **fields: Any) -> Path:
    """Writes a checkpoint of transformers as the published code would. `fields` change its config."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    hub = json.loads((converted / "config.json").read_text())
    tower = {OF_TOWER.get(name, name): value for name, value in hub["vision_config"].items()}
    for name in ("use_mask_token", "use_absolute_position_embeddings", "use_mean_pooling", "layer_scale_init_value"):
        tower.pop(name)
    tower |= {"model_type": "intern_vit_6b", "image_size": SIDE, "patch_size": tower["patch_size"][0]}
    tower |= {"use_moe": False, "num_experts": 8, "drop_path_rate": 0.1, "use_flash_attn": True}
    text = hub["text_config"] | {"architectures": ["Some"], "moe_config": None, "tie_word_embeddings": False}
    config = FIELDS | {"llm_config": text, "vision_config": tower} | fields
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(converted / "model.safetensors")
    for name in [name for name in state if ".q_proj." in name and name.startswith("vision_tower.")]:
        parts = [state.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        state[name.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
    save_file({published_name(name): tensor for name, tensor in state.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (converted / name).exists():
            shutil.copy(converted / name, folder / name)
    return folder


def published_name(name: str) -> str:
    old = next((old for old in NAMES if name.startswith(old)), "")
    name = NAMES.get(old, "") + name.removeprefix(old)
    if name.startswith("vision_model.encoder.layers."):
        _, _, _, index, inner = name.split(".", 4)
        old = next((old for old in OF_BLOCKS if inner.startswith(old)), "")
        name = f"vision_model.encoder.layers.{index}.{OF_BLOCKS.get(old, '')}{inner.removeprefix(old)}"
    return name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("internvl_chat")
    converted = folder / "converted"
    oracle = save_internvl(converted)
    save_processor(converted)
    return oracle, converted, publish(folder / "published", converted)


def rows_of(folder: Path, tiles: torch.Tensor, ops: str = backends()[-1], **options: Any) -> torch.Tensor:
    runner = EagerRunner(checks.load_layers(folder, ops, **options))
    return torch.cat(checks.rows_of(runner, {"pixel_values": tiles}))


def test_answers_are_those_of_the_converted_checkpoint(saved) -> None:
    """Alone, in a batch, and with the tensors of the processor in transformers. The id of the placeholder is the
    tokenizer's, as config.json has none."""
    oracle, converted, published = saved
    with load(converted) as model, load(published) as ours:
        expected, prompts = [], []
        for sizes in IMAGES:
            text = model.tokenizer.apply_chat_template(chat(sizes), tokenize=False, add_generation_prompt=True)
            prompts.append({"prompt": text, "images": [draw(*size) for size in sizes]})
            expected += results(model.generate(prompts[-1], max_new_tokens=NEW, logprobs=0))
            assert results(ours.generate(prompts[-1], max_new_tokens=NEW, logprobs=0)) == expected[-1:]
        assert results(ours.generate(prompts, max_new_tokens=NEW, logprobs=0)) == expected
        image = prompts[1]["images"]
        arrays = ours.processor(images=image)["pixel_values"]
        inputs = dict(their_processor(converted)(text=prompts[1]["prompt"], images=image, return_tensors="pt"))
        assert torch.equal(torch.from_numpy(arrays), inputs["pixel_values"])
        assert run(ours, inputs) == expected[1:2] and expected[1][0] == oracle_tokens(oracle, inputs)
        assert ours.chat(chat([(60, 40)]), max_new_tokens=5, temperature=0).text


@pytest.mark.thorough
def test_chunks_packed_copies_and_codes_have_the_same_bits(saved, tmp_path) -> None:
    _, converted, published = saved
    inputs = inputs_of([2, 5, 1], 3)
    with load(converted) as model:
        expected = run(model, inputs)
    for options in ({"weights_cache": tmp_path}, {"weights_cache": tmp_path}, {"num_threads": 1}):
        with load(published, **options) as ours:
            ours._engine.scheduler.max_tokens_per_step = 7
            assert run(ours, inputs) == expected
    for options in ({"quantization": "int8"}, {"quantization": "q8_0"}, {"dtype": "bfloat16"}) if NATIVE else ():
        with load(converted, **options) as model, load(published, **options) as ours:
            assert run(ours, inputs, 12) == run(model, inputs, 12), options


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OF_KIND)
def test_all_kinds_of_text_models(kind, tmp_path) -> None:
    oracle = save_internvl(tmp_path / "converted", kind)
    save_processor(tmp_path / "converted")
    with load(publish(tmp_path / "published", tmp_path / "converted")) as ours:
        for seed, tiles in enumerate([[], [2], [1, 3, 1]]):
            inputs = inputs_of(tiles, seed)
            assert run(ours, inputs)[0][0] == oracle_tokens(oracle, inputs)


@pytest.mark.thorough
def test_a_text_model_of_internlm2(tmp_path) -> None:
    oracle = save_internvl(tmp_path / "converted", "llama")
    save_processor(tmp_path / "converted")
    text = oracle.config.text_config.to_dict() | {"model_type": "internlm2", "bias": False}
    text = {name: value for name, value in text.items() if name not in ("attention_bias", "tie_word_embeddings")}
    published = publish(tmp_path / "published", tmp_path / "converted", llm_config=text)
    prefix = "language_model."
    with edit_tensors(published) as state:
        inner = {name.removeprefix(prefix): state.pop(name) for name in list(state) if prefix in name}
        inner = published_names(inner, inner["model.layers.0.self_attn.k_proj.weight"].shape[0] // 2)
        state |= {f"{prefix}{name}": tensor for name, tensor in inner.items()}
    with load(published) as ours:
        for seed, tiles in enumerate([[], [2], [1, 3, 1]]):
            inputs = inputs_of(tiles, seed)
            assert run(ours, inputs)[0][0] == oracle_tokens(oracle, inputs)


@pytest.mark.thorough
@pytest.mark.parametrize("vision", [{}, SIX_B])
def test_rows_of_a_tower_that_is_saved_in_16_bits(vision, tmp_path) -> None:
    converted = tmp_path / "converted"
    save_internvl(converted, vision=vision)
    published = publish(tmp_path / "published", converted)
    for ops in backends():
        for dtype in (torch.float32, torch.bfloat16):
            rows = rows_of(published, pixels_of(3), ops, dtype=dtype)
            assert torch.equal(rows, rows_of(converted, pixels_of(3), ops, dtype=dtype))


@pytest.mark.thorough
def test_the_first_version_of_the_shuffle_goes_by_columns(saved, tmp_path) -> None:
    _, converted, published = saved
    shutil.copytree(published, tmp_path / "first")
    change_json(tmp_path / "first" / "config.json", ps_version="v1")
    expected = rows_of(converted, pixels_of(2)).view(2, 3, 3, -1).transpose(1, 2).flatten(0, 2)
    assert torch.equal(rows_of(tmp_path / "first", pixels_of(2)), expected)


@pytest.mark.thorough
def test_the_text_model_alone_and_a_tokenizer_without_the_placeholder(saved, tmp_path) -> None:
    _, converted, published = saved
    with load(converted, media=False) as model, load(published, media=False) as ours:
        assert run(ours, inputs_of([]), 5) == run(model, inputs_of([]), 5)
    shutil.copytree(published, tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        contents = (tmp_path / "other" / name).read_text()
        (tmp_path / "other" / name).write_text(contents.replace("<IMG_CONTEXT>", "<CONTEXT>"))
    with pytest.raises(ValueError, match="the tokenizer has no token <IMG_CONTEXT>"):
        load(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).unlink()
    with load(tmp_path / "other") as bare, load(converted) as model:
        assert run(bare, inputs_of([]), 5) == run(model, inputs_of([]), 5)
        with pytest.raises(ValueError, match="no image_token_id, and .* was loaded without a tokenizer"):
            run(bare, inputs_of([2]))
    rename_tensors(tmp_path / "other", {"vision_model.embeddings.class_embedding": "vision_model.embeddings.cls"})
    with pytest.raises(ValueError, match="does not fit"):
        LLMModel(tmp_path / "other", tokenizer_name_or_path=published, dtype="float32")


def test_a_conversation_that_only_config_json_names(saved, tmp_path) -> None:
    from pace.tokenizer.loading import load_tokenizer

    for name in ("config.json", "tokenizer.json"):
        shutil.copy(saved[2] / name, tmp_path / name)
    settings = json.loads((saved[2] / "tokenizer_config.json").read_text())
    for template in (settings.pop("chat_template"), None):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.chat_template == template or template is None
    said = [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w8"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    instructions, rest = text.split("<|im_end|>\n", 1)
    assert instructions.startswith("<|im_start|>system\n你是书生·万象，英文名是InternVL")
    assert rest == "<|im_start|>user\nw9<|im_end|>\n<|im_start|>assistant\nw8<|im_end|>\n<|im_start|>assistant\n"
    said = [{"role": "system", "content": "w7"}, *said]
    assert tokenizer.apply_chat_template(said, tokenize=False) == f"<|im_start|>system\nw7<|im_end|>\n{rest[:-22]}"
    change_json(tmp_path / "config.json", template="phi3-chat")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "w1"}))
    text = load_tokenizer(tmp_path).apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text == "w1<|system|>\nw7<|end|><|user|>\nw9<|end|><|assistant|>\nw8<|end|><|assistant|>\n"


# -- config.json


def published_config(**fields: Any) -> dict[str, Any]:
    """The config of InternVL3-1B, with other fields."""
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"}, "downsample_ratio": 0.5,
        "dynamic_image_size": True, "force_image_size": 448, "hidden_size": 896, "image_fold": None,
        "llm_config": {
            "_name_or_path": "./pretrained/Qwen2.5-32B-Instruct", "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
            "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
            "layer_types": ["full_attention"] * 24, "max_position_embeddings": 32768, "max_window_layers": 70,
            "model_type": "qwen2", "moe_config": None, "num_attention_heads": 14, "num_hidden_layers": 24,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1000000.0,
            "sliding_window": None, "torch_dtype": "bfloat16", "use_bfloat16": True, "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151674,
        },
        "max_dynamic_patch": 12, "min_dynamic_patch": 1, "model_type": "internvl_chat", "output_attentions": False,
        "pad2square": False, "ps_version": "v2", "select_layer": -1, "system_message": None, "template": "internvl2_5",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": None, "use_backbone_lora": 0,
        "use_llm_lora": 0, "use_thumbnail": True,
        "vision_config": {
            "_name_or_path": "OpenGVLab/InternViT-6B-448px-V1-5", "architectures": ["InternVisionModel"],
            "attention_dropout": 0.0, "capacity_factor": 1.2, "drop_path_rate": 0.1, "dropout": 0.0,
            "eval_capacity_factor": 1.4, "hidden_act": "gelu", "hidden_size": 1024, "image_size": 448,
            "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 4096,
            "laux_allreduce": "all_nodes", "layer_norm_eps": 1e-06, "model_type": "intern_vit_6b",
            "moe_coeff_ratio": 0.5, "moe_intermediate_size": 768, "moe_output_scale": 4.0,
            "noisy_gate_policy": "RSample_before", "norm_type": "layer_norm", "num_attention_heads": 16,
            "num_channels": 3, "num_experts": 8, "num_hidden_layers": 24, "num_routed_experts": 4,
            "num_shared_experts": 4, "patch_size": 14, "qk_normalization": False, "qkv_bias": True,
            "shared_expert_intermediate_size": 3072, "torch_dtype": "bfloat16", "use_bfloat16": True,
            "use_flash_attn": False, "use_moe": False, "use_residual": True, "use_rts": False,
            "use_weighted_residual": False,
        },
    } | fields  # fmt: skip


def test_published_configs(caplog, tmp_path) -> None:
    found, config = read_config(published_config(), media=True)
    of = config.vision
    assert (of.hidden_size, of.num_hidden_layers, of.head_dim, of.intermediate_size) == (1024, 24, 64, 4096)
    assert (of.patches_per_side, of.merge, of.hidden_act, of.norm_type) == (32, 2, "gelu", "layer_norm")
    assert (of.attention_bias, of.use_qk_norm, of.joined_qkv, of.transposed) == (True, False, True, False)
    assert (found.__name__, config.rope.kind, config.image_token_id) == (
        "InternVLForConditionalGeneration",
        "dynamic",
        -1,
    )
    assert not config.tie_word_embeddings and read_config(published_config())[1].vision is None
    assert not caplog.records
    image = load_processors(tmp_path, published_config()).image
    assert (image.size, image.min_patches, image.max_patches, image.tokens_per_tile) == (448, 1, 12, 256)
    large = published_config(image_token_id=151671, llm_config={"model_type": "qwen3_moe", "head_dim": 128})
    found, config = read_config(large | {"vision_config": {"image_size": 448}}, media=True)
    assert (found.__name__, config.vision.head_dim, config.vision.use_qk_norm) == ("InternVLOfQwen3Moe", 128, True)
    assert (config.vision.num_hidden_layers, config.vision.norm_type, config.image_token_id) == (48, "rms_norm", 151671)


def test_fields_that_are_left_out_have_the_defaults_of_the_published_code(tmp_path) -> None:
    least = {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}, "vision_config": {"image_size": 28}}
    config, image = read_config(least, media=True)[1], load_processors(tmp_path, least).image
    assert config.vision.transposed and config.vision.hidden_size == 3200
    assert (image.size, image.min_patches, image.max_patches, image.use_thumbnail) == (28, 1, 1, False)
    assert load_processors(tmp_path, least | {"force_image_size": 56}).image.size == 56
    image = load_processors(tmp_path, least | {"dynamic_image_size": True}).image
    assert (image.min_patches, image.max_patches) == (1, 6)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"llm_config": None}, ValueError, "llm_config must be an object; got None"),
        ({"llm_config": {"model_type": "phi"}}, NotImplementedError, "llm_config.model_type = 'phi' is not"),
        ({"llm_config": {}}, NotImplementedError, "llm_config.model_type = None is not .*: qwen2, qwen3, "),
        ({"select_layer": -4}, NotImplementedError, "select_layer = -4 is not implemented; implemented: -1"),
        ({"pad2square": True}, NotImplementedError, "pad2square = True is not implemented; implemented: False"),
        ({"use_llm_lora": 16}, NotImplementedError, "use_llm_lora = 16 is not implemented; implemented: 0"),
        ({"ps_version": "v3"}, ValueError, "ps_version must be one of v1, v2; got 'v3'"),
        ({"downsample_ratio": 0.3}, ValueError, "downsample_ratio must be 1 / n"),
        ({"vision_config": {"use_moe": True}}, NotImplementedError, "vision_config.use_moe = True"),
        ({"vision_config": {"window": 5}}, NotImplementedError, "vision_config.window = 5"),
        ({"vision_config": {"model_type": "clip"}}, NotImplementedError, "vision_config.model_type = 'clip'"),
        ({"vision_config": []}, ValueError, "vision_config must be an object"),
        ({"max_dynamic_patch": 0}, ValueError, "max_dynamic_patch must be an integer in 1..256"),
    ],
)
def test_fields_that_are_refused(fields, error, message) -> None:
    with pytest.raises(error, match=message) as raised:
        read_config(published_config(**fields), media=True)
    if "llm_config" not in fields:
        assert str(raised.value).endswith("; media=False loads only the text model")
        assert read_config(published_config(**fields))[1].vision is None


# -- images


def processor_of(tmp_path, **fields: Any) -> InternVLImageProcessor:
    tower = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "num_attention_heads": 4}
    return load_processors(tmp_path, published_config(force_image_size=None, vision_config=tower, **fields)).image


def test_tiles_are_those_of_the_processor_in_transformers(tmp_path) -> None:
    """With the fields of config.json in place of a file of settings."""
    given = SETTINGS | {"size": {"height": 28, "width": 28}}
    for lowest, highest in ((1, 12), (3, 7), (5, 4)):
        ours = processor_of(tmp_path, min_dynamic_patch=lowest, max_dynamic_patch=highest)
        same = InternVLImageProcessor.from_dict(given | {"min_patches": lowest, "max_patches": highest})
        for size in ((1, 1), (60, 40), (28, 56), (90, 33)):
            found, expected = ours.prepare(draw(*size)), same.prepare(draw(*size))
            assert (found.features == expected.features).all() and found.grid[0] == expected.grid[0]
    assert (tmp_path / "preprocessor_config.json").write_text("no JSON") and processor_of(tmp_path)


def test_images_without_the_whole_one_and_of_a_single_tile(tmp_path) -> None:
    image, whole = draw(56, 84), processor_of(tmp_path)
    tiles, single = processor_of(tmp_path, use_thumbnail=False), processor_of(tmp_path, dynamic_image_size=False)
    assert [processor.prepare(image).grid[0] for processor in (whole, tiles, single)] == [7, 6, 1]
    assert (tiles.prepare(image).features == whole.prepare(image).features[:6]).all()
    assert (single.prepare(image).features == whole.prepare(image).features[6:]).all()
    for processor, limit, count in ((whole, 6, 3), (tiles, 6, 6), (tiles, 1, 1), (single, 1, 1)):
        assert processor.layout(image, limit).num_tokens == processor.prepare(image, limit).num_tokens == count
    with pytest.raises(MediaError, match="at least 4 tokens, those of a tile"):
        processor_of(tmp_path, downsample_ratio=1.0).layout(image, 3)


def test_ids_are_those_of_tiles(saved) -> None:
    from pace.llm.processors.prompts import MediaPart, PromptEncoder
    from pace.tokenizer.loading import load_tokenizer

    folder = saved[2]
    processors = load_processors(folder, json.loads((folder / "config.json").read_text()))
    tokenizer = load_tokenizer(folder)
    prompt = PromptEncoder(processors, tokenizer).encode(
        "w9 <IMG_CONTEXT>", [MediaPart("image", draw(60, 40))], tokenizer
    )
    theirs = their_processor(saved[1])(text="w9 <IMG_CONTEXT>", images=[draw(60, 40)])["input_ids"][0]
    assert prompt.tokens == list(theirs) and len(prompt.tokens) == 3 + 7 * TILE_TOKENS
