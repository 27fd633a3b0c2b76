"""Images of Gemma 3, bit for bit as `Gemma3ImageProcessorPil` of transformers prepares them, from files to answers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from pace.assets import TINY
from pace.llm import LLMModel
from pace.llm.processors.gemma3 import Gemma3ImageProcessor
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from tests.llm.models.towers.gemma.looking import TOKENS, VISION, save_looking
from tests.media.samples import draw, encode, files, modes
from tests.server.schemas.test_media import said, text

SETTINGS = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5], "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None, "processor_class": "Gemma3Processor", "resample": 2,
    "rescale_factor": 0.00392156862745098, "size": {"height": 896, "width": 896},
}  # fmt: skip
"""The published ones."""
SMALL = SETTINGS | {"size": {"height": 24, "width": 24}}
SPECIAL = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def arrays(ours, *images):
    return ours.arrays([ours.prepare(image) for image in images])["pixel_values"]


def reference(settings, *images):
    return np.stack(Gemma3ImageProcessorPil(**settings)(list(images), return_tensors="np")["pixel_values"])


def check(settings, *images):
    found, expected = arrays(Gemma3ImageProcessor.from_dict(settings), *images), reference(settings, *images)
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "changes",
    [{}, {"resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": 0.7}, {"rescale_factor": 0.01, "resample": 0}],
)
def test_images_have_the_bits_of_the_oracle(changes):
    sizes = [(24, 24), (1, 1), (1, 90), (300, 7), (23, 25), (200, 311)]
    check(SMALL | changes, *[draw(*size) for size in sizes])


def test_settings_that_are_left_out_have_the_defaults_of_the_oracle():
    check({}, draw(301, 200))


@pytest.mark.thorough
def test_images_of_the_published_size():
    check(SETTINGS, draw(896, 896), draw(640, 480), draw(31, 1700))


@pytest.mark.thorough
def test_modes_and_files():
    """The published `do_convert_rgb` is null, with which transformers refuses all modes but RGB."""
    ours, settings = Gemma3ImageProcessor.from_dict(SMALL), SMALL | {"do_convert_rgb": True}
    assert ours == Gemma3ImageProcessor.from_dict(settings)
    for name, image in modes().items():
        if name != "La":  # has no RGB form
            np.testing.assert_array_equal(arrays(ours, image), reference(settings, image), name)
    for name, data in files().items():
        if "extras" not in name:  # these are turned
            opened = PIL.Image.open(io.BytesIO(data))
            np.testing.assert_array_equal(arrays(ours, data), reference(settings, opened), name)


def test_the_tower_says_how_many_tokens_an_image_has():
    config = {"vision_config": VISION, "mm_tokens_per_image": TOKENS}
    ours = Gemma3ImageProcessor.from_dict(SMALL).for_model(config)
    media = ours.prepare(draw(30, 20))
    assert (media.num_tokens, media.grid, media.runs) == (TOKENS, (1, 6, 6), (TOKENS,))
    layout = ours.layout(encode(draw(30, 20), "PNG"), 256)
    assert layout.text == f"\n\n<start_of_image>{'<image_soft_token>' * TOKENS}<end_of_image>\n\n"
    assert layout.runs == (TOKENS,)
    for call in (ours.layout, ours.prepare):
        with pytest.raises(MediaError, match="an image of any size has 9 tokens in this model, but may only have 8"):
            call(draw(30, 20), 8)
        with pytest.raises(ValueError, match="max_tokens must be at least 1"):
            call(draw(30, 20), 0)
    with pytest.raises(ValueError, match="image_size = 24 contradicts the processor's settings, which have 896"):
        Gemma3ImageProcessor.from_dict(SETTINGS).for_model(config)


def test_digests_name_pixels_size_and_settings():
    ours, image = Gemma3ImageProcessor.from_dict(SMALL), draw(32, 48)
    digest = ours.prepare(image).digest
    assert ours.prepare(encode(image, "PNG")).digest == digest
    others = [ours.prepare(PIL.Image.frombytes("RGB", (48, 32), image.tobytes())), ours.prepare(draw(32, 48, 1))]
    others += [Gemma3ImageProcessor.from_dict(SMALL | {"resample": 3}).prepare(image)]
    assert len({digest, *(media.digest for media in others)}) == 4


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"do_pan_and_scan": True}, NotImplementedError, "x.json: do_pan_and_scan = True is not implemented"),
        ({"do_resize": False}, NotImplementedError, "do_resize"),
        ({"do_normalize": False}, NotImplementedError, "do_normalize"),
        ({"do_convert_rgb": False}, NotImplementedError, "do_convert_rgb"),
        ({"image_processor_type": "SiglipImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"crop": 3}, NotImplementedError, "the field 'crop' is not implemented"),
        ({"size": {"height": 24, "width": 20}}, ValueError, "size must be an object with equal height and width"),
        ({"size": {"shortest_edge": 24}}, ValueError, "size must be"),
        ({"size": {"height": 0, "width": 0}}, ValueError, "size must be"),
        ({"image_std": 0}, ValueError, "image_std"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        Gemma3ImageProcessor.from_dict(SMALL | settings, "x.json")


# -- whole models ------------------------------------------------------------------------------------------------------


def save_chatting(path: Path) -> tuple[torch.nn.Module, Gemma3Processor]:
    """Saves a tiny model with a tokenizer, a template and settings, as transformers does, and returns both."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), extra_special_tokens=SPECIAL, bos_token="<|bos|>",
        eos_token="<|end|>", pad_token="<|pad|>",
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(**SMALL)
    processor = Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=TOKENS)
    processor.save_pretrained(path)
    ids = {name.replace("_token", "_token_index"): tokenizer.convert_tokens_to_ids(SPECIAL[name]) for name in SPECIAL}
    return save_looking(path, text={"vocab_size": 2060}, **ids), processor


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatting")
    oracle, processor = save_chatting(folder)
    with LLMModel(str(folder), dtype="float32", progress=False, weights_cache=False) as model:
        yield oracle, processor, model, folder


