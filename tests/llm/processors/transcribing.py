"""A tiny random Qwen3-ASR, whole, that answers a clip with a language, the marker, words, and an end."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pace.llm import LLMModel
from pace.llm.processors.transcription import MARKER, transcription_prompt
from tests.llm.models.towers.hearing import CLIP, MELS, save_hearing
from tests.llm.processors.chatting import save_tokenizer
from tests.media.wavs import speech, wav

SPECIAL = {
    CLIP: "<|audio_pad|>", 91: "<|audio_start|>", 92: "<|audio_end|>", 93: "<|im_start|>", 94: "<|im_end|>"
}  # fmt: skip
SETTINGS = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": MELS}
SOUND = wav(speech(1.3), number=3, bits=32)
"""A clip of 17 tokens."""
NUM_WORDS = 6
"""Words of the answer at least."""


def save_transcribing(path: Path) -> tuple[torch.nn.Module, list[int]]:
    """Saves the checkpoint. Returns the model in transformers, and the tokens of its answer about SOUND.

    What a random model says is random, so the tokens of its first answer get the names of a transcript."""
    oracle = save_hearing(path)
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    save_tokenizer(path, SPECIAL)
    with LLMModel(path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        prompt = {"prompt": transcription_prompt(), "audio": [SOUND]}
        said = model.generate(prompt, max_new_tokens=60, do_sample=False, ignore_eos=True).generated_token_ids[0]
    end = next(at for at in range(NUM_WORDS + 3, len(said)) if said[at] not in said[:at])
    assert len(set(said[:3])) == 3 and not set(said[:3]) & set(said[3:end])
    save_tokenizer(path, SPECIAL | dict(zip(said, ["language", "English", MARKER])) | {said[end]: "<|endoftext|>"})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": said[end]}))
    return oracle, said[: end + 1]
