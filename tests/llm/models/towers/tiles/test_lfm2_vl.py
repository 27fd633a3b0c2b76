"""LFM2-VL: rows of the tower, and greedy text, are those of transformers, with the same bits however they are
computed."""

from __future__ import annotations

import pytest
import torch

from pace.llm.models.model_list import read_config
from tests.editing import rename_tensors
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
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around
from tests.llm.models.towers.seeing import NATIVE, NEW, load, oracle_tokens, results, run
from tests.llm.models.towers.tiles.making import (
    IMAGE,
    LFM2_VISION,
    MODELS,
    PATCH,
    SCALE,
    chat,
    save_processor,
    save_tiled,
)
from tests.media.samples import draw
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

IMAGES = [[], [(60, 40)], [(24, 24), (30, 100), (90, 90)]]
"""Sizes of the images of each prompt: none, one of tiles and a thumbnail, and three."""
SHAPES = [(6, 6), (2, 8), (4, 2), (10, 12), (2, 2)]
"""Rows and columns of patches: more than in the table of positions, and fewer."""


def tiles_of(shapes: list[tuple[int, int]], seed: int = 0, patch: int = PATCH) -> dict[str, torch.Tensor]:
    """Random tiles of these shapes, filled with zeros to more patches than any has."""
    count = max(rows * columns for rows, columns in shapes) + 3
    pixels, mask = torch.zeros(len(shapes), count, 3 * patch**2), torch.zeros(len(shapes), count, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    for index, (rows, columns) in enumerate(shapes):
        pixels[index, : rows * columns] = torch.randn(rows * columns, 3 * patch**2, generator=generator)
        mask[index, : rows * columns] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


def inputs_of(shapes: list[tuple[int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    prompt = prompt_around([[IMAGE] * (rows * columns // SCALE**2) for rows, columns in shapes], seed)
    return inputs_of_tokens(prompt) | (tiles_of(shapes, seed) if shapes else {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm2_vl")
    oracle = save_tiled(folder, "lfm2_vl")
    save_processor(folder, "lfm2_vl")
    return oracle, folder


@pytest.fixture(scope="module")
def model(saved):
    with load(saved[1]) as model:
        yield model


def test_an_answer_about_images_is_that_of_transformers(saved, model) -> None:
    """Alone, in a batch, in chunks, with cached prefixes and rows, and as tensors. The oracle gets the tensors of this
    processor, because its own needs torchvision."""
    alone, prompts = [], []
    for sizes in IMAGES:
        text = model.tokenizer.apply_chat_template(chat(sizes), tokenize=False, add_generation_prompt=True)
        images = [draw(*size) for size in sizes]
        prompts.append({"prompt": text, "images": images})
        layouts = [model.processor.image.layout(image).text for image in images]
        pieces = text.split("<image>")
        expanded = pieces[0] + "".join(layout + piece for layout, piece in zip(layouts, pieces[1:], strict=True))
        inputs = {"input_ids": torch.tensor([model.tokenizer(expanded)["input_ids"]])}
        if images:
            inputs |= {name: torch.from_numpy(array) for name, array in model.processor(images=images).items()}
        alone += run(model, {"inputs": prompts[-1]})
        assert alone[-1][0] == oracle_tokens(saved[0], inputs), sizes
        assert run(model, inputs) == alone[-1:], "tensors"
        answer = model.chat(chat(sizes), max_new_tokens=NEW, do_sample=False, logprobs=0)
        assert [entry.token for entry in answer.logprobs] == alone[-1][0]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(IMAGES)
    assert results(model.generate(prompts, max_new_tokens=NEW, logprobs=0)) == alone
    with load(saved[1], prefix_cache_bytes=0) as chunked:
        chunked._engine.scheduler.max_tokens_per_step = 7
        assert results(chunked.generate(prompts, max_new_tokens=NEW, logprobs=0)) == alone


@pytest.mark.thorough
def test_every_way_to_run_it_gives_the_same_text(saved, model) -> None:
    for shapes in ([], SHAPES[:2], SHAPES):
        inputs = inputs_of(shapes, len(shapes))
        expected = run(model, inputs, 12)
        assert expected[0][0] == oracle_tokens(saved[0], inputs, 12)
        check_every_way_to_run(saved[1], inputs)


# -- the tower

TOWERS = [
    {},
    {"downsample_factor": 1, "projector_use_layernorm": False, "projector_bias": False},
    {
        "projector_hidden_act": "silu",
        "vision_config": {"num_patches": 81, "num_attention_heads": 3, "vision_use_head": True},
    },
    {"vision_config": {"patch_size": 3, "num_patches": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-3}},
]  # fmt: skip


@pytest.mark.parametrize("fields", sample(TOWERS, lambda fields: not fields))
def test_rows_are_those_of_transformers(fields, tmp_path) -> None:
    oracle = save_tiled(tmp_path, "lfm2_vl", **fields)
    inputs = tiles_of(SHAPES, patch=fields.get("vision_config", {}).get("patch_size", PATCH))
    check_rows(tmp_path, inputs, oracle_rows(oracle, inputs))


@pytest.mark.thorough
def test_bfloat16_rows_are_as_near_as_those_of_transformers(tmp_path) -> None:
    check_bfloat16_rows(tmp_path, tiles_of(SHAPES), save_tiled(tmp_path, "lfm2_vl"))


def test_blank_images(saved) -> None:
    check_blank_images(saved[1], {1: 1, 14: 14, 300: 256})


@pytest.mark.thorough
@pytest.mark.skipif(not NATIVE, reason="needs the kernels")
def test_packed_copies_and_quantised_weights_have_the_tower(saved, tmp_path) -> None:
    check_copies_and_codes(saved[1], inputs_of(SHAPES[:2]), tmp_path)


def test_a_prepared_image_has_the_rows_of_its_tiles(saved) -> None:
    media, tiles = check_prepared_image(saved[1], draw(100, 60))
    assert media.thumbnail is not None and len(tiles) == len(media.runs)


@pytest.mark.thorough
def test_other_names_and_a_text_model_alone(saved, model, tmp_path) -> None:
    save_tiled(tmp_path, "lfm2_vl")
    inputs = inputs_of(SHAPES[:3])
    expected = run(model, inputs, 5)
    check_text_alone(tmp_path, model, inputs)
    rename_tensors(tmp_path, {"model.vision_tower.": "model.vision_tower.vision_model."})
    with load(tmp_path) as other:
        assert run(other, inputs, 5) == expected
    rename_tensors(tmp_path, {"model.": ""})
    with load(tmp_path) as other:
        assert run(other, inputs, 5) == expected


@pytest.mark.thorough
def test_a_mixture_of_experts(tmp_path) -> None:
    text = {
        "model_type": "lfm2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    }  # fmt: skip
    oracle = save_tiled(tmp_path, "lfm2_vl", text_config=text)
    with load(tmp_path) as model:
        inputs = inputs_of(SHAPES[:3])
        assert run(model, inputs, 12)[0][0] == oracle_tokens(oracle, inputs, 12)


# -- what is refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spatial_shapes": None}, "spatial_shapes is missing"),
        ({"pixel_values": torch.zeros(2, 39, 47)}, r"pixel_values must be floats \[tiles, patches, 48\]"),
        ({"spatial_shapes": torch.tensor([[6, 6]])}, r"must be \[2, 39\] and \[2, 2\]"),
        ({"spatial_shapes": torch.tensor([[6, 6], [3, 4]])}, r"spatial_shapes of tile 1 must be .* multiples of 2"),
        ({"spatial_shapes": torch.tensor([[8, 8], [2, 8]])}, "with at most 39 patches"),
        ({"spatial_shapes": torch.tensor([[6, 6], [2, 6]])}, "pixel_attention_mask of tile 1 must be 12 ones"),
    ],
)
def test_inputs_that_are_refused(model, changed, message) -> None:
    inputs = {name: value for name, value in (inputs_of(SHAPES[:2]) | changed).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        model.generate(inputs, max_new_tokens=2)


PUBLISHED = {
    "architectures": ["Lfm2VlForConditionalGeneration"], "do_image_splitting": True, "downsample_factor": 2,
    "encoder_patch_size": 16, "image_token_index": 396, "max_image_tokens": 256, "max_num_patches": 1024,
    "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "model_type": "lfm2-vl",
    "projector_bias": True, "projector_hidden_act": "gelu", "projector_hidden_size": 2560, "tile_size": 512,
    "use_image_special_tokens": True, "use_thumbnail": False, "vision_feature_layer": -1,
    "text_config": {
        "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_use_swiglu": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 1024, "eos_token_id": 7, "hidden_size": 1024, "intermediate_size": 6656,
        "layer_types": ["conv", "conv", "full_attention"] * 5 + ["conv"], "max_position_embeddings": 128000,
        "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "use_pos_enc": True, "vocab_size": 65536,
    },
    "vision_config": {
        "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model", "num_attention_heads": 12, "num_channels": 3,
        "num_hidden_layers": 12, "num_patches": 256, "patch_size": 16, "vision_use_head": False,
    },
}  # fmt: skip
"""The config of LFM2-VL-450M, except that its layers have another order."""


def test_published_configs() -> None:
    config = read_config(PUBLISHED, media=True)[1]
    of = config.vision
    assert (of.hidden_size, of.num_hidden_layers, of.head_dim, of.patch_shape) == (768, 12, 64, (768,))
    assert (config.projector.downsample_factor, config.projector.projector_hidden_act) == (2, "gelu")
    assert (config.image_token_id, config.intermediate_size, config.tie_word_embeddings) == (396, 4608, True)
    assert read_config(PUBLISHED)[1].vision is None


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model("lfm2_vl").to_dict()
    text = {"model_type": "lfm2", "layer_types": whole["text_config"]["layer_types"]}
    bare = {"model_type": "lfm2_vl", "vision_config": {}, "text_config": text}
    ours, theirs = (read_config(config, media=True)[1] for config in (bare, {**whole, "architectures": None}))
    assert (ours.vision, ours.projector) == (theirs.vision, theirs.projector)
    assert ours.image_token_id == theirs.image_token_id == 396


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"downsample_factor": 0}, ValueError, "downsample_factor must be an integer"),
        ({"projector_hidden_act": "mish"}, NotImplementedError, "projector_hidden_act.*mish"),
        ({"vision_config": LFM2_VISION | {"num_patches": 24}}, ValueError, "num_patches must be a square; got 24"),
        ({"vision_config": 3}, ValueError, "vision_config must be an object"),
        ({"text_config": {"model_type": "llama"}}, NotImplementedError, "'llama' is not .* implemented: lfm2"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields, error, message) -> None:
    config = {"model_type": "lfm2_vl", "image_token_id": IMAGE} | MODELS["lfm2_vl"]
    with pytest.raises(error, match=message):
        read_config(config | fields, media=True)
