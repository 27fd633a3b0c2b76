"""A small random Qwen3-Omni from its files to answers about images and sound in one prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

import torch

from pace.llm import LLMModel
from tests.llm.models.towers.hearing import MELS
from tests.llm.models.towers.omni import CLIP, IMAGE, IMAGE_END, IMAGE_START, SOUND_END, SOUND_START, save_omni
from tests.llm.models.towers.seeing import MERGE, PATCH
from tests.llm.processors.chatting import picture, save_tokenizer
from tests.media.wavs import speech, wav

SPECIAL = {
    IMAGE: "<|image_pad|>", IMAGE_START: "<|vision_start|>", IMAGE_END: "<|vision_end|>", CLIP: "<|audio_pad|>",
    SOUND_START: "<|audio_start|>", SOUND_END: "<|audio_end|>", 97: "<|im_start|>", 98: "<|im_end|>",
}  # fmt: skip
SETTINGS = {
    "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS,
    "hop_length": 160, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "max_pixels": 4096, "merge_size": MERGE, "min_pixels": 64, "n_fft": 400,
    "n_samples": 4800000, "nb_max_frames": 30000, "padding_side": "left", "padding_value": 0.0, "patch_size": PATCH,
    "processor_class": "Qwen3OmniMoeProcessor", "return_attention_mask": True, "sampling_rate": 16000,
    "temporal_patch_size": 2,
}  # fmt: skip
"""Settings of images and sound in one file, as published."""
SEES, HEARS = "<|vision_start|><|image_pad|><|vision_end|>", "<|audio_start|><|audio_pad|><|audio_end|>"


def test_prompts_with_images_and_sound(tmp_path):
    thinker = save_omni(tmp_path)
    save_tokenizer(tmp_path, SPECIAL)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    image, clips = picture(33, 50, 4), [speech(1.3), speech(2.0, seed=1)]
    prompt = {
        "prompt": f"w3 {HEARS} w4 {SEES} w5 {HEARS}",
        "images": [image],
        "audio": [clips[0], wav(clips[1], number=3, bits=32)],
    }
    with LLMModel(tmp_path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        alone = model.generate(prompt, max_new_tokens=16, ignore_eos=True).generated_token_ids
        batch = model.generate(["w1 w2", prompt], max_new_tokens=16, ignore_eos=True).generated_token_ids
        arrays = model.processor(images=[image], audio=clips)
        num_rows = int(np.prod(arrays["image_grid_thw"])) // MERGE**2
        text = f"w3 {HEARS} w4 {SEES.replace('<|image_pad|>', '<|image_pad|>' * num_rows)} w5 {HEARS}"
        first, second, last = text.split("<|audio_pad|>")
        tokens = [13 + 4, 26]  # 1.3 and 2 seconds
        text = first + "<|audio_pad|>" * tokens[0] + second + "<|audio_pad|>" * tokens[1] + last
        ids = torch.tensor([model.tokenizer(text)["input_ids"]])
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            found = thinker.generate(**given, max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert alone == [found[0, ids.shape[1] :].tolist()] and batch[1] == alone[0]
        assert model.generate(**given, max_new_tokens=16, ignore_eos=True).generated_token_ids == alone
        with pytest.raises(ValueError, match="audio"):
            model.generate({**prompt, "audio": clips[:1]}, max_new_tokens=1)
