"""InternVL: rows of the tower, and greedy text, are those of transformers, with the same bits however they are
computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pace.llm.models.model_list import read_config
from tests.editing import change_json, rename_tensors
from tests.llm.models.towers.checks import (
    check_bfloat16_rows,
    check_blank_images,
    check_copies_and_codes,
    check_every_way_to_run,
    check_prepared_image,
    check_rows,
    check_text_alone,
    oracle_rows,
)
from tests.llm.models.towers.prompts import inputs_of_tokens
from tests.llm.models.towers.seeing import NATIVE, NEW, load, oracle_tokens, results, run
from tests.llm.models.towers.tiles.making import chat
from tests.llm.models.variants import SIZES, randomise, save_pretrained
from tests.llm.processors.chatting import save_tokenizer
from tests.media.samples import draw
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

IMAGE, SIDE, PATCH, TILE_TOKENS = 90, 24, 4, 9
"""Id of the placeholder; side of a tile and of a patch in pixels; tokens of a tile."""
TEXT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 800, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
OF_KIND: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "llama": {},
    "phi3": {"bos_token_id": 1},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
"""Further fields of `text_config`, by its model_type."""
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH], "attention_bias": True,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "crop_to_patches": False, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406], "image_processor_type": "GotOcr2ImageProcessorFast",
    "image_std": [0.229, 0.224, 0.225], "max_patches": 6, "min_patches": 1, "processor_class": "InternVLProcessor",
    "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"height": SIDE, "width": SIDE},
}  # fmt: skip
SPECIAL = {IMAGE: "<IMG_CONTEXT>", 91: "<img>", 92: "</img>", 93: "<video>", 94: "<|im_start|>", 95: "<|im_end|>"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<IMG_CONTEXT>\n{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGES = [[], [(60, 40)], [(24, 24), (30, 100), (90, 90)]]
"""Sizes of the images of each prompt."""
NEW_NAMES = {
    "language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
}  # fmt: skip
"""Prefixes of names as saved and on the Hub, and those of the modules."""


def save_internvl(folder: Path, kind: str = "qwen2", vision: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Saves a tiny random model in float32, and returns it."""
    from transformers import AutoModelForImageTextToText, InternVLConfig

    text = {"model_type": kind, **TEXT, **OF_KIND[kind]}
    given = {"image_token_id": IMAGE, "tie_word_embeddings": False} | fields
    config = InternVLConfig(text_config=text, vision_config=VISION | (vision or {}), **given)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, "internvl")
    save_pretrained(model, folder)
    return model


def save_processor(folder: Path) -> None:
    save_tokenizer(folder, SPECIAL)
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokens["video_token"] = "<video>"
    change_json(folder / "tokenizer_config.json", chat_template=TEMPLATE, extra_special_tokens=tokens)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))


def their_processor(folder: Path) -> Any:
    from transformers import AutoTokenizer, InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = GotOcr2ImageProcessorPil(**{name: value for name, value in SETTINGS.items() if "type" not in name})
    with mock.patch.object(InternVLProcessor, "check_argument_for_proper_class"):  # it needs torchvision
        return InternVLProcessor(images, tokenizer, None, image_seq_length=TILE_TOKENS)


