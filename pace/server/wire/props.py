"""Answers of `GET /props`, with llama.cpp's names: the server's defaults."""

from __future__ import annotations

from typing import Any

from pace import __version__
from pace.llm.configs import WITHOUT_EFFECT, SamplingConfig
from pace.llm.generator import Generator
from pace.server.limits import Limits
from pace.server.prompts import PromptReader
from pace.server.schemas.chat import ChatRequest

SETTINGS = (*WITHOUT_EFFECT, "repetition_penalty")
"""Settings whose names are the same in llama.cpp."""


def settings(limits: Limits, defaults: SamplingConfig, max_length: int) -> dict[str, Any]:
    """Returns the settings of a chat request with only messages; `defaults` are the checkpoint's."""
    request = ChatRequest(messages=[{"role": "user", "content": ""}])
    config = request.to_job(limits, defaults).sampling
    params = {name: getattr(config, name) for name in SETTINGS} | ({} if config.do_sample else WITHOUT_EFFECT)
    params |= {"n_predict": -1, "max_tokens": -1}  # the rest of the context
    return {"n_ctx": max_length, **params, "params": params}


def properties(generator: Generator, name: str, reader: PromptReader, limits: Limits) -> dict[str, Any]:
    """Returns the answer, with the model's `name`. Must run in a worker."""
    tokenizer = reader.tokenizer if reader.has_tokenizer else None
    kinds = reader.encoder.processors
    return {
        "default_generation_settings": settings(limits, generator.defaults, reader.max_length),
        "total_slots": generator.engine.scheduler.max_sequences_per_step,
        "model_alias": name,
        "chat_template": getattr(tokenizer, "chat_template", None),
        "bos_token": getattr(tokenizer, "bos_token", None),
        "eos_token": getattr(tokenizer, "eos_token", None),
        "modalities": {"vision": "image" in kinds, "audio": "audio" in kinds},
        "build_info": f"pace {__version__}",
    }
