"""Images of Gemma 4, bit for bit as `Gemma4ImageProcessorPil` of transformers prepares them, from files to answers. The
processor of the 12B has no such form: it is compared with torch's resize, within two levels of 255."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from pace.assets import TINY
from pace.llm import LLMModel
from pace.llm.processors.gemma4 import BUDGETS, Gemma4ImageProcessor, Gemma4UnifiedImageProcessor, fitted
from pace.llm.processors.gemma4_audio import Gemma4AudioProcessor, Gemma4UnifiedAudioProcessor
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from tests.llm.models.towers.gemma.gemma4_models import save_gemma4
from tests.media.samples import draw, encode, files, modes

SETTINGS = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280, "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3,
    "rescale_factor": 0.00392156862745098,
}  # fmt: skip
"""Published settings."""
SMALL = SETTINGS | {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}
UNIFIED = SMALL | {"image_processor_type": "Gemma4UnifiedImageProcessor"}
SOUND = {
    "12b": {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "audio_samples_per_token": 16},
    "e2b": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16},
}
BEGIN, TOKEN, END = "<|image>", "<|image|>", "<image|>"
SPECIAL = {"boi_token": BEGIN, "eoi_token": END, "image_token": TOKEN, "audio_token": "<|audio|>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def arrays(ours, *images):
    return ours.arrays([ours.prepare(image) for image in images])


def check(settings, *images):
    found = arrays(Gemma4ImageProcessor.from_dict(settings), *images)
    expected = Gemma4ImageProcessorPil(**settings)(list(images), return_tensors="np")
    assert found.keys() == expected.keys() - {"num_soft_tokens_per_image"}
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(array, expected[name], name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resample": 2, "rescale_factor": 0.01, "pooling_kernel_size": 3},
        {"do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": 0.7, "max_soft_tokens": 140},
    ],
)
def test_images_have_the_bits_of_the_oracle(changes):
    sizes = [(64, 64), (1, 1), (1, 90), (300, 7), (23, 25), (200, 311), (72, 56), (1, 4097)]
    check(SMALL | changes, *[draw(*size) for size in sizes])


def test_modes_and_files():
    ours, reference = Gemma4ImageProcessor.from_dict(SMALL), Gemma4ImageProcessorPil(**SMALL)
    for name, image in modes().items():
        if name != "La":  # has no RGB form
            np.testing.assert_array_equal(
                arrays(ours, image)["pixel_values"], reference(image, return_tensors="np")["pixel_values"], name
            )
    for name, data in files().items():
        if "extras" not in name:  # these are turned
            opened = reference(PIL.Image.open(io.BytesIO(data)), return_tensors="np")
            np.testing.assert_array_equal(arrays(ours, data)["pixel_values"], opened["pixel_values"], name)


@pytest.mark.thorough
def test_images_of_the_published_size():
    check(SETTINGS, draw(896, 896), draw(640, 480), draw(31, 1700))
    check(SETTINGS | {"max_soft_tokens": 1120}, draw(640, 480))


def test_sizes_are_those_of_the_oracle():
    chance = random.Random(5)
    for patch, pool, tokens in ((16, 3, 280), (16, 3, 70), (16, 3, 1120), (4, 2, 70), (5, 1, 140)):
        for _ in range(1000):
            height, width = (int(2 ** chance.uniform(0, 13)) for _ in range(2))
            expected = get_aspect_ratio_preserving_size(height, width, patch, tokens * pool**2, pool)
            assert fitted(height, width, patch * pool, tokens) == expected, (height, width)


@pytest.mark.parametrize("limit, used", [(None, 280), (1000, 280), (256, 140), (140, 140), (139, 70), (69, 69), (1, 1)])
def test_a_limit_of_tokens_chooses_a_budget(limit, used):
    ours = Gemma4ImageProcessor.from_dict(SETTINGS)
    for size in ((640, 480), (100, 900), (3000, 4000)):
        found = ours.target_size(*size, limit)
        assert found == fitted(*size, 48, used)
        assert ours.tokens_of(found) <= used
        if used in BUDGETS:
            other = Gemma4ImageProcessor.from_dict(SETTINGS | {"max_soft_tokens": used})
            assert found == other.target_size(*size)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        ours.target_size(3, 4, 0)


def test_the_text_of_an_image():
    image = encode(draw(90, 70), "PNG")
    for ours, patches in (
        (Gemma4ImageProcessor.from_dict(SMALL), 4),
        (Gemma4UnifiedImageProcessor.from_dict(UNIFIED), 1),
    ):
        layout, media = ours.layout(image), ours.prepare(image)
        assert layout.text == BEGIN + TOKEN * 63 + END and layout.runs == media.runs == (63,)
        assert media.grid[1] * media.grid[2] == len(media.features) == 63 * patches
        assert len({ours.prepare(other).digest for other in (image, draw(90, 70), draw(70, 90), draw(90, 70, 1))}) == 3


def torch_arrays(settings: dict, image: PIL.Image.Image) -> np.ndarray:
    """The patches of the 12B's processor: torch's resize on bytes, and levels from 0 to 1."""
    factor = settings["patch_size"] * settings["pooling_kernel_size"]
    size = fitted(image.height, image.width, factor, settings["max_soft_tokens"])
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)[0]
    patches = resized.unfold(1, factor, factor).unfold(2, factor, factor)
    return patches.permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1).numpy() * settings["rescale_factor"]


def test_images_of_the_12b_are_within_two_levels():
    ours = Gemma4UnifiedImageProcessor.from_dict(UNIFIED)
    sizes = [(64, 64), (1, 90), (300, 7), (23, 25), (200, 311)]
    found = arrays(ours, *[draw(*size) for size in sizes])
    for values, places, size in zip(found["pixel_values"], found["image_position_ids"], sizes):
        expected = torch_arrays(UNIFIED, draw(*size))
        assert abs(values[: len(expected)] - expected).max() <= 2.01 / 255
        assert not values[len(expected) :].any() and (places[len(expected) :] == -1).all()
        columns = places[:, 0].max() + 1
        at = np.arange(len(expected))
        np.testing.assert_array_equal(places[: len(expected)], np.stack([at % columns, at // columns], 1))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"max_soft_tokens": 100},
            ValueError,
            "x.json: max_soft_tokens must be one of 70, 140, 280, 560, 1120; got 100",
        ),
        ({"do_resize": False}, NotImplementedError, "x.json: do_resize = False is not implemented"),
        ({"do_rescale": False}, NotImplementedError, "do_rescale"),
        ({"image_processor_type": "Gemma3ImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"crop": 3}, NotImplementedError, "the field 'crop' is not implemented"),
        ({"pooling_kernel_size": 0}, ValueError, "pooling_kernel_size"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        Gemma4ImageProcessor.from_dict(SMALL | settings, "x.json")


def test_the_tower_limits_the_shape():
    config = {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 40}}
    ours = Gemma4ImageProcessor.from_dict(SMALL).for_model(config)
    with pytest.raises(MediaError, match="1 x 90 pixels is too long and thin: it has 140 patches on a side"):
        ours.layout(draw(1, 90))
    with pytest.raises(ValueError, match="patch_size = 4 contradicts the processor's settings, which have 16"):
        Gemma4ImageProcessor.from_dict(SETTINGS).for_model(config)


def test_sound_of_the_12b_has_the_bits_of_the_oracle():
    from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

    reference = Gemma4UnifiedAudioFeatureExtractor(feature_size=640)
    ours = Gemma4UnifiedAudioProcessor.from_dict(reference.to_dict())
    clips = [np.random.default_rng(length).standard_normal(length).astype(np.float32) for length in (1, 640, 641, 5000)]
    found = ours.arrays([ours.prepare(clip) for clip in clips])
    expected = reference(clips, return_tensors="np")
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(array, expected[name], name)
    assert [ours.layout(clip).num_tokens for clip in clips] == [1, 1, 2, 8]
    assert ours.layout(clips[2]).text == "<|audio><|audio|><|audio|><audio|>"
    with pytest.raises(MediaError, match="the sound needs 8 tokens; at most 7 are allowed"):
        ours.prepare(clips[3], 7)
    with pytest.raises(ValueError, match="audio_embed_dim = 320 contradicts"):
        ours.check_tower({"audio_embed_dim": 320})
    with pytest.raises(NotImplementedError, match="x.json: sampling_rate = 8000"):
        Gemma4UnifiedAudioProcessor.from_dict({"sampling_rate": 8000}, "x.json")


def test_sound_of_the_small_sizes_has_the_bits_of_the_oracle():
    """Each clip alone: with others, transformers fills it with silence up to the longest."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    for fields in ({}, {"feature_size": 64, "mel_floor": 0.01}):
        reference = Gemma4AudioFeatureExtractor(**fields)
        ours = Gemma4AudioProcessor.from_dict(json.loads(reference.to_json_string()))
        for length in (161, 320, 321, 5000, 16000, 40001):
            clip = np.random.default_rng(length).standard_normal(length).astype(np.float32)
            found, expected = ours.arrays([ours.prepare(clip)]), reference([clip], return_tensors="np")
            mask = expected["input_features_mask"][0]
            np.testing.assert_array_equal(found["input_features"][0], expected["input_features"][0][mask])
            assert found["input_features"].dtype == np.float32
            assert ours.layout(clip).num_tokens == mask[::2][::2].sum()
    for length, problem in ((160, "at least 161 are needed"), (480001, "30.0 s; at most 30 s are taken")):
        with pytest.raises(MediaError, match=problem):
            ours.layout(np.zeros(length, np.float32))
    with pytest.raises(ValueError, match="needs 128 bands, but the processor's settings have 64"):
        ours.check_tower({"subsampling_conv_channels": [128, 32]})
    with pytest.raises(NotImplementedError, match="x.json: preemphasis = 0.9"):
        Gemma4AudioProcessor.from_dict({"preemphasis": 0.9}, "x.json")


