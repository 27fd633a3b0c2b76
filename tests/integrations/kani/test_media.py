"""Images and sound in messages of kani. The model's answers to images are those of transformers."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("kani.ext.multimodal_core")

import torch
from kani import ChatMessage, Kani
from kani.ext.multimodal_core import AudioPart, ImagePart, VideoPart
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from pace.integrations.kani import PaceEngine
from pace.integrations.kani.messages import as_dict, media_of
from pace.llm import LLMModel
from pace.llm.processors.qwen_audio import Qwen3OmniAudioProcessor
from tests.llm.fake_media import wav
from tests.llm.models.towers.seeing import IMAGE, MERGE
from tests.llm.processors.chatting import (
    ANSWER,
    PLACEHOLDER,
    QUESTION,
    TOKEN,
    picture,
    question,
    save_chatting,
    save_omni_chatting,
)
from tests.media.drawn import clips, pictures

GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
LOAD = {"dtype": "float32", "kv_cache_bytes": "16MiB", "progress": False, "weights_cache": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder of a tiny model that takes images, and the model in transformers."""
    folder = tmp_path_factory.mktemp("seeing")
    return folder, save_chatting(folder)


@pytest.fixture(scope="module")
def seeing(checkpoint):
    with LLMModel(str(checkpoint[0]), **LOAD) as model:
        yield model


@pytest.fixture
def engine(seeing):
    return PaceEngine(model=seeing)


def part(width: int, height: int, seed: int) -> ImagePart:
    """An image of a file whose pixels are not read yet."""
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return ImagePart.from_bytes(file.getvalue())


def expected(checkpoint, model, prompt: str, *images: Image.Image) -> str:
    """The text that transformers generates after `prompt`, whose placeholders are expanded here."""
    arrays = model.processor(images=list(images))
    first, *rest = prompt.split(TOKEN)
    counts = [int(grid.prod()) // MERGE**2 for grid in arrays["image_grid_thw"]]
    text = first + "".join(TOKEN * count + piece for count, piece in zip(counts, rest, strict=True))
    ids = torch.tensor([model.tokenizer(text)["input_ids"]])
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    with torch.no_grad():
        found = checkpoint[1].generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=None)
    return model.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).strip()


def turn(content: str) -> str:
    return f"<|im_start|>user {content}<|im_end|><|im_start|>assistant "


def test_a_chat_about_images(checkpoint, seeing, engine, run):
    """Two images of one question, and both again in the next round, which kani's history keeps."""
    images = picture(20, 33, 1), picture(60, 9, 2)
    ai = Kani(engine)
    answer = run(ai.chat_round(["w3 ", part(20, 33, 1), " w4 ", part(60, 9, 2), " w5"], **GREEDY))
    first = turn(f"w3 {PLACEHOLDER} w4 {PLACEHOLDER} w5")
    assert answer.text == expected(checkpoint, seeing, first, *images)
    assert answer.extra["pace"]["prompt_tokens"] == engine.prompt_len(ai.chat_history[:1])
    again = run(ai.chat_round("w9", **GREEDY))
    both = f"{first}{answer.text}<|im_end|>{turn('w9')}"
    assert again.text == expected(checkpoint, seeing, both, *images)


def test_streams_and_beams(checkpoint, seeing, engine, run):
    """A stream gives the text of transformers. A beam search reads the same prompt."""
    asked = [ChatMessage.user([part(40, 40, 3), "w7"])]

    async def stream():
        return [piece async for piece in engine.stream(asked, **GREEDY)]

    *pieces, completion = run(stream())
    assert "".join(pieces).strip() == completion.message.text
    assert completion.message.text == expected(checkpoint, seeing, turn(PLACEHOLDER + "w7"), picture(40, 40, 3))
    beams = run(engine.predict(asked, num_beams=2, **GREEDY))
    assert beams.prompt_tokens == completion.prompt_tokens == engine.prompt_len(asked)


