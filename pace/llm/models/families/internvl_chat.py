"""InternVL 2, 2.5, 3 and 3.5 as published: `InternVLChatModel`. The Python code in these checkpoints is never run.

Its config becomes that of the same model as transformers converts it, which `families/internvl.py` describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.internlm2 import InternLM2Config, InternLM2ForCausalLM
from pace.llm.models.families.internvl import InternVLForConditionalGeneration, OfInternVL, OfInternVLConfig
from pace.llm.models.families.renamed import InternLM3ForCausalLM
from pace.llm.models.towers.internvl_config import InternVitConfig
from pace.naming import shown


@dataclass(frozen=True, kw_only=True)
class InternVLOfInternLM2Config(OfInternVLConfig, InternLM2Config):
    pass


class InternVLOfInternLM2(OfInternVL, InternLM2ForCausalLM):
    Config = InternVLOfInternLM2Config
    text_prefixes: ClassVar[dict[str, str]] = {"language_model.output.": "lm_head."} | OfInternVL.text_prefixes
    other_names: ClassVar[dict[str, str]] = OfInternVL.other_names | InternLM2ForCausalLM.other_names


class InternVLChatModel(InternVLForConditionalGeneration):
    """The architecture of these checkpoints. Their models are of the classes in `of_text`."""

    family = "InternVLChat"
    of_text: ClassVar[dict[str, type[BaseModelForCausalLM]]] = OfInternVL.of_text | {
        "internlm2": InternVLOfInternLM2,
        "internlm3": OfInternVL.of(InternLM3ForCausalLM),
    }

    @classmethod
    def converted(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Names the class, the text part and the tower as transformers does. Fields about tiles stay as they are."""
        text, vision = raw.get("llm_config"), raw.get("vision_config")
        if not isinstance(text, dict):
            raise ValueError(f"config.json: llm_config must be an object; got {shown(text)}")
        kind = text.get("model_type")
        if str(kind) not in cls.of_text:
            raise NotImplementedError(
                f"config.json: llm_config.model_type = {shown(kind)} is not implemented for InternVLChatModel; "
                f"implemented: {', '.join(cls.of_text)}"
            )
        if isinstance(vision, dict):
            vision = {"model_type": InternVitConfig.model_types[0]} | vision
        whole = {
            "architectures": [InternVLForConditionalGeneration.__name__],
            "model_type": "internvl",
            "text_config": {name: value for name, value in text.items() if name != "moe_config" or value is not None},
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
            "vision_config": vision,
        }
        return {name: value for name, value in raw.items() if name != "llm_config"} | whole
