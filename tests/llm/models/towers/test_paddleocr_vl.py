"""PaddleOCR-VL: rows of the tower, positions and greedy text are those of transformers, with the same bits however they
are computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pace.llm.models.model_list import read_config
from pace.llm.processors.processor import place_media
from pace.ops import reference
from tests.editing import change_json, rename_tensors
from tests.llm.models.rotations import mrope
from tests.llm.models.towers import seeing
from tests.llm.models.towers.checks import (
    check_blank_images,
    check_every_way_to_run,
    check_greedy_text,
    check_refused_config,
    check_rows,
    load_layers,
    oracle_rows,
)
from tests.llm.models.towers.prompts import together
from tests.llm.models.towers.seeing import IMAGE, MERGE, NEW, PATCH, grid_thw, load, oracle_tokens, results, run
from tests.llm.models.variants import SIZES, randomise, save_pretrained
from tests.llm.processors.chatting import save_tokenizer
from tests.media.samples import draw
from tests.plugins.tiers import sample
from tests.support import backends

pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 600, "eos_token_id": None,
    "pad_token_id": 0, "bos_token_id": None, **mrope([2, 1, 3]),
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 21,
    "patch_size": PATCH, "spatial_merge_size": MERGE,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "PaddleOCRVLImageProcessor", "image_std": [0.5, 0.5, 0.5], "max_pixels": 2400,
    "merge_size": MERGE, "min_pixels": 256, "patch_size": PATCH, "processor_class": "PaddleOCRVLProcessor",
    "resample": 3, "rescale_factor": 1 / 255, "temporal_patch_size": 1,
}  # fmt: skip
SPECIAL = {IMAGE: "<|IMAGE_PLACEHOLDER|>", 91: "<|IMAGE_START|>", 92: "<|IMAGE_END|>", 93: "<|begin_of_sentence|>"}
TEMPLATE = (
    "<|begin_of_sentence|>{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>{% endif %}"
    "{% endfor %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}w7\n{% endif %}"
)
GRIDS = [(2, 2), (6, 10), (4, 2), (14, 8)]
ROWS = [[(4, 6)], [], [(4, 4), (2, 10), (6, 2)]]
"""Grids of the images of each prompt."""
OLD_NAMES = {
    "model.language_model.": "model.", "model.visual.": "visual.", "model.projector.": "mlp_AR.",
}  # fmt: skip
"""Prefixes of modules, and those of the Hub's checkpoints."""


def save_paddle(folder: Path, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    """Saves a tiny random model in float32, and returns it."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    ids = {"image_token_id": IMAGE, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 95}
    config = PaddleOCRVLConfig(text_config=TEXT | text, vision_config=VISION | (vision or {}), **ids)
    torch.manual_seed(6)
    model = PaddleOCRVLForConditionalGeneration(config).eval()
    randomise(model, "paddleocr_vl")
    save_pretrained(model, folder)
    return model


def pixels(grids: list[tuple[int, int]], seed: int) -> torch.Tensor:
    count = sum(rows * columns for rows, columns in grids)
    return torch.randn(count, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(seed))


def inputs_of(grids: list[tuple[int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """What a processor makes of a prompt with images."""
    inputs = seeing.inputs_of([grids], seed)
    return inputs | ({"pixel_values": pixels(grids, seed)} if grids else {})


PROMPTS = [inputs_of(grids, index) for index, grids in enumerate(ROWS)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paddle")
    return save_paddle(folder), folder


def test_greedy_text_is_that_of_transformers(saved) -> None:
    with load(saved[1], prefix_cache_bytes=0) as model:
        check_greedy_text(model, saved[0], PROMPTS, together(PROMPTS))


@pytest.mark.thorough
def test_every_way_to_run_it_gives_the_same_text(saved) -> None:
    check_every_way_to_run(saved[1], together(PROMPTS))


@pytest.mark.thorough
def test_an_answer_about_images_is_that_of_transformers(tmp_path) -> None:
    from transformers import AutoTokenizer, PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    oracle = save_paddle(tmp_path, use_bias=True)
    save_tokenizer(tmp_path, SPECIAL)
    tokens = {"image_token": SPECIAL[IMAGE]}
    change_json(tmp_path / "tokenizer_config.json", chat_template=TEMPLATE, extra_special_tokens=tokens)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    fields = {
        name: value for name, value in SETTINGS.items() if name not in ("image_processor_type", "processor_class")
    }
    theirs = PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(**fields), AutoTokenizer.from_pretrained(tmp_path))
    with load(tmp_path) as model:
        for sizes in ([], [(60, 40)], [(5, 90), (30, 33), (90, 90)]):
            parts = [{"type": "image", "image": draw(*size)} for size in sizes]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "w9 w8"}]}]
            text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            images = [draw(*size) for size in sizes]
            inputs = dict(theirs(text=text, images=images or None, return_tensors="pt"))
            answer = model.chat(messages, max_new_tokens=NEW, temperature=0)
            output = model.generate({"prompt": text, "images": images}, max_new_tokens=NEW, logprobs=0)
            assert output.generated_token_ids[0] == oracle_tokens(oracle, inputs), sizes
            assert answer.text == output.texts[0].strip() and run(model, inputs) == results(output), sizes


# -- the tower

TOWERS: list[dict[str, Any]] = [
    {},
    {"image_size": 4, "num_attention_heads": 3, "hidden_act": "gelu"},
    {"image_size": 80, "layer_norm_eps": 1e-3, "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
]


@pytest.mark.parametrize("vision", sample(TOWERS, lambda fields: not fields))
def test_rows_are_those_of_transformers(vision, tmp_path) -> None:
    """With a table of positions that is smaller or larger than an image, and with both spellings of names."""
    oracle = save_paddle(tmp_path, vision)
    inputs = {"pixel_values": pixels(GRIDS, 0), "image_grid_thw": grid_thw(GRIDS)}
    expected = oracle_rows(oracle, inputs)
    check_rows(tmp_path, inputs, expected)
    other_names(tmp_path)
    check_rows(tmp_path, inputs, expected)


def test_blank_images(saved) -> None:
    check_blank_images(saved[1], {1: 1, 7: 7, 12: 12})
    tower = load_layers(saved[1], backends()[-1]).towers[0]
    assert [tower.blank(count).grid for count in (1, 7, 12)] == [(1, 2, 2), (1, 2, 14), (1, 6, 8)]


def other_names(folder: Path) -> None:
    """Renames tensors from the modules' names to those of the Hub, or back."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        is_new = any(name.startswith("model.language_model.") for name in file.keys())
    back = {"visual.": "model.visual.", "mlp_AR.": "model.projector.", "model.": "model.language_model."}
    rename_tensors(folder, OLD_NAMES if is_new else back)


def test_positions_of_random_mixtures() -> None:
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    config = PaddleOCRVLConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE)
    with torch.device("meta"):
        oracle = PaddleOCRVLForConditionalGeneration(config)
    model_class, ours = read_config({**config.to_dict(), "architectures": None}, media=True)
    model, chance = model_class(ours, torch.float32, reference), random.Random(0)
    for seed in range(12):
        grids = [(MERGE * chance.randint(1, 5), MERGE * chance.randint(1, 5)) for _ in range(chance.randint(1, 4))]
        inputs = inputs_of(grids, seed)
        given = {name: inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")}
        expected, delta = oracle.model.get_rope_index(inputs["input_ids"], **given)
        row = inputs["input_ids"][0].tolist()
        (media,) = place_media([row], model.towers[0].read_inputs(inputs), IMAGE, "image")
        found = model.angle_positions(media, 0, len(row) + 3)
        after = len(row) + np.arange(3) + int(delta)
        assert np.array_equal(found, np.concatenate([expected[:, 0].numpy(), np.tile(after, (3, 1))], 1))


# -- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_grid_thw": None}, "pixel_values and image_grid_thw; image_grid_thw is missing"),
        ({"image_grid_thw": torch.tensor([[1, 4, 5]])}, r"image 0 must be one frame.*multiples of 2; got \[1, 4, 5\]"),
        ({"pixel_values": torch.zeros(23, 3, 4, 4)}, r"pixel_values must be floats \[24, 3, 4, 4\]"),
        ({"pixel_values": torch.zeros(24, 48)}, r"pixel_values must be floats \[24, 3, 4, 4\].*\[24, 48\]"),
    ],
)
def test_inputs_that_are_refused(changes, message) -> None:
    config = read_config({"model_type": "paddleocr_vl", **TEXT, "vision_config": VISION}, media=True)
    tower = config[0](config[1], torch.float32, reference).towers[0]
    with pytest.raises(ValueError, match=message):
        tower.read_inputs(inputs_of([(4, 6)]) | changes)


