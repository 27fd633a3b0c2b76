"""Idefics3 and SmolVLM: rows of the tower, and greedy text, are those of transformers, with the same bits however they
are computed."""

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
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around, together
from tests.llm.models.towers.seeing import NATIVE, NEW, load, oracle_tokens, results, run
from tests.llm.models.towers.tiles.making import (
    IMAGE,
    MODELS,
    SETTINGS,
    SIDE,
    TILE_TOKENS,
    VISION,
    chat,
    save_processor,
    save_tiled,
)
from tests.media.samples import draw
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

TYPES = ["smolvlm", "idefics3"]
IMAGES = [[], [(60, 40)], [(24, 24), (30, 100), (90, 90)]]
"""Sizes of the images of each prompt: none, one of 7 tiles, and three of 10, 4 and 10 tiles."""


def pixels_of(tiles: list[int], seed: int = 0, side: int = SIDE) -> torch.Tensor:
    """Random pixels of prompts with these numbers of tiles, filled with tiles of zeros."""
    pixels = torch.zeros(len(tiles), max(tiles), 3, side, side)
    for row, count in enumerate(tiles):
        pixels[row, :count] = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed + row))
    return pixels


def inputs_of(tiles: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """What a processor makes of prompts with these numbers of tiles, padded on the left."""
    prompts = [prompt_around([[IMAGE] * TILE_TOKENS] * count, seed + row) for row, count in enumerate(tiles)]
    inputs = together([inputs_of_tokens(prompt) for prompt in prompts])
    if max(tiles):
        pixels = pixels_of(tiles, seed)
        inputs |= {"pixel_values": pixels, "pixel_attention_mask": torch.ones(*pixels.shape[:2], SIDE, SIDE).long()}
    return inputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    oracle = save_tiled(folder, "smolvlm")
    save_processor(folder, "smolvlm")
    return oracle, folder


@pytest.fixture(scope="module")
def model(saved):
    with load(saved[1]) as model:
        yield model


@pytest.mark.parametrize("model_type", sample(TYPES, lambda name: name == "smolvlm"))
def test_an_answer_about_images_is_that_of_transformers(model_type, tmp_path) -> None:
    """Alone, in a batch, in chunks, with cached prefixes and rows, and with the tensors of the processor in
    transformers."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    from pace.tokenizer.loading import load_tokenizer

    oracle = save_tiled(tmp_path, model_type)
    save_processor(tmp_path, model_type)
    theirs = Idefics3Processor(
        Idefics3ImageProcessorPil(**SETTINGS["idefics3"]), load_tokenizer(tmp_path), image_seq_len=TILE_TOKENS
    )
    with load(tmp_path) as model:
        alone, prompts = [], []
        for sizes in IMAGES:
            text = model.tokenizer.apply_chat_template(chat(sizes), tokenize=False, add_generation_prompt=True)
            images = [draw(*size) for size in sizes]
            inputs = theirs(text=text, images=images or None, return_tensors="pt")
            prompts.append({"prompt": text, "images": images})
            answer = model.chat(chat(sizes), max_new_tokens=NEW, do_sample=False, logprobs=0)
            alone += run(model, {"inputs": prompts[-1]})
            assert alone[-1][0] == [entry.token for entry in answer.logprobs] == oracle_tokens(oracle, inputs), sizes
            assert run(model, inputs) == alone[-1:], "the oracle's own tensors"
        assert len({tuple(tokens) for tokens, _ in alone}) == len(IMAGES)
        assert model._engine.media.num_encoded == 4 + 31, "images, and the tiles in tensors; each once"
        assert results(model.generate(prompts, max_new_tokens=NEW, logprobs=0)) == alone
    with load(tmp_path, prefix_cache_bytes=0) as model:
        model._engine.scheduler.max_tokens_per_step = 7
        assert results(model.generate(prompts, max_new_tokens=NEW, logprobs=0)) == alone


@pytest.mark.thorough
def test_every_way_to_run_it_gives_the_same_text(saved, model) -> None:
    batch = inputs_of([2, 0, 5])
    expected = run(model, batch, 12)
    for row, count in enumerate([2, 0, 5]):
        inputs = inputs_of([count], row)
        assert run(model, inputs, 12) == expected[row : row + 1]
        assert oracle_tokens(saved[0], inputs, 12) == expected[row][0]
    check_every_way_to_run(saved[1], batch)


# -- the tower

TOWERS = [
    ("smolvlm", {}, SIDE),
    ("idefics3", {}, SIDE),
    ("idefics3", {"vision_config": {"num_attention_heads": 3, "patch_size": 5, "image_size": 23}}, 22),
    ("idefics3", {"vision_config": {"image_size": 37, "patch_size": 3, "hidden_act": "gelu"}, "scale_factor": 3}, 29),
    ("idefics3", {"scale_factor": 1, "vision_config": {"image_size": 68}}, 45),
    ("smolvlm", {"scale_factor": 4, "vision_config": {"layer_norm_eps": 1e-3}}, 80),
]


def rows_of_tiles(oracle, inputs) -> list[torch.Tensor]:
    """The rows of each tile but those of zeros, in transformers."""
    num_tiles = int(inputs["pixel_values"].flatten(2).any(2).sum())
    return list(torch.cat(oracle_rows(oracle, inputs)).chunk(num_tiles))


@pytest.mark.parametrize("case", sample(TOWERS, lambda case: case == TOWERS[0]))
def test_rows_are_those_of_transformers(case, tmp_path) -> None:
    """Also for tiles that are smaller or larger than those of the table of positions, and no multiple of patches."""
    model_type, fields, side = case
    oracle = save_tiled(tmp_path, model_type, **fields)
    inputs = {"pixel_values": pixels_of([3, 1], side=side)}
    expected = rows_of_tiles(oracle, inputs)
    assert len(expected) == 4, "tiles of zeros are left out"
    check_rows(tmp_path, inputs, expected)


def test_positions_are_those_of_transformers() -> None:
    """For all numbers of patches: positions at a boundary are rounded as there."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

    from pace.llm.models.towers.idefics3 import nearest

    for side in (7, 26, 27, 32):
        config = Idefics3VisionConfig(hidden_size=2, image_size=side, patch_size=1, num_channels=1)
        embeddings = Idefics3VisionEmbeddings(config)
        embeddings.patch_embedding.weight.data.zero_(), embeddings.patch_embedding.bias.data.zero_()
        embeddings.position_embedding.weight.data = torch.arange(side**2.0)[:, None].repeat(1, 2)
        for count in (1, 2, side - 1, side, side + 1, 40):
            found = embeddings(torch.zeros(1, 1, count, count), torch.ones(1, count, count).bool())[0, :, 0]
            ours = nearest(count, side)[:, None] * side + nearest(count, side)
            assert torch.equal(found.long(), ours.flatten()), (side, count)


def test_a_prepared_image_has_the_rows_of_its_tiles(saved) -> None:
    media, tiles = check_prepared_image(saved[1], draw(60, 40))
    assert len(tiles) == 7 and media.num_tokens == 7 * TILE_TOKENS


def test_a_blank_image_has_nearly_the_wanted_number_of_tokens(saved) -> None:
    check_blank_images(saved[1], {1: 9, 14: 9, 70: 63})


@pytest.mark.thorough
@pytest.mark.skipif(not NATIVE, reason="needs the kernels")
def test_packed_copies_and_quantised_weights_have_the_tower(saved, tmp_path) -> None:
    check_copies_and_codes(saved[1], inputs_of([2, 1]), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", TYPES)
def test_bfloat16_rows_are_as_near_as_those_of_transformers(model_type, tmp_path) -> None:
    inputs = {"pixel_values": pixels_of([3])}
    check_bfloat16_rows(tmp_path, inputs, save_tiled(tmp_path, model_type), rows_of_tiles)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_other_text_models(kind, tmp_path) -> None:
    text = {"model_type": kind} | ({"sliding_window": 7} if kind == "mistral" else {})
    oracle = save_tiled(tmp_path, "idefics3", text_config=text)
    with load(tmp_path) as model:
        inputs = inputs_of([3])
        assert run(model, inputs, 12)[0][0] == oracle_tokens(oracle, inputs, 12)


@pytest.mark.thorough
def test_names_of_a_bare_model_and_a_text_model_alone(saved, model, tmp_path) -> None:
    save_tiled(tmp_path, "smolvlm")
    inputs = inputs_of([2])
    expected = run(model, inputs, 5)
    check_text_alone(tmp_path, model, inputs)
    rename_tensors(tmp_path, {"model.": ""})
    with load(tmp_path) as other:
        assert run(other, inputs, 5) == expected


# -- what is refused


def changed(**tensors):
    return {name: value for name, value in (inputs_of([2, 1]) | tensors).items() if value is not None}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda: changed(pixel_values=None), "pixel_values is missing"),
        (lambda: changed(pixel_values=torch.zeros(2, 3, 24, 24)), r"pixel_values must be floats \[prompts, tiles"),
        (lambda: changed(pixel_values=torch.zeros(2, 2, 3, 24, 32)), "such as S = 8"),
        (lambda: changed(pixel_values=torch.zeros(2, 2, 3, 20, 20)), r"S // 4 in multiples of 2"),
        (lambda: changed(pixel_attention_mask=torch.ones(2, 2, 24)), r"mask must be \[2, 2, 24, 24\]"),
        (lambda: changed(pixel_attention_mask=torch.zeros(2, 2, 24, 24)), "must be ones for all tiles"),
        (lambda: changed(pixel_values=inputs_of([2, 2])["pixel_values"]), "have 27 .* but 4 images must have 36"),
        (lambda: {"prompt": "w9 <image> <image>", "images": [draw(9, 9)]}, "2 placeholders <image> for 1 image"),
    ],
)
def test_inputs_that_are_refused(model, inputs, message) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        model.generate(inputs(), max_new_tokens=2)


