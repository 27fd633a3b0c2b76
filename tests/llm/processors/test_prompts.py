"""Prompts with images and sound: tokens, places, limits, and texts whose placeholders do not match their media."""

from __future__ import annotations

import pytest

from pace.assets import TINY
from pace.llm.inputs import read_prompts
from pace.llm.processors.prompts import LOW_DETAIL_TOKENS, MediaPart, MediaPartError, PromptEncoder
from pace.tokenizer.loading import load_tokenizer
from tests.llm.fake_media import AUDIO, IMAGE, MediaGenerator, Picture, fake_processors, png, runs, wav


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def part(width=16, height=8, **fields):
    return MediaPart("image", png(width, height), where="images[0]", **fields)


def make(tokenizer, *kinds, **options):
    return PromptEncoder(fake_processors(*kinds or ("image", "audio")), tokenizer, **options)


def test_each_medium_has_its_tokens(tokenizer):
    encoder = make(tokenizer)
    text = f"A [{IMAGE}] and [{AUDIO}] and {IMAGE}{IMAGE}."
    parts = [part(16, 8), part(24, 24), MediaPart("audio", wav(0.5)), part(8, 8)]
    prompt = encoder.encode(text, parts, tokenizer)
    assert encoder.processors["image"].num_decoded == 0, "sizes come from headers"
    media = prompt.media
    assert runs(prompt.tokens, media) == [("image", 2), ("audio", 5), ("image", 9), ("image", 1)]
    expanded = f"A [{IMAGE * 2}] and [{AUDIO * 5}] and {IMAGE * 10}."
    assert prompt.tokens == tokenizer(expanded)["input_ids"]
    assert [span.media.digest for span in media] != [media[0].media.digest] * 4
    assert prompt.media[0].media is media[0].media and encoder.processors["image"].num_decoded == 3, "decoded once"


@pytest.mark.parametrize(
    ("limit", "detail", "tokens"),
    [(None, "auto", 900), (None, "high", 900), (None, "low", LOW_DETAIL_TOKENS), (1280, "low", LOW_DETAIL_TOKENS),
     (100, "low", 100), (100, "auto", 100), (100, "high", 100)],
)  # fmt: skip
def test_limits_of_tokens(tokenizer, limit, detail, tokens):
    prompt = make(tokenizer, max_image_tokens=limit).encode(IMAGE, [part(240, 240, detail=detail)], tokenizer)
    assert runs(prompt.tokens, prompt.media) == [("image", tokens)]


@pytest.mark.parametrize(("limit", "detail"), [(None, "low"), (1280, "low"), (None, "auto")])
def test_low_detail_allows_the_tokens_that_every_image_has(tokenizer, limit, detail):
    encoder = make(tokenizer, max_image_tokens=limit)
    encoder.processors["image"].least_tokens = 400
    prompt = encoder.encode(IMAGE, [part(160, 160, detail=detail)], tokenizer)
    assert runs(prompt.tokens, prompt.media) == [("image", 400)]


@pytest.mark.parametrize(
    ("text", "count"),
    [("none", 1), (f"{IMAGE} typed {IMAGE}", 1), (IMAGE, 0), (f"{IMAGE}{IMAGE}", 3), (f"{IMAGE} {AUDIO}", 1)],
)
def test_placeholders_that_do_not_match(tokenizer, text, count):
    with pytest.raises(ValueError, match="placeholder"):
        make(tokenizer).encode(text, [part()] * count, tokenizer)


def test_a_kind_that_is_not_taken(tokenizer):
    with pytest.raises(MediaPartError, match=r"images\[0\]: this model takes no images"):
        make(tokenizer, "audio").encode(IMAGE, [part()], tokenizer)
    limited = make(tokenizer, kinds=["audio"])
    with pytest.raises(MediaPartError, match="takes images, but it was started without them"):
        limited.encode(IMAGE, [part()], tokenizer)
    with pytest.raises(ValueError, match="placeholder"):
        limited.encode(f"typed {IMAGE}", [], tokenizer)
    assert list(limited.processors) == ["audio"]


def test_a_model_for_text_reads_every_text(tokenizer):
    prompt = PromptEncoder().encode(f"typed {IMAGE}", [], tokenizer)
    assert prompt.tokens == tokenizer(f"typed {IMAGE}")["input_ids"] and prompt.media == ()
    PromptEncoder().check_ids([0, 1, 2])
    with pytest.raises(MediaPartError, match="this model takes no images"):
        PromptEncoder().encode("x", [part()], tokenizer)