PUBLISHED: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"], "compression_ratio": 1.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_dropout_prob": 0.0, "hidden_size": 1024, "ignored_index": -100,
    "image_token_id": 100295, "intermediate_size": 3072, "max_position_embeddings": 131072,
    "max_sequence_length": None, "model_type": "paddleocr_vl", "num_attention_heads": 16, "num_hidden_layers": 18,
    "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, "rope_theta": 500000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False,
    "use_flash_attention": False, "video_token_id": 101307, "vision_start_token_id": 101305, "vocab_size": 103424,
    "weight_share_add_bias": True, "use_3d_rope": True, "rope_is_neox_style": True,
    "vision_config": {
        "architectures": ["PaddleOCRVisionModel"], "attention_dropout": 0.0, "auto_map": {}, "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh", "image_size": 384, "intermediate_size": 4304, "layer_norm_eps": 1e-06,
        "model_type": "paddleocr_vl", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27,
        "pad_token_id": 0, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
"""The config of PaddleOCR-VL."""


def test_published_configs() -> None:
    config = read_config(PUBLISHED, media=True)[1]
    of, rope = config.vision, config.rope
    assert (of.hidden_size, of.num_hidden_layers, of.head_dim, of.patches_per_side) == (1152, 27, 72, 27)
    assert (rope.theta, rope.sections, rope.interleaved, rope.alternates) == (5e5, (16, 24, 24), False, False)
    assert (config.image_token_id, config.tie_word_embeddings, of.out_hidden_size) == (100295, False, 1024)
    assert read_config(PUBLISHED)[1].vision is None


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    whole = pytest.importorskip("transformers").AutoConfig.for_model("paddleocr_vl").to_dict()
    bare = {"model_type": "paddleocr_vl", "vision_config": {}}
    ours, theirs = (read_config(config, media=True)[1] for config in (bare, {**whole, "architectures": None}))
    assert ours.vision == theirs.vision and ours.rope == theirs.rope and ours.image_token_id == theirs.image_token_id


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"hidden_size": 20}, ValueError, r"must be a multiple of 4 \* num_attention_heads; got 20 and 2 heads"),
        ({"rope_parameters": {"rope_type": "default"}}, NotImplementedError, "implemented: axial"),
        ({"model_type": "siglip_vision_model"}, NotImplementedError, "vision_config.model_type"),
        ({"spatial_merge_size": 0}, ValueError, r"spatial_merge_size must be an integer in 1\.\.8"),
    ],
)
def test_fields_that_are_refused(fields, error, message) -> None:
    config = {"model_type": "paddleocr_vl", **TEXT, "vision_config": VISION | fields}
    check_refused_config(config, error, message)