def test_tiles_of_zeros_alone() -> None:
    """SmolVLM keeps the first of them, and Idefics3 none."""
    from pace.llm.models.towers.idefics3 import Idefics3Tower, Idefics3VisionConfig

    pixels = {"pixel_values": torch.zeros(2, 2, 3, SIDE, SIDE)}
    for model_type, count in (("smolvlm", 1), ("idefics3", 0)):
        config = Idefics3VisionConfig.of(MODELS[model_type] | {"model_type": model_type})
        assert len(Idefics3Tower(config, 32, IMAGE).read_inputs(pixels)) == count


PUBLISHED = {
    "architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 49190, "model_type": "idefics3",
    "scale_factor": 4, "tie_word_embeddings": False, "vocab_size": 49280,
    "text_config": {
        "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 4,
        "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000,
        "use_resampler": False, "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "num_attention_heads": 12,
        "patch_size": 16, "size": {"longest_edge": 2048}, "use_base_siglip": True,
    },
}  # fmt: skip
"""The config of SmolVLM-256M-Instruct."""


def test_published_configs() -> None:
    config = read_config(PUBLISHED, media=True)[1]
    of = config.vision
    assert (of.hidden_size, of.num_hidden_layers, of.head_dim, of.intermediate_size) == (768, 12, 64, 3072)
    assert (of.patches_per_side, of.scale_factor, of.hidden_act, of.layer_norm_eps) == (32, 4, "gelu_tanh", 1e-6)
    assert (config.image_token_id, config.pad_token_id, config.tie_word_embeddings) == (49190, 2, False)
    assert read_config(PUBLISHED)[1].vision is None


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type in TYPES:
        whole = transformers.AutoConfig.for_model(model_type).to_dict()
        bare = {"model_type": model_type, "vision_config": {}, "text_config": {"model_type": "llama"}}
        ours, theirs = (read_config(config, media=True)[1] for config in (bare, {**whole, "architectures": None}))
        assert ours.vision == theirs.vision and ours.image_token_id == theirs.image_token_id == 128257


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"scale_factor": 0}, ValueError, r"scale_factor must be an integer in 1\.\.64; got 0"),
        ({"image_token_id": "x"}, ValueError, "image_token_id must be a token's id"),
        ({"vision_config": VISION | {"patch_size": [4, 5]}}, NotImplementedError, "two equal sides"),
        ({"vision_config": VISION | {"num_attention_heads": 5}}, ValueError, "a multiple of num_attention_heads"),
        ({"vision_config": VISION | {"hidden_act": "mish"}}, NotImplementedError, "mish"),
        ({"text_config": {"model_type": "t5"}}, NotImplementedError, "'t5' is not .* implemented: llama, mistral"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields, error, message) -> None:
    config = {"model_type": "idefics3", "image_token_id": IMAGE} | MODELS["idefics3"]
    with pytest.raises(error, match=message) as raised:
        read_config(config | fields, media=True)
    if "text_config" not in fields:
        assert str(raised.value).endswith("; media=False loads only the text model")
        assert read_config(config | fields)[1].vision is None
