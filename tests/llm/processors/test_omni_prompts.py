"""A small random Qwen3-Omni from its files to answers about images and sound in one prompt."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

import torch
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pace.llm import LLMModel
from tests.llm.models.towers.omni import CLIP
from tests.llm.models.towers.seeing import MERGE
from tests.llm.processors.chatting import (
    ANSWER,
    OMNI_SETTINGS,
    PLACEHOLDER,
    QUESTION,
    SOUND_PLACEHOLDER,
    SOUND_TOKEN,
    TOKEN,
    picture,
    question,
    save_omni_chatting,
)
from tests.media.drawn import clips, pictures
from tests.media.wavs import speech, wav


@clips
def test_the_answer_about_drawn_pictures_and_a_clip(tmp_path, clip):
    """The answer that every entry must give is that of transformers, from its own patches of the pictures."""
    thinker = save_omni_chatting(tmp_path)
    images = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in pictures().values()]
    seen = Qwen2VLImageProcessorPil(**OMNI_SETTINGS)(images, return_tensors="np")
    with LLMModel(tmp_path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        answer = model.chat(question(clip()), **ANSWER).text
        arrays = model.processor(images=list(pictures().values()), audio=[clip()])
        for name, array in seen.items():
            assert np.array_equal(arrays[name], array), name
        counts = [int(grid.prod()) // MERGE**2 for grid in seen["image_grid_thw"]]
        heard = model.generator.encoder.processors["audio"].layout(clip()).num_tokens
        text = "".join(PLACEHOLDER.replace(TOKEN, TOKEN * count) for count in counts)
        text += SOUND_PLACEHOLDER.replace(SOUND_TOKEN, SOUND_TOKEN * heard) + QUESTION
        ids = torch.tensor([model.tokenizer(f"<|im_start|>user {text}<|im_end|><|im_start|>assistant ")["input_ids"]])
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert (ids == CLIP).sum() == heard
        with torch.no_grad():
            found = thinker.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert answer == model.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        assert len(set(answer.split())) > 2
        for name in ("shapes", "photo", "depth"):  # each of them counts, and so does its place
            assert model.chat(question(clip(), **{name: pictures()["star.webp"]}), **ANSWER).text != answer, name
        assert model.chat(question(), **ANSWER).text != answer


def test_prompts_with_images_and_sound(tmp_path):
    thinker = save_omni_chatting(tmp_path)
    image, clips = picture(33, 50, 4), [speech(1.3), speech(2.0, seed=1)]
    prompt = {
        "prompt": f"w3 {SOUND_PLACEHOLDER} w4 {PLACEHOLDER} w5 {SOUND_PLACEHOLDER}",
        "images": [image],
        "audio": [clips[0], wav(clips[1], number=3, bits=32)],
    }
    with LLMModel(tmp_path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        alone = model.generate(prompt, max_new_tokens=16, ignore_eos=True).generated_token_ids
        batch = model.generate(["w1 w2", prompt], max_new_tokens=16, ignore_eos=True).generated_token_ids
        arrays = model.processor(images=[image], audio=clips)
        num_rows = int(np.prod(arrays["image_grid_thw"])) // MERGE**2
        sees = PLACEHOLDER.replace(TOKEN, TOKEN * num_rows)
        hears = [SOUND_PLACEHOLDER.replace(SOUND_TOKEN, SOUND_TOKEN * count) for count in (13 + 4, 26)]  # 1.3 s and 2 s
        text = f"w3 {hears[0]} w4 {sees} w5 {hears[1]}"
        ids = torch.tensor([model.tokenizer(text)["input_ids"]])
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            found = thinker.generate(**given, max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert alone == [found[0, ids.shape[1] :].tolist()] and batch[1] == alone[0]
        assert model.generate(**given, max_new_tokens=16, ignore_eos=True).generated_token_ids == alone
        with pytest.raises(ValueError, match="audio"):
            model.generate({**prompt, "audio": clips[:1]}, max_new_tokens=1)
