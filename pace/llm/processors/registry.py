"""Which processors a checkpoint needs, by its architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pace.llm.processors.gemma3 import Gemma3ImageProcessor
from pace.llm.processors.gemma4 import Gemma4ImageProcessor, Gemma4UnifiedImageProcessor
from pace.llm.processors.idefics3 import Idefics3ImageProcessor
from pace.llm.processors.image_processor import ImageProcessor
from pace.llm.processors.internvl import InternVLImageProcessor
from pace.llm.processors.lfm2_vl import Lfm2VlImageProcessor
from pace.llm.processors.llava import LlavaImageProcessor
from pace.llm.processors.paddleocr_vl import PaddleOCRVLImageProcessor
from pace.llm.processors.pixtral import PixtralImageProcessor
from pace.llm.processors.processor import Processors
from pace.llm.processors.qwen_audio import Qwen3ASRAudioProcessor, Qwen3OmniAudioProcessor
from pace.llm.processors.qwen_vl import QwenImageProcessor
from pace.llm.processors.settings import read_section

IMAGE_PROCESSORS: dict[str, type[ImageProcessor]] = {
    "Gemma3ForConditionalGeneration": Gemma3ImageProcessor,
    "Idefics3ForConditionalGeneration": Idefics3ImageProcessor,
    "InternVLForConditionalGeneration": InternVLImageProcessor,
    "Lfm2VlForConditionalGeneration": Lfm2VlImageProcessor,
    "LlavaForConditionalGeneration": LlavaImageProcessor,
    "Mistral3ForConditionalGeneration": PixtralImageProcessor,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRVLImageProcessor,
    "Gemma4ForConditionalGeneration": Gemma4ImageProcessor,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedImageProcessor,
    "Qwen2VLForConditionalGeneration": QwenImageProcessor,
    "Qwen2_5_VLForConditionalGeneration": QwenImageProcessor,
    "Qwen3_5ForConditionalGeneration": QwenImageProcessor,
    "Qwen3_5MoeForConditionalGeneration": QwenImageProcessor,
    "Qwen3VLForConditionalGeneration": QwenImageProcessor,
    "Qwen3VLMoeForConditionalGeneration": QwenImageProcessor,
    "Qwen3OmniMoeForConditionalGeneration": QwenImageProcessor,
    "Qwen3OmniMoeThinkerForConditionalGeneration": QwenImageProcessor,
    "SmolVLMForConditionalGeneration": Idefics3ImageProcessor,
}
"""Architecture -> processor of images."""

AUDIO_PROCESSORS: dict[str, type[Qwen3OmniAudioProcessor]] = {
    "Qwen3ASRForConditionalGeneration": Qwen3ASRAudioProcessor,
    "Qwen3OmniMoeForConditionalGeneration": Qwen3OmniAudioProcessor,
    "Qwen3OmniMoeThinkerForConditionalGeneration": Qwen3OmniAudioProcessor,
}
"""Architecture -> processor of sound."""


def load_processors(directory: Path, config: dict[str, Any]) -> Processors:
    """The processors of a checkpoint. `config` is its config.json.

    Raises ValueError or NotImplementedError that names the file and field, and FileNotFoundError if a file is missing.
    """
    return make_processors((config.get("architectures") or [""])[0], config, partial(read_section, directory))


def make_processors(
    architecture: str, config: dict[str, Any], read: Callable[[str], tuple[dict[str, Any], str]]
) -> Processors:
    """The processors of an architecture. `read` returns the settings of a section, as `read_section`. Raises as
    `load_processors`."""
    of_towers = config.get("thinker_config", config)
    image = audio = None
    if architecture in IMAGE_PROCESSORS:
        image = IMAGE_PROCESSORS[architecture].from_dict(*read("image_processor")).for_model(of_towers)
    if architecture in AUDIO_PROCESSORS:
        audio = AUDIO_PROCESSORS[architecture].from_dict(*read("feature_extractor"))
        audio.check_tower(of_towers.get("audio_config"))
    return Processors(image, audio)
