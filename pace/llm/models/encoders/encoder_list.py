"""The supported encoders: the name in a checkpoint's config.json, and the class."""

from __future__ import annotations

from typing import Any

from pace.llm.models.encoders.bert import BertModel, DistilBertModel, ElectraModel, RobertaModel, XLMRobertaModel
from pace.llm.models.encoders.encoder import CLASSIFIER, Encoder, EncoderConfig
from pace.llm.models.encoders.eurobert import EuroBertModel
from pace.llm.models.encoders.gemma_embedding import GemmaEmbeddingModel
from pace.llm.models.encoders.gte import GteModel, NewModel
from pace.llm.models.encoders.jina_v3 import JinaEmbeddingsV3Model, RotaryXLMRobertaModel
from pace.llm.models.encoders.modern_bert import ModernBertModel
from pace.llm.models.encoders.mpnet import MPNetModel
from pace.llm.models.encoders.nomic_bert import NomicBertModel
from pace.llm.models.encoders.ultrabert import UltrabertModel
from pace.naming import shown

ENCODER_LIST: dict[str, type[Encoder]] = {
    "BertModel": BertModel,
    "CamembertModel": XLMRobertaModel,
    "DistilBertModel": DistilBertModel,
    "ElectraModel": ElectraModel,
    "EuroBertModel": EuroBertModel,
    "Gemma3TextModel": GemmaEmbeddingModel,
    "GteModel": GteModel,
    "JinaEmbeddingsV3Model": JinaEmbeddingsV3Model,
    "MPNetModel": MPNetModel,
    "ModernBertModel": ModernBertModel,
    "NomicBertModel": NomicBertModel,
    "RobertaModel": RobertaModel,
    "UltrabertModel": UltrabertModel,
    "XLMRobertaModel": XLMRobertaModel,
}
"""Name of the bare encoder in transformers -> its class. `ENDINGS` are other architectures of the same encoder."""

OF_THE_HUB: dict[str, type[Encoder]] = {
    "NewModel": NewModel,
    "XLMRobertaLoRA": RotaryXLMRobertaModel,
    "XLMRobertaModel": RotaryXLMRobertaModel,
}
"""The same for checkpoints with code of their own on the Hub. These are asked first whether a config.json describes
them, as a name may be that of another encoder in transformers."""

ENDINGS = (CLASSIFIER, "ForMaskedLM", "ForPreTraining", "Model")
"""Ends of the architectures whose checkpoints hold an encoder. A head for masked words is left out."""


def find_encoder(raw: Any) -> type[Encoder] | None:
    """Returns the class of the encoder that a parsed config.json describes; None for any other model."""
    names = _names(raw)
    for known in (OF_THE_HUB, ENCODER_LIST):
        by_stem = {_stem(name): encoder for name, encoder in known.items()}
        for name in names:
            encoder = by_stem.get(_stem(name))
            if encoder is not None and encoder.describes(raw):
                return encoder
    return None


def read_encoder_config(raw: Any) -> tuple[type[Encoder], EncoderConfig]:
    """Returns the class and the config of an encoder, from its parsed config.json.

    The class is the one named by `architectures`, or without it by `model_type`. Raises NotImplementedError for another
    model, and the errors of `ModelConfig.from_dict`."""
    encoder = find_encoder(raw)
    if encoder is None:
        given = (_names(raw) or [None])[0]
        raise NotImplementedError(
            f"the architecture {shown(given)} is not an encoder that is implemented; implemented: "
            f"{', '.join(ENCODER_LIST)}, and these with {', '.join(ENDINGS[:-1])}"
        )
    return encoder, encoder.Config.from_dict(raw)


def _names(raw: Any) -> list[str]:
    """The architectures of a config.json, or its model_type."""
    if not isinstance(raw, dict):
        return []
    names = raw.get("architectures") or [raw.get("model_type")]
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _stem(name: str) -> str:
    """Common stem of names: `xlmroberta` for `XLMRobertaModel`, `XLMRobertaForMaskedLM` and `xlm-roberta`."""
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return name.lower().replace("_", "").replace("-", "")
