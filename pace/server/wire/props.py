"""Answers of `GET /props`, by llama.cpp's names: what the server does where a request says nothing."""

from __future__ import annotations

from typing import Any

from pace import __version__
from pace.llm.configs import SamplingConfig
from pace.server.limits import Limits
from pace.server.prompts import PromptReader
from pace.server.schemas.chat import ChatRequest

DRAWS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""Fields of the settings that have one name here and there."""
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""How they stand where the likeliest token is taken."""


def settings(limits: Limits, defaults: SamplingConfig, max_length: int) -> dict[str, Any]:
    """Of a chat request with messages and nothing else; `defaults` are the checkpoint's."""
    request = ChatRequest(messages=[{"role": "user", "content": ""}])
    config = request.to_job(limits, defaults).sampling
    params = {name: getattr(config, name) for name in DRAWS} | ({} if config.do_sample else OFF)
    params |= {"n_predict": -1, "max_tokens": -1}  # the rest of the context
    return {"n_ctx": max_length, **params, "params": params}


def properties(
    name: str, reader: PromptReader, defaults: SamplingConfig, limits: Limits, num_slots: int
) -> dict[str, Any]:
    """`num_slots` sequences run at once. Run in a worker."""
    tokenizer = reader.tokenizer if reader.has_tokenizer else None
    return {
        "default_generation_settings": settings(limits, defaults, reader.max_length),
        "total_slots": num_slots,
        "model_alias": name,
        "chat_template": getattr(tokenizer, "chat_template", None),
        "bos_token": getattr(tokenizer, "bos_token", None),
        "eos_token": getattr(tokenizer, "eos_token", None),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"pace {__version__}",
    }
