"""The supported architectures: the name in a checkpoint's config.json, and the class."""

from __future__ import annotations

from typing import Any

from pace.llm.models import eagle3
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.encoders.encoder import CLASSIFIER
from pace.llm.models.encoders.encoder_list import ENCODER_LIST, find_encoder
from pace.llm.models.families import gemma4_assistant
from pace.llm.models.families.afmoe import AfmoeForCausalLM
from pace.llm.models.families.apertus import Apertus1p5ForConditionalGeneration, ApertusForCausalLM
from pace.llm.models.families.bailing_hybrid import BailingHybridForCausalLM
from pace.llm.models.families.bailing_moe_v2 import BailingMoeV2ForCausalLM, SarvamMoEForCausalLM
from pace.llm.models.families.bamba import BambaForCausalLM
from pace.llm.models.families.bitnet import BitNetForCausalLM
from pace.llm.models.families.bloom import BloomForCausalLM
from pace.llm.models.families.chatglm import ChatGLMForConditionalGeneration
from pace.llm.models.families.codegen import CodeGenForCausalLM
from pace.llm.models.families.cohere import Cohere2ForCausalLM, CohereForCausalLM
from pace.llm.models.families.cohere2_moe import Cohere2MoeForCausalLM
from pace.llm.models.families.cwm import CwmForCausalLM
from pace.llm.models.families.dbrx import DbrxForCausalLM
from pace.llm.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from pace.llm.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from pace.llm.models.families.dots1 import Dots1ForCausalLM
from pace.llm.models.families.ernie4_5 import Ernie4_5ForCausalLM
from pace.llm.models.families.ernie4_5_moe import Ernie4_5_MoeForCausalLM
from pace.llm.models.families.exaone4 import Exaone4ForCausalLM
from pace.llm.models.families.exaone_moe import ExaoneMoeForCausalLM
from pace.llm.models.families.falcon import FalconForCausalLM
from pace.llm.models.families.falcon_h1 import FalconH1ForCausalLM
from pace.llm.models.families.flex_olmo import FlexOlmoForCausalLM
from pace.llm.models.families.flint import FlintForCausalLM
from pace.llm.models.families.gemma import GemmaForCausalLM
from pace.llm.models.families.gemma2 import Gemma2ForCausalLM, VaultGemmaForCausalLM
from pace.llm.models.families.gemma3 import Gemma3ForConditionalGeneration
from pace.llm.models.families.gemma4 import (
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForConditionalGeneration,
)
from pace.llm.models.families.glm import Glm4ForCausalLM, GlmForCausalLM
from pace.llm.models.families.glm4_moe import Glm4MoeForCausalLM
from pace.llm.models.families.glm4_moe_lite import Glm4MoeLiteForCausalLM
from pace.llm.models.families.gpt2 import GPT2LMHeadModel
from pace.llm.models.families.gpt_bigcode import GPTBigCodeForCausalLM
from pace.llm.models.families.gpt_neox import GPTNeoXForCausalLM
from pace.llm.models.families.gpt_oss import GptOssForCausalLM
from pace.llm.models.families.gptj import GPTJForCausalLM
from pace.llm.models.families.granite import GraniteForCausalLM
from pace.llm.models.families.granite_swa import GraniteSWAForCausalLM
from pace.llm.models.families.granitemoe import GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM
from pace.llm.models.families.granitemoe_swa import GraniteMoeSWAForCausalLM
from pace.llm.models.families.granitemoehybrid import GraniteMoeHybridForCausalLM
from pace.llm.models.families.helium import HeliumForCausalLM
from pace.llm.models.families.hunyuan import HunYuanDenseV1ForCausalLM
from pace.llm.models.families.hunyuan_moe import HunYuanMoEV1ForCausalLM
from pace.llm.models.families.hy_v3 import HYV3ForCausalLM
from pace.llm.models.families.hyperclovax import HyperCLOVAXForCausalLM
from pace.llm.models.families.idefics3 import Idefics3ForConditionalGeneration
from pace.llm.models.families.internlm2 import InternLM2ForCausalLM
from pace.llm.models.families.internvl import InternVLForConditionalGeneration
from pace.llm.models.families.internvl_chat import InternVLChatModel
from pace.llm.models.families.kimi_k25 import KimiK25ForConditionalGeneration
from pace.llm.models.families.kimi_linear import KimiLinearForCausalLM
from pace.llm.models.families.kolibri1 import Kolibri1ForCausalLM
from pace.llm.models.families.laguna import LagunaForCausalLM
from pace.llm.models.families.lara_mini import LaraMiniForCausalLM
from pace.llm.models.families.latent_mixtures import (
    AXK1ForCausalLM,
    DeepseekV32ForCausalLM,
    GlmMoeDsaForCausalLM,
    SarvamMLAForCausalLM,
)
from pace.llm.models.families.lfm2 import Lfm2ForCausalLM
from pace.llm.models.families.lfm2_moe import Lfm2MoeForCausalLM
from pace.llm.models.families.lfm2_vl import Lfm2VlForConditionalGeneration
from pace.llm.models.families.lfm3 import Lfm3ForCausalLM
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.llama4 import Llama4ForConditionalGeneration
from pace.llm.models.families.llava import LlavaForConditionalGeneration
from pace.llm.models.families.llava_next import LlavaNextForConditionalGeneration
from pace.llm.models.families.llava_onevision import LlavaOnevisionForConditionalGeneration
from pace.llm.models.families.mamba2 import Mamba2ForCausalLM
from pace.llm.models.families.mellum import MellumForCausalLM
from pace.llm.models.families.minicpm import MiniCPMForCausalLM
from pace.llm.models.families.minicpm3 import MiniCPM3ForCausalLM
from pace.llm.models.families.minimax_m2 import MiniMaxM2ForCausalLM
from pace.llm.models.families.ministral3 import Ministral3ForCausalLM
from pace.llm.models.families.mistral import MistralForCausalLM
from pace.llm.models.families.mistral3 import Mistral3ForConditionalGeneration
from pace.llm.models.families.mistral4 import Mistral4ForCausalLM
from pace.llm.models.families.mixtral import MixtralForCausalLM
from pace.llm.models.families.modernbert_decoder import ModernBertDecoderForCausalLM
from pace.llm.models.families.mpt import MptForCausalLM
from pace.llm.models.families.nemotron_h import NemotronHForCausalLM
from pace.llm.models.families.olmo import Olmo2ForCausalLM, Olmo3ForCausalLM, OlmoForCausalLM
from pace.llm.models.families.olmo_hybrid import OlmoHybridForCausalLM
from pace.llm.models.families.olmoe import OlmoeForCausalLM
from pace.llm.models.families.opt import OPTForCausalLM
from pace.llm.models.families.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from pace.llm.models.families.persimmon import PersimmonForCausalLM
from pace.llm.models.families.phi import PhiForCausalLM
from pace.llm.models.families.phi3 import Phi3ForCausalLM
from pace.llm.models.families.phimoe import PhimoeForCausalLM
from pace.llm.models.families.qwen2 import Qwen2ForCausalLM
from pace.llm.models.families.qwen2_moe import Qwen2MoeForCausalLM
from pace.llm.models.families.qwen3 import Qwen3ForCausalLM
from pace.llm.models.families.qwen3_5 import Qwen3_5ForConditionalGeneration
from pace.llm.models.families.qwen3_5_moe import Qwen3_5MoeForConditionalGeneration
from pace.llm.models.families.qwen3_asr import Qwen3ASRForConditionalGeneration
from pace.llm.models.families.qwen3_moe import Qwen3MoeForCausalLM
from pace.llm.models.families.qwen3_next import Qwen3NextForCausalLM
from pace.llm.models.families.qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
from pace.llm.models.families.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from pace.llm.models.families.qwen_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from pace.llm.models.families.renamed import ExaoneForCausalLM, InternLM3ForCausalLM, IQuestCoderForCausalLM
from pace.llm.models.families.seed_oss import SeedOssForCausalLM
from pace.llm.models.families.smollm3 import SmolLM3ForCausalLM
from pace.llm.models.families.solar_open import SolarOpenForCausalLM
from pace.llm.models.families.stablelm import StableLmForCausalLM
from pace.llm.models.families.starcoder2 import Starcoder2ForCausalLM
from pace.llm.models.families.ungated import (
    ArceeForCausalLM,
    Jais2ForCausalLM,
    NanoChatForCausalLM,
    NemotronForCausalLM,
)
from pace.llm.models.families.youtu import YoutuForCausalLM
from pace.llm.models.left_out import reason_of
from pace.llm.models.model_config import ModelConfig
from pace.naming import shown