def test_errors_name_the_place(tokenizer):
    encoder = make(tokenizer)
    with pytest.raises(MediaPartError, match=r"^images\[0\]: it is not a whole PNG file$"):
        encoder.encode(IMAGE, [MediaPart("image", b"GIF", where="images[0]")], tokenizer)
    with pytest.raises(TypeError, match=r"^images\[0\]: .*got int"):
        encoder.encode(IMAGE, [MediaPart("image", 5, where="images[0]")], tokenizer)
    prompt = encoder.encode(IMAGE, [MediaPart("image", png() + b"broken", where="images[0]")], tokenizer)
    with pytest.raises(MediaPartError, match=r"^images\[0\]: it cannot be decoded$") as caught:
        _ = prompt.media
    assert caught.value.place == "images[0]"


def test_a_medium_that_changes(tokenizer, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(8, 8))
    prompt = make(tokenizer).encode(IMAGE, [MediaPart("image", path)], tokenizer)
    path.write_bytes(png(16, 8))
    with pytest.raises(MediaPartError, match="it has 2 tokens, and its header said 1"):
        _ = prompt.media


def test_a_tokenizer_without_the_placeholder(tokenizer):
    processors = fake_processors("image")
    processors.image.token = "<|image_pad|>"
    with pytest.raises(ValueError, match=r"the tokenizer has no token <\|image_pad\|>"):
        PromptEncoder(processors, tokenizer)


# -- inputs of generate ------------------------------------------------------------------------------------------------


def read(tokenizer, inputs):
    return read_prompts(inputs, tokenizer, 2048, encoder=make(tokenizer))


def test_prompts_with_media(tokenizer, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(8, 8))
    one = {"prompt": f"{IMAGE}{AUDIO}{IMAGE}", "images": [png(16, 8), path], "audio": [wav(0.2)]}
    for inputs in (one, [one]):
        prompts = read(tokenizer, inputs)
        assert runs(prompts.rows[0], prompts.media[0]) == [("image", 2), ("audio", 2), ("image", 1)]
    prompts = read(tokenizer, ["plain", {"prompt": IMAGE, "images": (Picture(40, 8),)}, {"prompt": "bare"}])
    assert [len(media) for media in prompts.media] == [0, 1, 0]
    assert prompts.rows[0] == tokenizer("plain")["input_ids"] and runs(prompts.rows[1], prompts.media[1]) == [
        ("image", 5)
    ]
    assert read(tokenizer, ["plain", "text"]).media is None


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [({"prompt": IMAGE, "pictures": []}, ValueError, r"inputs\[0\] holds pictures"),
     ({"prompt": [1, 2], "images": [png()]}, TypeError, r"inputs\[0\].prompt must be a text"),
     ({"prompt": IMAGE, "images": png()}, TypeError, r"inputs\[0\].images must be a list; got bytes"),
     (["x", {"prompt": IMAGE, "images": [5]}], TypeError, r"inputs\[1\].images\[0\]: "),
     ({"prompt": IMAGE}, ValueError, "1 placeholder .* for 0 images"),
     (IMAGE, ValueError, "1 placeholder .* for 0 images"), (["x", AUDIO], ValueError, "placeholder"),
     ([[1, 0, 5]], ValueError, "token id 0, a placeholder of images"), ([2], ValueError, "a placeholder of sound")],
)  # fmt: skip
def test_prompts_that_are_refused(tokenizer, inputs, error, match):
    with pytest.raises(error, match=match):
        read(tokenizer, inputs)


def test_media_reach_every_sequence():
    generator = MediaGenerator()
    prompt = {"prompt": f"{IMAGE} a fox", "images": [png(16, 16)]}
    generator.generate([prompt, "text"], max_new_tokens=2, num_return_sequences=2, do_sample=True)
    assert [len(media) for _, media in generator.seen] == [1, 1, 0, 0]
    assert generator.image.num_decoded == 1, "samples share the image"
    generator.add_request(prompt, max_new_tokens=1).result()
    assert "".join(generator.stream(prompt, max_new_tokens=3)) is not None
    assert all(runs(tokens, media) == [("image", 4)] for tokens, media in generator.seen if media)
    assert len([1 for _, media in generator.seen if media]) == 4
    with pytest.raises(ValueError, match="context|may have"):
        generator.generate({"prompt": IMAGE, "images": [png(800, 800)]})
    generator.driver.close()