@clips
def test_drawn_pictures_and_a_clip(tmp_path, run, clip):
    """The answer is that of `LLMModel.chat`, and the rows are those of its media. kani opens a file as a PIL image,
    which no EXIF turns."""
    save_omni_chatting(tmp_path)
    with LLMModel(str(tmp_path), **LOAD) as model:
        photo = Image.open(io.BytesIO(pictures()["photo.jpg"]))
        answer = model.chat(question(clip(), photo=photo), **ANSWER).text
        num_encoded = model.generator.engine.media.num_encoded
        parts = [ImagePart.from_bytes(data) for data in pictures().values()]
        parts += [AudioPart.from_file(io.BytesIO(clip()), format="wav"), QUESTION]
        ai = Kani(PaceEngine(model=model, max_tokens=12, temperature=0))
        assert run(ai.chat_round(parts)).text == answer.strip()
        assert model.generator.engine.media.num_encoded == num_encoded == len(pictures()) + 1


def test_counting_decodes_nothing(engine, monkeypatch):
    message = ChatMessage.user([part(48, 40, 5), "w1"])
    monkeypatch.setattr(Image.Image, "load", None)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    short = engine.prompt_len([ChatMessage.user("w1")])
    num_rows = 2 + 48 * 40 // 64  # the delimiters, and a token for 8 x 8 pixels
    assert engine.prompt_len([message]) == short + num_rows
    assert engine.prompt_len([message, message]) > 2 * num_rows


def test_pixels_outlive_their_message(checkpoint, seeing, engine):
    """kani closes an image when its message is collected."""
    message = ChatMessage.user(["w2 ", ImagePart(image=picture(24, 24, 6)), part(30, 20, 7)])
    prompt = engine.build_prompt([message])
    given = message.parts[1].image, message.parts[2].image
    del message
    gc.collect()
    for image in given:
        with pytest.raises(ValueError):
            image.getpixel((0, 0))
    output = seeing.generate(prompt, max_new_tokens=12, do_sample=False, ignore_eos=True)
    assert prompt["prompt"] == turn(f"w2 {PLACEHOLDER}{PLACEHOLDER}")
    assert output.texts[0].strip() == expected(
        checkpoint, seeing, prompt["prompt"], picture(24, 24, 6), picture(30, 20, 7)
    )


def test_an_image_of_several_chats(engine, run):
    """Pillow reads a file on first use, which two threads must not do at once."""
    shared = part(64, 64, 8)
    asked = [ChatMessage.user([shared, "w1"])]

    async def all_at_once():
        return await asyncio.gather(*[engine.predict(asked, **GREEDY) for _ in range(8)])

    assert len({completion.message.text for completion in run(all_at_once())}) == 1