MODEL_CLASSES: tuple[type[BaseModelForCausalLM], ...] = (
    AfmoeForCausalLM,
    Apertus1p5ForConditionalGeneration,
    ApertusForCausalLM,
    ArceeForCausalLM,
    AXK1ForCausalLM,
    BailingHybridForCausalLM,
    BailingMoeV2ForCausalLM,
    BambaForCausalLM,
    BitNetForCausalLM,
    BloomForCausalLM,
    ChatGLMForConditionalGeneration,
    CodeGenForCausalLM,
    Cohere2ForCausalLM,
    Cohere2MoeForCausalLM,
    CohereForCausalLM,
    CwmForCausalLM,
    DbrxForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV32ForCausalLM,
    DeepseekV3ForCausalLM,
    Dots1ForCausalLM,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5ForCausalLM,
    Exaone4ForCausalLM,
    ExaoneForCausalLM,
    ExaoneMoeForCausalLM,
    FalconForCausalLM,
    FalconH1ForCausalLM,
    FlexOlmoForCausalLM,
    FlintForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForConditionalGeneration,
    GemmaForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    GlmForCausalLM,
    GlmMoeDsaForCausalLM,
    GPT2LMHeadModel,
    GPTBigCodeForCausalLM,
    GPTJForCausalLM,
    GPTNeoXForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAForCausalLM,
    GraniteSWAForCausalLM,
    HeliumForCausalLM,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1ForCausalLM,
    HyperCLOVAXForCausalLM,
    HYV3ForCausalLM,
    Idefics3ForConditionalGeneration,
    InternLM2ForCausalLM,
    InternLM3ForCausalLM,
    InternVLChatModel,
    InternVLForConditionalGeneration,
    IQuestCoderForCausalLM,
    Jais2ForCausalLM,
    KimiK25ForConditionalGeneration,
    KimiLinearForCausalLM,
    Kolibri1ForCausalLM,
    LagunaForCausalLM,
    LaraMiniForCausalLM,
    Lfm2ForCausalLM,
    Lfm2MoeForCausalLM,
    Lfm2VlForConditionalGeneration,
    Lfm3ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    Mamba2ForCausalLM,
    MellumForCausalLM,
    MiniCPM3ForCausalLM,
    MiniCPMForCausalLM,
    MiniMaxM2ForCausalLM,
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    Mistral4ForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    ModernBertDecoderForCausalLM,
    MptForCausalLM,
    NanoChatForCausalLM,
    NemotronForCausalLM,
    NemotronHForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    OlmoHybridForCausalLM,
    OPTForCausalLM,
    PaddleOCRVLForConditionalGeneration,
    PersimmonForCausalLM,
    Phi3ForCausalLM,
    PhiForCausalLM,
    PhimoeForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3ASRForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    SarvamMLAForCausalLM,
    SarvamMoEForCausalLM,
    SeedOssForCausalLM,
    SmolLM3ForCausalLM,
    SolarOpenForCausalLM,
    StableLmForCausalLM,
    Starcoder2ForCausalLM,
    VaultGemmaForCausalLM,
    YoutuForCausalLM,
)
MODEL_LIST = {model_class.__name__: model_class for model_class in MODEL_CLASSES} | {
    "Apertus1p5TextForCausalLM": Apertus1p5ForConditionalGeneration,
    "BailingMoeV3ForCausalLM": BailingHybridForCausalLM,
    "Exaone4_5_ForConditionalGeneration": Exaone4ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForConditionalGeneration,
    "Gemma4ForCausalLM": Gemma4ForConditionalGeneration,
    "Gemma4UnifiedForCausalLM": Gemma4UnifiedForConditionalGeneration,
    "Llama4ForCausalLM": Llama4ForConditionalGeneration,
    "MinistralForCausalLM": MistralForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForConditionalGeneration,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForConditionalGeneration,
    "Qwen3OmniMoeThinkerForConditionalGeneration": Qwen3OmniMoeForConditionalGeneration,
    "SmolVLMForConditionalGeneration": Idefics3ForConditionalGeneration,
}