# -- whole models ------------------------------------------------------------------------------------------------------


def save_chatting(path: Path, name: str):
    """Saves a tiny model with a tokenizer, a template and settings. Returns the model in transformers, and a function
    that makes its inputs."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), extra_special_tokens=SPECIAL, bos_token="<|bos|>",
        eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    settings = UNIFIED if name == "12b" else SMALL
    (path / "processor_config.json").write_text(
        json.dumps({"image_processor": settings, "feature_extractor": SOUND.get(name)})
    )
    number = tokenizer.convert_tokens_to_ids(TOKEN)
    size = {"vocab_size": 2060} | ({} if name == "12b" else {"vocab_size_per_layer_input": 2060})
    oracle = save_gemma4(
        path,
        name,
        text=size,
        ids={"image_token_id": number, "audio_token_id": tokenizer.convert_tokens_to_ids("<|audio|>")},
    )
    ours = (Gemma4UnifiedImageProcessor if name == "12b" else Gemma4ImageProcessor).from_dict(settings)

    def inputs(text: str, images: list) -> dict[str, torch.Tensor]:
        pieces, given = text.split(TOKEN), {}
        if images:
            given = arrays(ours, *images) if name == "12b" else dict(Gemma4ImageProcessorPil(**settings)(images))
            counts = given.pop("num_soft_tokens_per_image", None)
            counts = counts or [ours.layout(image).num_tokens for image in images]
            given = {key: torch.as_tensor(np.asarray(array)) for key, array in given.items()}
            text = pieces[0] + "".join(BEGIN + TOKEN * n + END + piece for n, piece in zip(counts, pieces[1:]))
        ids = tokenizer(text, return_tensors="pt")
        return {**ids, **given, "mm_token_type_ids": (ids["input_ids"] == number).int()}

    return oracle, inputs


@pytest.fixture(
    scope="module",
    params=["26b", pytest.param("e2b", marks=pytest.mark.thorough), pytest.param("12b", marks=pytest.mark.thorough)],
)
def chatting(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatting")
    oracle, inputs = save_chatting(folder, request.param)
    with LLMModel(str(folder), dtype="float32", progress=False, weights_cache=False) as model:
        yield oracle, inputs, model


def greedy(oracle, given, num_tokens: int) -> list[int]:
    given = {name: value for name, value in given.items() if name != "token_type_ids"}
    with torch.no_grad():
        found = oracle.generate(**given, max_new_tokens=num_tokens, do_sample=False)
    return found[0, given["input_ids"].shape[1] :].tolist()


def test_prompts_with_images(chatting):
    oracle, inputs, model = chatting
    images = [draw(30, 20), draw(17, 60), draw(24, 24)]
    prompts = [
        ("<|image|> What?", images[:1]),
        ("One:\n\n<|image|>\nTwo: <|image|><|image|>", images),
        ("no image\n\n", []),
    ]
    given = [{"prompt": prompt, "images": own} if own else prompt for prompt, own in prompts]
    output = model.generate(given, max_new_tokens=24, ignore_eos=True)
    for (prompt, own), found in zip(prompts, output.generated_token_ids):
        seen = inputs(prompt, own)
        (prepared,) = model.generator.prepare_for_generate({"prompt": prompt, "images": own} if own else prompt).prompts
        assert prepared.tokens == seen["input_ids"][0].tolist(), prompt
        assert found == greedy(oracle, seen, 24), prompt
        assert model.generate(**seen, max_new_tokens=24, ignore_eos=True).generated_token_ids == [found]


def test_chat(chatting):
    oracle, inputs, model = chatting
    image = draw(50, 33)
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it? "}]}
    ]
    seen = inputs("<|user|><|image|>What is it?<|end|><|assistant|>", [image])
    output = model.chat(messages, max_new_tokens=16, do_sample=False, ignore_eos=True, logprobs=0)
    assert output.metrics.num_prompt_tokens in (seen["input_ids"].shape[1], seen["input_ids"].shape[1] + 1)
    with pytest.raises(ValueError, match="placeholder"):
        model.generate({"prompt": "typed <|image|><|image|>", "images": [image]}, max_new_tokens=1)


def test_prompts_with_sound(chatting):
    model = chatting[2]
    audio = model.generator.encoder.processors.get("audio")
    if audio is None:
        with pytest.raises(ValueError, match="takes no sound"):
            model.generate({"prompt": "<|audio|>", "audio": [np.zeros(5000, np.float32)]}, max_new_tokens=1)
        return
    clip, image = np.random.default_rng(3).standard_normal(4000).astype(np.float32), draw(30, 20)
    prompt = {"prompt": "<|audio|> and <|image|>?", "audio": [clip], "images": [image]}
    output = model.generate(prompt, max_new_tokens=8, ignore_eos=True)
    (prepared,) = model.generator.prepare_for_generate(prompt).prompts
    arrays = model.processor(images=[image], audio=[clip])
    again = model.generate(
        input_ids=torch.tensor([prepared.tokens]), **arrays, max_new_tokens=8, ignore_eos=True
    ).generated_token_ids  # fmt: skip
    assert again == output.generated_token_ids


def test_settings_are_read_as_transformers_saves_them(tmp_path):
    Gemma4ImageProcessorPil(**SMALL).save_pretrained(tmp_path)
    config = {"architectures": ["Gemma4ForConditionalGeneration"]}
    assert load_processors(tmp_path, config).image == Gemma4ImageProcessor.from_dict(SMALL)
