"""Large language models: load one, generate, stream, score.

    from pace.llm import LLMModel, SamplingConfig

Names are imported on first use, so that using one part does not import the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pace.grammar import Grammar
    from pace.llm.cache.manager import CacheManager
    from pace.llm.clients.chat import ChatAnswer, ChatOutput
    from pace.llm.clients.requests import Request
    from pace.llm.clients.session import Session
    from pace.llm.clients.steps import StepContext, StepFeedback
    from pace.llm.clients.streamer import BaseStreamer, CallbackStreamer, StreamEvent, TextPiece, TextStreamer
    from pace.llm.configs import KVCacheType, SamplingConfig
    from pace.llm.constraints.masks import AllowedTokens, TokenMask
    from pace.llm.embedding_model import EmbeddingModel
    from pace.llm.engine.engine import Engine
    from pace.llm.engine.scheduler import Scheduler
    from pace.llm.generator import Generator
    from pace.llm.llm import LLMModel
    from pace.llm.loading.options import LoadOptions
    from pace.llm.models.base_model import BaseModelForCausalLM
    from pace.llm.operators import OperatorConfig, OperatorReport
    from pace.llm.outputs import GenerateOutput, Metrics, Transcript
    from pace.llm.sampling.logits import LogitsProcessor
    from pace.llm.sampling.sampler import Sampler
    from pace.llm.sequence import TokenLogprob
    from pace.llm.speculation.configs import DraftModelConfig, MtpConfig, PardConfig, PromptLookupConfig
    from pace.llm.text.stopping_criteria import StoppingCriteria
    from pace.quant import QuantizationConfig

_HOMES = {
    "AllowedTokens": "constraints.masks",
    "BaseModelForCausalLM": "models.base_model",
    "BaseStreamer": "clients.streamer",
    "CacheManager": "cache",
    "CallbackStreamer": "clients.streamer",
    "ChatAnswer": "clients.chat",
    "ChatOutput": "clients.chat",
    "DraftModelConfig": "speculation.configs",
    "EmbeddingModel": "embedding_model",
    "Engine": "engine",
    "GenerateOutput": "outputs",
    "Generator": "generator",
    "Grammar": ".grammar",
    "KVCacheType": "configs",
    "LLMModel": "llm",
    "LoadOptions": "loading.options",
    "LogitsProcessor": "sampling.logits",
    "Metrics": "outputs",
    "MtpConfig": "speculation.configs",
    "OperatorConfig": "operators",
    "OperatorReport": "operators",
    "PardConfig": "speculation.configs",
    "PromptLookupConfig": "speculation.configs",
    "QuantizationConfig": ".quant",
    "Request": "clients.requests",
    "Sampler": "sampling.sampler",
    "SamplingConfig": "configs",
    "Scheduler": "engine.scheduler",
    "Session": "clients.session",
    "StepContext": "clients.steps",
    "StepFeedback": "clients.steps",
    "StoppingCriteria": "text.stopping_criteria",
    "StreamEvent": "clients.streamer",
    "TextPiece": "clients.streamer",
    "TextStreamer": "clients.streamer",
    "TokenLogprob": "sequence",
    "TokenMask": "constraints.masks",
    "Transcript": "outputs",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pace.llm' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", "pace.llm"), name)


def __dir__() -> list[str]:
    return __all__