DRAFTERS = frozenset({*eagle3.ARCHITECTURES, *gemma4_assistant.CONFIGS})
"""Architectures of drafters, which are loaded with their target."""
OTHER_STEMS = {
    "hunyuanv1dense": "hunyuandensev1",
    "hunyuanv1moe": "hunyuanmoev1",
    "lfm2-vl": "lfm2vl",
    "modernbert-decoder": "modernbertdecoder",
}
"""Stems of a model_type that differ from the class's stem."""


def read_config(raw: Any, media: bool = False, embeds: bool = False) -> tuple[type[BaseModelForCausalLM], ModelConfig]:
    """Returns the class and the config of a checkpoint, from its parsed config.json. With `media`, the config has the
    towers for images and sound; otherwise it is only the text part. With `embeds`, also reads configs of classifiers
    (`Qwen3ForSequenceClassification`); otherwise these and encoders are errors that name EmbeddingModel.

    The class is a variant of `find_family`. Raises what that raises, ValueError if a field is wrong, and
    NotImplementedError for an unsupported field value."""
    family = find_family(raw, embeds)
    raw = family.converted(raw)
    model_class = family.variant(raw)
    config = model_class.Config.from_dict(raw)
    return model_class, config.with_media(raw) if media else config


def find_family(raw: Any, embeds: bool = False) -> type[BaseModelForCausalLM]:
    """Returns the class of MODEL_LIST that a parsed config.json names, with `embeds` as in `read_config`.

    It is the one named by `architectures`, in any case and also as a bare decoder (`LlamaModel`); without
    `architectures`, by `model_type`. A `model_type` that `transformers` saves under another class (`saved_as`) counts
    first. Raises ValueError if both are missing, or if they name different classes. Raises NotImplementedError for an
    unsupported architecture."""
    if not isinstance(raw, dict):
        raise ValueError(f"config.json must hold an object; got {shown(raw)}")
    names = raw.get("architectures") or [raw.get("model_type")]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"config.json: architectures must be a list with the name of a class; got {shown(raw.get('architectures'))}"
            f" (and model_type {shown(raw.get('model_type'))})"
        )
    known = {_stem(name): model_class for name, model_class in MODEL_LIST.items()}
    bare = [name.removesuffix(CLASSIFIER) for name in names]
    if find_encoder(raw) or not embeds and any(name not in names and _stem(name) in known for name in bare):
        raise NotImplementedError(
            f"{shown(names[0])} makes vectors or scores of texts and generates none; load it with EmbeddingModel(...)"
        )
    for name in bare:
        if model_class := known.get(_stem(name)):
            other = known.get(_stem(str(raw.get("model_type"))), model_class)
            if other is not model_class and other.saved_as != model_class.__name__:
                raise ValueError(
                    f"config.json: architectures ({name}) and model_type ({raw['model_type']}) contradict each other"
                )
            return other
    if drafter := next((name for name in names if name in DRAFTERS), None):
        raise NotImplementedError(
            f"{drafter} drafts for another model and does not run by itself; load that model with "
            "spec_config=DraftModelConfig(...) of this checkpoint"
        )
    if reason := reason_of(names[0]):
        raise NotImplementedError(f"the architecture {shown(names[0])} is not implemented: {reason}")
    raise NotImplementedError(
        f"the architecture {shown(names[0])} is not implemented; implemented: "
        f"{', '.join([*(ENCODER_LIST if embeds else ()), *MODEL_LIST])}"
    )


def _stem(name: str) -> str:
    """Common stem of names: `llama` for `LlamaForCausalLM`, `LLaMAForCausalLM`, `LlamaModel` and `llama`.
    `gemma3` for `Gemma3ForConditionalGeneration`, `Gemma3TextModel` and `gemma3_text`; `gpt2` for `GPT2LMHeadModel`;
    `gptneox` for `gpt_neox`."""
    stem = name.lower()
    for suffix in ("forcausallm", "forconditionalgeneration", "lmheadmodel", "textmodel", "model", "_text"):
        stem = stem.removesuffix(suffix)
    stem = stem.replace("_", "")
    return OTHER_STEMS.get(stem, stem)
