"""Which processors a checkpoint needs, by its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pace.llm.processors.processor import Processors
from pace.llm.processors.qwen_vl import QwenImageProcessor
from pace.llm.processors.settings import read_section

IMAGE_PROCESSORS: dict[str, type[QwenImageProcessor]] = dict.fromkeys(
    [
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ],
    QwenImageProcessor,
)
"""Architecture -> processor of images."""


def load_processors(directory: Path, config: dict[str, Any]) -> Processors:
    """The processors of a checkpoint. `config` is its config.json.

    Raises ValueError or NotImplementedError that names the file and field, and FileNotFoundError if a file is missing.
    """
    architecture = (config.get("architectures") or [""])[0]
    image = None
    if architecture in IMAGE_PROCESSORS:
        image = IMAGE_PROCESSORS[architecture].from_dict(*read_section(directory, "image_processor"))
        image.check_tower(config.get("thinker_config", config).get("vision_config"))
    return Processors(image)