def pixels_of(count: int, seed: int = 0, side: int = SIDE) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def inputs_of(tiles: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """What a processor makes of a prompt with images of these numbers of tiles."""
    generator = torch.Generator().manual_seed(seed)
    ids = [3, 4]
    for count in tiles:
        ids += [91, *[IMAGE] * (TILE_TOKENS * count), 92, *torch.randint(2, 89, (4,), generator=generator).tolist()]
    return inputs_of_tokens(ids) | ({"pixel_values": pixels_of(sum(tiles), seed)} if tiles else {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("internvl")
    oracle = save_internvl(folder)
    save_processor(folder)
    return oracle, folder


@pytest.fixture(scope="module")
def model(saved):
    with load(saved[1]) as model:
        yield model


def test_an_answer_about_images_is_that_of_transformers(saved, model) -> None:
    """Alone, in a batch, in chunks, with cached prefixes and rows, and with the tensors of the processor in
    transformers."""
    oracle, folder = saved
    theirs, alone, prompts = their_processor(folder), [], []
    for sizes in IMAGES:
        text = model.tokenizer.apply_chat_template(chat(sizes), tokenize=False, add_generation_prompt=True)
        images = [draw(*size) for size in sizes]
        inputs = dict(theirs(text=text, images=images or None, return_tensors="pt"))
        prompts.append({"prompt": text, "images": images})
        answer = model.chat(chat(sizes), max_new_tokens=NEW, temperature=0)
        output = model.generate(prompts[-1], max_new_tokens=NEW, logprobs=0)
        alone += results(output)
        assert alone[-1][0] == oracle_tokens(oracle, inputs) and answer.text == output.texts[0].strip(), sizes
        assert run(model, inputs) == alone[-1:], "the oracle's own tensors"
    assert len({tuple(tokens) for tokens, _ in alone}) == len(IMAGES)
    assert results(model.generate(prompts, max_new_tokens=NEW, logprobs=0)) == alone
    with load(folder, prefix_cache_bytes=0) as other:
        other._engine.scheduler.max_tokens_per_step = 7
        assert results(other.generate(prompts, max_new_tokens=NEW, logprobs=0)) == alone


@pytest.mark.thorough
def test_every_way_to_run_it_gives_the_same_text(saved) -> None:
    check_every_way_to_run(saved[1], inputs_of([2, 5, 1], 3))


@pytest.mark.thorough
@pytest.mark.skipif(not NATIVE, reason="needs the kernels")
def test_packed_copies_and_quantised_weights_have_the_tower(saved, tmp_path) -> None:
    check_copies_and_codes(saved[1], inputs_of([2, 3]), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OF_KIND)
def test_all_kinds_of_text_models(kind, tmp_path) -> None:
    oracle = save_internvl(tmp_path, kind)
    with load(tmp_path) as model:
        for seed, tiles in enumerate([[], [2], [1, 3, 1]]):
            inputs = inputs_of(tiles, seed)
            assert run(model, inputs)[0][0] == oracle_tokens(oracle, inputs)


@pytest.mark.thorough
def test_other_names_and_the_text_model_alone(tmp_path) -> None:
    oracle, inputs = save_internvl(tmp_path, vision={"use_mask_token": True}), inputs_of([2])
    with load(tmp_path) as model:
        expected = run(model, inputs, 5)
        check_text_alone(tmp_path, model, inputs)
    assert expected[0][0] == oracle_tokens(oracle, inputs, 5), "the mask token is not used"
    rename_tensors(tmp_path, NEW_NAMES)
    with load(tmp_path) as other:
        assert run(other, inputs, 5) == expected


@pytest.mark.thorough
def test_a_tied_head(tmp_path) -> None:
    oracle = save_internvl(tmp_path, tie_word_embeddings=True)
    with load(tmp_path) as model:
        assert run(model, inputs_of([2]), 12)[0][0] == oracle_tokens(oracle, inputs_of([2]), 12)


# -- the tower

SIX_B: dict[str, Any] = {"attention_bias": False, "norm_type": "rms_norm", "use_qk_norm": True}
"""What the tower of the largest models has."""
TOWERS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, SIDE),
    (SIX_B, {}, SIDE),
    ({"use_absolute_position_embeddings": False, "use_mean_pooling": False, "hidden_act": "gelu_pytorch_tanh"}, {}, 40),
    ({"num_attention_heads": 3, "layer_norm_eps": 1e-3}, {"projector_hidden_act": "silu"}, 17),
    ({"image_size": 8}, {"downsample_ratio": 0.25}, 16),
    ({"image_size": 37, "patch_size": 5}, {"downsample_ratio": 1.0}, 29),
]
"""Fields of the tower, those outside, and the side of tiles."""


@pytest.mark.parametrize("case", sample(TOWERS, lambda case: case == TOWERS[0]))
def test_rows_are_those_of_transformers(case, tmp_path) -> None:
    """Also for tiles that are smaller or larger than the table of positions, and no multiple of patches."""
    vision, fields, side = case
    inputs = {"pixel_values": pixels_of(3, side=side)}
    check_rows(tmp_path, inputs, oracle_rows(save_internvl(tmp_path, vision=vision, **fields), inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("vision", [{}, SIX_B])
def test_bfloat16_rows_are_as_near_as_those_of_transformers(vision, tmp_path) -> None:
    inputs = {"pixel_values": pixels_of(3).bfloat16().float()}
    check_bfloat16_rows(tmp_path, inputs, save_internvl(tmp_path, vision=vision))


def test_a_prepared_image_has_the_rows_of_its_tiles(saved) -> None:
    media, tiles = check_prepared_image(saved[1], draw(60, 40))
    assert len(tiles) == 7 and media.num_tokens == 7 * TILE_TOKENS


def test_blank_images(saved) -> None:
    check_blank_images(saved[1], {1: 9, 17: 9, 50: 45})


# -- what is refused


def changed(**tensors):
    return {name: value for name, value in (inputs_of([2, 1]) | tensors).items() if value is not None}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda: changed(pixel_values=None), "27 tokens of id 90, but 0 images must have 0"),
        (lambda: changed(pixel_values=torch.zeros(3, 3, 24, 20)), r"pixel_values must be floats \[tiles, 3, S, S\]"),
        (lambda: changed(pixel_values=torch.zeros(3, 3, 20, 20)), "S // 4 in multiples of 2, such as S = 24"),
        (lambda: changed(pixel_values=torch.zeros(3, 24, 24)), r"pixel_values must be floats .* \[3, 24, 24\]"),
        (lambda: changed(pixel_values=torch.zeros(3, 3, 24, 24).int()), "pixel_values must be floats .* torch.int32"),
        (lambda: changed(pixel_values=pixels_of(4)), "27 tokens of id 90, but 4 images must have 36"),
        (lambda: {"prompt": "w9 <IMG_CONTEXT>"}, "1 placeholder <IMG_CONTEXT> for 0 images"),
    ],
)
def test_inputs_that_are_refused(model, inputs, message) -> None:
    given = inputs()
    with pytest.raises(ValueError, match=message):
        model.generate(given.pop("prompt"), max_new_tokens=2) if "prompt" in given else model.generate(**given)


