"""Placeholders in prompts are expanded, found again, and never shifted; the processors of a model give arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pace.llm.processors.processor import Processors, find_runs
from pace.llm.processors.qwen_vl import QwenImageProcessor
from pace.media.media import Layout
from tests.media.samples import draw

PAD, CLIP = "<|image_pad|>", "<|audio_pad|>"
IDS = {"image": 3, "audio": 7}


class Clips:
    """Processor of sound that only has its names."""

    kind, token, marker, placeholder = "audio", CLIP, CLIP, f"<|audio_start|>{CLIP}<|audio_end|>"


@dataclass(eq=False)
class Sized:
    """A medium without features."""

    kind: str
    layout: Layout

    num_tokens = property(lambda self: self.layout.num_tokens)
    runs = property(lambda self: self.layout.runs)


def medium(kind: str, *runs: int, between: str = "") -> Sized:
    token = {"image": PAD, "audio": CLIP}[kind]
    return Sized(kind, Layout(between.join(token * run for run in runs), runs))


@pytest.fixture
def processors() -> Processors:
    return Processors(QwenImageProcessor(), Clips())


def encode(text: str) -> list[int]:
    """Token ids of a text: one for each special token and for each other character."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<a>", "<b>", PAD, "<c>", "<d>", "<e>", CLIP])
    return tokenizer.encode(text).ids


def test_each_placeholder_gets_its_tokens_and_is_found_again(processors):
    media = [medium("image", 3), medium("image", 1), medium("audio", 2), medium("image", 4)]
    text = processors.expand(f"a {PAD}{PAD} b {CLIP}\n<|vision_start|>{PAD}<|vision_end|>", media)
    assert text == f"a {PAD * 3}{PAD} b {CLIP * 2}\n<|vision_start|>{PAD * 4}<|vision_end|>"
    tokens = encode(text)
    found = processors.locate(tokens, media, IDS)
    assert [run.medium for run in found] == media
    for run in found:
        assert set(tokens[run.start : run.start + run.length]) == {IDS[run.medium.kind]}
    assert [run.start for run in found] == [2, 5, 9, 28]
    assert processors.expand("no media", []) == "no media" and processors.locate([0, 1], [], IDS) == []


def test_an_image_may_have_other_text_between_its_rows(processors):
    media = [medium("image", 2, 1, between="-"), medium("image", 3, 3, between="<c>")]
    text = processors.expand(f"{PAD}{PAD}.", media)
    assert text == f"{PAD}{PAD}-{PAD}{PAD * 3}<c>{PAD * 3}."
    found = processors.locate(encode(text), media, IDS)
    assert [(run.start, run.medium, run.first, run.length) for run in found] == [
        (0, media[0], 0, 2),
        (3, media[0], 2, 1),
        (4, media[1], 0, 3),
        (8, media[1], 3, 3),
    ]
    with pytest.raises(ValueError, match=re.escape("image 0 needs 2 tokens")):
        processors.locate([3, 0, 3, 3], [medium("image", 2, 1)], IDS)


def test_the_runs_of_an_image_are_in_one_prompt():
    two = medium("image", 2, 1)
    assert [len(row) for row in find_runs([[3, 3, 0, 3], [0]], [two], 3, "image")] == [2, 0]
    with pytest.raises(ValueError, match="others between them"):
        find_runs([[3, 3], [3]], [two], 3, "image")


@pytest.mark.parametrize(
    ("text", "num_images", "message"),
    [
        ("no place", 1, f"0 placeholders {PAD} for 1 image;"),
        (f"{PAD} and {PAD}", 1, f"2 placeholders {PAD} for 1 image;"),
        (f"a user typed {PAD}", 0, f"1 placeholder {PAD} for 0 images;"),
        (f"{PAD}", 2, f"1 placeholder {PAD} for 2 images;"),
    ],
)
def test_a_text_with_other_counts_is_refused(processors, text, num_images, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        processors.expand(text, [medium("image", 5)] * num_images)


def test_a_kind_that_the_model_does_not_take_is_refused():
    for processors, kind, name in (
        (Processors(), "image", "images"),
        (Processors(QwenImageProcessor()), "audio", "sound"),
    ):
        with pytest.raises(ValueError, match=f"this model takes no {name}"):
            processors.expand("", [medium(kind, 1)])


def test_tokens_with_other_counts_are_refused(processors):
    for tokens, message in (
        ([0, 3, 3, 0], f"has 2 tokens {PAD}, but 1 image must have 3"),
        ([3] * 4, f"has 4 tokens {PAD}, but 1 image must have 3"),
        ([0], f"has 0 tokens {PAD}, but 1 image must have 3"),
        (
            [3, 3, 0, 3],
            f"image 0 needs 3 tokens {PAD} in a row; those from token 0 of prompt 0 on have others between them",
        ),
        ([3, 3, 3, 7], f"has 1 token {CLIP}, but 0 clips must have 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            processors.locate(tokens, [medium("image", 3)], IDS)


def test_the_processors_of_a_model_give_the_arrays_of_transformers():
    processors = Processors(QwenImageProcessor())
    images = [draw(60, 90), draw(30, 30)]
    reference = Qwen2VLImageProcessorPil()(images, return_tensors="np")
    arrays = processors(images=images)
    assert arrays.keys() == reference.keys()
    assert all(np.array_equal(arrays[name], reference[name]) for name in arrays)
    assert np.array_equal(processors(images=images[1])["image_grid_thw"], [[1, 4, 4]])
    for kwargs, message in (
        ({}, "needs images="),
        ({"images": []}, "images is an empty list"),
        ({"audio": [b""]}, "this model takes no sound"),
    ):
        with pytest.raises(ValueError, match=message):
            processors(**kwargs)
    with pytest.raises(TypeError, match="an image is bytes"):
        processors(images=[None])


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("Gemma3", "Gemma3"), ("Gemma4", "Gemma4"), ("Idefics3", "Idefics3"), ("SmolVLM", "SmolVLM"),
     ("GotOcr2", "InternVL"), ("CLIP", "Llava"), ("Llava", "Llava"), ("Siglip", "Llava"), ("Pixtral", "Mistral3"),
     ("LlavaNext", "LlavaNext"), ("LlavaOnevision", "LlavaOnevision"),
     ("PaddleOCRVL", "PaddleOCRVL"), ("Qwen2VL", "Qwen3_5")],
)  # fmt: skip
def test_names_of_all_backends_of_transformers_are_read(kind, architecture):
    from pace.llm.processors.registry import IMAGE_PROCESSORS

    read = IMAGE_PROCESSORS[f"{architecture}ForConditionalGeneration"].from_dict
    names = [f"{kind}ImageProcessor{backend}" for backend in ("", "Fast", "Pil")]
    assert read({"image_processor_type": names[0]}) == read({"image_processor_type": names[1]})
    assert read({"image_processor_type": names[0]}) == read({"image_processor_type": names[2]})