def test_prompts_of_others(checkpoint, seeing, run):
    """A pipeline's text has placeholders of its own; a subclass may return what a processor makes."""
    asked = [ChatMessage.user([part(20, 20, 9), "w4"])]
    text = turn(PLACEHOLDER + " w4")
    same = expected(checkpoint, seeing, text, picture(20, 20, 9))
    engine = PaceEngine(model=seeing, prompt_pipeline=lambda messages, functions: text)
    completion = run(engine.predict(asked, **GREEDY))
    assert completion.message.text == same and completion.prompt_tokens == engine.prompt_len(asked)

    class Own(PaceEngine):
        def build_prompt(self, messages, functions=None):
            arrays = seeing.processor(images=[picture(20, 20, 9)])
            text = turn(PLACEHOLDER.replace(TOKEN, TOKEN * (int(arrays["image_grid_thw"].prod()) // 4)) + " w4")
            ids = torch.tensor([self.tokenizer(text)["input_ids"]])
            return {"input_ids": ids, **{name: torch.from_numpy(array) for name, array in arrays.items()}}

    assert run(Own(model=seeing).predict(asked, **GREEDY)).message.text == same


def test_media_that_are_refused(make_engine, engine, run):
    video = VideoPart.from_bytes(b"not read", mime="video/mp4")
    image, damaged = part(16, 16, 1), ImagePart(image=Image.open(io.BytesIO(cut_png())))
    for ask in (engine.prompt_len, lambda messages: run(engine.predict(messages))):
        with pytest.raises(NotImplementedError, match="a message holds VideoPart"):
            ask([ChatMessage.user([video, "w1"])])
        with pytest.raises(ValueError, match=r"messages\[0\].content\[0\]: this model takes no sound"):
            ask([ChatMessage.user([AudioPart(raw=bytes(3200), sample_rate=16000), "w1"])])
        with pytest.raises(ValueError, match="only messages of the user and of tools"):
            ask([ChatMessage.system([image]), ChatMessage.user("w1")])
        with pytest.raises(ValueError, match="has 1 placeholder"):
            ask([ChatMessage.user(f"typed {TOKEN}")])
    with pytest.raises(ValueError, match="damaged or incomplete|its file is damaged"):
        run(engine.predict([ChatMessage.user([damaged])]))
    for_text = make_engine()
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\]: this model takes no images"):
        run(for_text.predict([ChatMessage.user([image, "What is this?"])]))
    with pytest.raises(ValueError, match="not find a valid prompt"):  # kani logs the engine's message
        run(Kani(for_text).chat_round([image, "What is this?"]))


def cut_png() -> bytes:
    file = io.BytesIO()
    picture(200, 200).save(file, "PNG")
    return file.getvalue()[:4000]


def test_sound_is_given_at_its_own_rate():
    """The model's processor resamples it. The samples are those of the WAV file."""
    processor = Qwen3OmniAudioProcessor.from_dict(
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    )
    for rate in (8000, 16000, 44100):
        data = wav(0.5, rate)
        noise = np.random.default_rng(rate).integers(-9000, 9000, (len(data) - 44) // 2, np.int16).tobytes()
        clip = AudioPart.from_file(io.BytesIO(data[:44] + noise), format="wav")
        message = ChatMessage.user(["w1", clip, "w2"])
        text, sound, _ = as_dict(message, None)["content"]
        assert (text, sound["type"], sound["audio"][1]) == ({"type": "text", "text": "w1"}, "audio", rate)
        (given,) = media_of([message])["audio"]
        assert np.array_equal(processor.prepare(given).features, processor.prepare(data[:44] + noise).features)


def test_arguments_of_kanis_own_engine(checkpoint, caplog, recwarn):
    """A call for kani's engine for transformers works here, and says what has no effect."""
    engine = PaceEngine(
        str(checkpoint[0]),
        model_load_kwargs=LOAD | {"attn_implementation": "sdpa", "device_map": "auto"},
        model_cls=AutoModelForImageTextToText,
        tokenizer_cls=AutoProcessor,
        mm_audio_sample_rate=16000,
        audio_sample_rate=16000,
        audio_sr=16000,
        mm_video_fps=None,
        eos_token_id=[95],
        max_tokens=3,
    )
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    for name in ("model_cls", "tokenizer_cls=AutoProcessor", "mm_audio_sample_rate", "audio_sample_rate", "audio_sr"):
        assert sum(message.startswith(f"{name} has no effect: pace ") for message in told) == 1, told
    assert not any("mm_video_fps" in message for message in told)
    assert not [warning for warning in recwarn if "hyperparameter" in str(warning.message)]
    assert engine.hyperparams == {"eos_token_id": [95], "max_tokens": 3}
    asyncio.run(engine.close())


def test_the_example(checkpoint, tmp_path, monkeypatch, capsys):
    picture(40, 24, 4).save(tmp_path / "cat.png")
    example = Path(__file__).parents[3] / "examples/pace_llm_kani_media.py"
    arguments = ["--model", str(checkpoint[0]), "--max-tokens", "5", str(tmp_path / "cat.png"), "w1 w2"]
    monkeypatch.setattr(sys, "argv", [example.name, *arguments])
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("w") and f"[{4 + 5 + 15} tokens of prompt" in lines[1] and len(lines) == 3
