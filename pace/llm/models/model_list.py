"""The architectures that pace runs: the name in a checkpoint's config.json, and the class."""

from __future__ import annotations

from typing import Any

from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.gemma2 import Gemma2ForCausalLM
from pace.llm.models.families.gpt_oss import GptOssForCausalLM
from pace.llm.models.families.gptj import GPTJForCausalLM
from pace.llm.models.families.latent.deepseek_v2 import DeepseekV2ForCausalLM
from pace.llm.models.families.latent.deepseek_v3 import DeepseekV3ForCausalLM
from pace.llm.models.families.latent.glm4_moe_lite import Glm4MoeLiteForCausalLM
from pace.llm.models.families.latent.minicpm3 import MiniCPM3ForCausalLM
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mistral import MistralForCausalLM
from pace.llm.models.families.mixtral import MixtralForCausalLM
from pace.llm.models.families.opt import OPTForCausalLM
from pace.llm.models.families.phi import PhiForCausalLM
from pace.llm.models.families.phi3 import Phi3ForCausalLM
from pace.llm.models.families.qwen2 import Qwen2ForCausalLM
from pace.llm.models.families.qwen2_moe import Qwen2MoeForCausalLM
from pace.llm.models.families.qwen3 import Qwen3ForCausalLM
from pace.llm.models.families.qwen3_moe import Qwen3MoeForCausalLM
from pace.llm.models.model_config import ModelConfig
from pace.naming import shown

MODEL_LIST: dict[str, type[BaseModelForCausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
    "GPTJForCausalLM": GPTJForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MiniCPM3ForCausalLM": MiniCPM3ForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "PhiForCausalLM": PhiForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def read_config(raw: Any) -> tuple[type[BaseModelForCausalLM], ModelConfig]:
    """The class and the config of a checkpoint, from its parsed config.json.

    The class is the one that `architectures` names, in any case and also as a bare decoder (`LlamaModel`); without
    `architectures`, the one of `model_type`. Raises ValueError where neither is there, the two name different classes
    or a field is wrong, NotImplementedError where the architecture or a field's value is not implemented."""
    if not isinstance(raw, dict):
        raise ValueError(f"config.json must hold an object; got {shown(raw)}")
    names = raw.get("architectures") or [raw.get("model_type")]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"config.json: architectures must be a list with the name of a class; got {shown(raw.get('architectures'))}"
            f" (and model_type {shown(raw.get('model_type'))})"
        )
    known = {_stem(name): model_class for name, model_class in MODEL_LIST.items()}
    for name in names:
        if model_class := known.get(_stem(name)):
            other = known.get(_stem(str(raw.get("model_type"))), model_class)
            if other is not model_class:
                raise ValueError(
                    f"config.json: architectures ({name}) and model_type ({raw['model_type']}) contradict each other"
                )
            return model_class, model_class.Config.from_dict(raw)
    raise NotImplementedError(
        f"the architecture {shown(names[0])} is not implemented; implemented: {', '.join(MODEL_LIST)}"
    )


def _stem(name: str) -> str:
    """`llama` of `LlamaForCausalLM`, `LLaMAForCausalLM`, `LlamaModel` and `llama`; `gemma3` of
    `Gemma3ForConditionalGeneration` and `gemma3_text`."""
    stem = name.lower()
    for suffix in ("forcausallm", "forconditionalgeneration", "lmheadmodel", "model", "_text"):
        stem = stem.removesuffix(suffix)
    return stem.replace("_", "")