def published(**text: Any) -> dict[str, Any]:
    """The config of InternVL3-1B-hf, with other fields of its text."""
    return {
        "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 256,
        "image_token_id": 151667, "model_type": "internvl", "projector_hidden_act": "gelu",
        "text_config": {
            "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
            "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151674,
        } | text,
        "vision_config": {
            "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": [448, 448],
            "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 4096, "layer_norm_eps": 1e-06,
            "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
            "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14],
            "projection_dropout": 0.0, "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True,
            "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
        },
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    }  # fmt: skip


def test_published_configs() -> None:
    found, config = read_config(published(), media=True)
    of = config.vision
    assert (of.hidden_size, of.num_hidden_layers, of.head_dim, of.intermediate_size) == (1024, 24, 64, 4096)
    assert (of.patches_per_side, of.merge, of.hidden_act, of.norm_type) == (32, 2, "gelu", "layer_norm")
    assert (config.image_token_id, config.rope.kind) == (151667, "dynamic")
    assert found.__name__ == "InternVLForConditionalGeneration"
    assert read_config(published())[1].vision is None
    large = published() | {"text_config": {"model_type": "qwen3_moe", "head_dim": 128}, "image_token_id": 151671}
    large["vision_config"] |= SIX_B | {"hidden_size": 3200, "num_attention_heads": 25, "num_hidden_layers": 45}
    found, config = read_config(large, media=True)
    assert (found.__name__, config.vision.head_dim, config.vision.use_qk_norm) == ("InternVLOfQwen3Moe", 128, True)


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    whole = pytest.importorskip("transformers").AutoConfig.for_model("internvl").to_dict()
    bare = {"model_type": "internvl", "vision_config": {}}
    ours, theirs = (read_config(config, media=True)[1] for config in (bare, {**whole, "architectures": None}))
    assert ours.vision == theirs.vision and ours.image_token_id == theirs.image_token_id == 151667


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"downsample_ratio": 0.3}, ValueError, "downsample_ratio must be 1 / n"),
        ({"downsample_ratio": True}, ValueError, "downsample_ratio must be 1 / n"),
        ({"projector_hidden_act": "mish"}, NotImplementedError, "projector_hidden_act.*mish"),
        ({"vision_feature_layer": -2}, NotImplementedError, "vision_feature_layer = -2 is not implemented"),
        ({"vision_feature_select_strategy": "full"}, NotImplementedError, "implemented: 'default'"),
        ({"image_token_id": "x"}, ValueError, "image_token_id must be a token's id"),
        ({"vision_config": VISION | {"patch_size": [4, 5]}}, NotImplementedError, "two equal sides"),
        ({"vision_config": VISION | {"norm_type": "batch"}}, ValueError, "one of layer_norm, rms_norm"),
        ({"vision_config": VISION | {"window": 5}}, NotImplementedError, "vision_config.window = 5"),
        ({"vision_config": []}, ValueError, "vision_config must be an object"),
        (
            {"text_config": {"model_type": "t5"}},
            NotImplementedError,
            "'t5' is not implemented .*: qwen2, qwen3, qwen3_moe, llama, phi3, gpt_oss",
        ),
    ],
)
def test_fields_that_are_refused(fields, error, message) -> None:
    config = {"model_type": "internvl", "vision_config": VISION, "text_config": TEXT | {"model_type": "qwen2"}}
    with pytest.raises(error, match=message) as raised:
        read_config(config | fields, media=True)
    if "text_config" not in fields:
        assert str(raised.value).endswith("; media=False loads only the text model")
        assert read_config(config | fields)[1].vision is None
