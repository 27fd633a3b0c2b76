"""Which processors a checkpoint needs, by its architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pace.llm.models.model_list import find_family
from pace.llm.processors.gemma3 import Gemma3ImageProcessor
from pace.llm.processors.gemma4 import Gemma4ImageProcessor, Gemma4UnifiedImageProcessor
from pace.llm.processors.gemma4_audio import Gemma4AudioProcessor, Gemma4Sound, Gemma4UnifiedAudioProcessor
from pace.llm.processors.idefics3 import Idefics3ImageProcessor
from pace.llm.processors.image_processor import ImageProcessor
from pace.llm.processors.internvl import InternVLChatImageProcessor, InternVLImageProcessor
from pace.llm.processors.lfm2_vl import Lfm2VlImageProcessor
from pace.llm.processors.llava import LlavaImageProcessor
from pace.llm.processors.llava_next import LlavaNextImageProcessor, LlavaOnevisionImageProcessor
from pace.llm.processors.paddleocr_vl import PaddleOCRVLImageProcessor
from pace.llm.processors.pixtral import PixtralImageProcessor
from pace.llm.processors.processor import Processors
from pace.llm.processors.qwen_audio import Qwen3ASRAudioProcessor, Qwen3OmniAudioProcessor
from pace.llm.processors.qwen_vl import QwenImageProcessor
from pace.llm.processors.settings import read_section, read_whole_processor

IMAGE_PROCESSORS: dict[str, type[ImageProcessor]] = {
    "Gemma3ForConditionalGeneration": Gemma3ImageProcessor,
    "Gemma4ForConditionalGeneration": Gemma4ImageProcessor,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedImageProcessor,
    "Idefics3ForConditionalGeneration": Idefics3ImageProcessor,
    "InternVLChatModel": InternVLChatImageProcessor,
    "InternVLForConditionalGeneration": InternVLImageProcessor,
    "Lfm2VlForConditionalGeneration": Lfm2VlImageProcessor,
    "LlavaForConditionalGeneration": LlavaImageProcessor,
    "LlavaNextForConditionalGeneration": LlavaNextImageProcessor,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionImageProcessor,
    "Mistral3ForConditionalGeneration": PixtralImageProcessor,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRVLImageProcessor,
    "Qwen2_5_VLForConditionalGeneration": QwenImageProcessor,
    "Qwen2VLForConditionalGeneration": QwenImageProcessor,
    "Qwen3_5ForConditionalGeneration": QwenImageProcessor,
    "Qwen3_5MoeForConditionalGeneration": QwenImageProcessor,
    "Qwen3OmniMoeForConditionalGeneration": QwenImageProcessor,
    "Qwen3OmniMoeThinkerForConditionalGeneration": QwenImageProcessor,
    "Qwen3VLForConditionalGeneration": QwenImageProcessor,
    "Qwen3VLMoeForConditionalGeneration": QwenImageProcessor,
    "SmolVLMForConditionalGeneration": Idefics3ImageProcessor,
}
"""Architecture -> processor of images."""

AUDIO_PROCESSORS: dict[str, type[Gemma4Sound] | type[Qwen3OmniAudioProcessor]] = {
    "Gemma4ForConditionalGeneration": Gemma4AudioProcessor,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedAudioProcessor,
    "Qwen3ASRForConditionalGeneration": Qwen3ASRAudioProcessor,
    "Qwen3OmniMoeForConditionalGeneration": Qwen3OmniAudioProcessor,
    "Qwen3OmniMoeThinkerForConditionalGeneration": Qwen3OmniAudioProcessor,
}
"""Architecture -> processor of sound."""


def needs_settings(config: dict[str, Any]) -> bool:
    """False if the config.json of a checkpoint has all settings of its processors."""
    processor = IMAGE_PROCESSORS.get(find_family(config, embeds=True).__name__)
    return processor is None or processor.needs_settings


def load_processors(directory: Path, config: dict[str, Any]) -> Processors:
    """The processors of a checkpoint. `config` is its config.json.

    Raises ValueError or NotImplementedError that names the file and field, and FileNotFoundError if a file is missing.
    """
    family = find_family(config, embeds=True)
    named = family.converted(config) | {"architectures": [family.__name__]}
    found = make_processors(family.__name__, named, partial(read_section, directory))
    if isinstance(found.image, ImageProcessor):
        found = replace(found, image=found.image.within(read_whole_processor(directory)))
    return found


def make_processors(
    architecture: str, config: dict[str, Any], read: Callable[[str], tuple[dict[str, Any], str]]
) -> Processors:
    """The processors of an architecture. `read` returns the settings of a section, as `read_section`. Raises as
    `load_processors`."""
    of_towers = config.get("thinker_config", config)
    image = audio = None
    if architecture in IMAGE_PROCESSORS:
        processor = IMAGE_PROCESSORS[architecture]
        image = processor.from_dict(*read("image_processor")) if processor.needs_settings else processor()
        image = image.for_model(of_towers)
    # Sizes of Gemma 4 without a tower for sound have no audio_config; Qwen's may leave it out for the defaults.
    has_sound = of_towers.get("audio_config") is not None or not architecture.startswith("Gemma4")
    if architecture in AUDIO_PROCESSORS and has_sound:
        audio = AUDIO_PROCESSORS[architecture].from_dict(*read("feature_extractor"))
        audio.check_tower(of_towers.get("audio_config"))
    return Processors(image, audio)