def greedy(oracle, given, num_tokens: int) -> list[int]:
    with torch.no_grad():
        found = oracle.generate(**given, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    return found[0, given["input_ids"].shape[1] :].tolist()


def test_prompts_with_images(chatting):
    """The processor of transformers and pace give the same tokens, and greedy text; so do its own tensors."""
    oracle, processor, model, _ = chatting
    images = [draw(30, 20), draw(7, 60), draw(24, 24)]
    prompts = [
        ("<start_of_image> What?", images[:1]),
        ("One:\n\n<start_of_image>\nTwo: <start_of_image><start_of_image>", images),
        ("no image\n\n", []),
    ]
    given = [{"prompt": prompt, "images": own} if own else prompt for prompt, own in prompts]
    output = model.generate(given, max_new_tokens=10, ignore_eos=True)
    for (prompt, own), found in zip(prompts, output.generated_token_ids):
        seen = processor(text=prompt, images=own or None, return_tensors="pt")
        (prepared,) = model.generator.prepare_for_generate({"prompt": prompt, "images": own} if own else prompt).prompts
        assert prepared.tokens == seen["input_ids"][0].tolist(), prompt
        assert found == greedy(oracle, seen, 10), prompt
        seen.pop("num_crops", None)
        assert model.generate(**seen, max_new_tokens=10, ignore_eos=True).generated_token_ids == [found]
        if own:
            assert np.array_equal(model.processor(images=own)["pixel_values"], seen["pixel_values"].numpy())


def test_chat(chatting):
    oracle, processor, model, _ = chatting
    image = draw(50, 33)
    messages = said([{"type": "image", "image": image}, text("What is it? ")])
    seen = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    output = model.chat(messages, max_new_tokens=8, do_sample=False, ignore_eos=True, logprobs=0)
    assert [entry.token for entry in output.logprobs] == greedy(oracle, seen, 8)
    assert output.metrics.num_prompt_tokens == seen["input_ids"].shape[1]


def test_placeholders_that_a_user_types(chatting):
    model, image = chatting[2], draw(20, 20)
    for prompt, own in (
        ("<start_of_image><start_of_image>", [image]),
        ("typed <image_soft_token><start_of_image>", [image]),
        ("typed <image_soft_token>", []),
    ):
        with pytest.raises(ValueError, match="placeholder|images? must have"):
            model.generate({"prompt": prompt, "images": own} if own else prompt, max_new_tokens=1)


def test_settings_are_read_as_transformers_saves_them(chatting, tmp_path):
    folder = chatting[3]
    config = json.loads((folder / "config.json").read_text())
    saved = load_processors(folder, config).image
    assert saved == Gemma3ImageProcessor.from_dict(SMALL).for_model(config)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SMALL))
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 9, "processor_class": "Gemma3Processor"}')
    assert load_processors(tmp_path, config).image == saved
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SMALL | {"do_pan_and_scan": True}))
    with pytest.raises(NotImplementedError, match="preprocessor_config.json: do_pan_and_scan = True"):
        load_processors(tmp_path, config)
