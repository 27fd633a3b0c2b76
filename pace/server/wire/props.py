"""Answers of `GET /props`, with llama.cpp's names: the server's defaults."""

from __future__ import annotations

from typing import Any

from pace import __version__
from pace.llm.configs import SamplingConfig
from pace.llm.defaults import DRAWS, OFF
from pace.server.limits import Limits
from pace.server.prompts import PromptReader
from pace.server.schemas.chat import ChatRequest

GREEDY = OFF | {"temperature": 0.0}
"""Values of the sampling fields for greedy decoding."""


def settings(limits: Limits, defaults: SamplingConfig, max_length: int) -> dict[str, Any]:
    """Returns the settings of a chat request with only messages; `defaults` are the checkpoint's."""
    request = ChatRequest(messages=[{"role": "user", "content": ""}])
    config = request.to_job(limits, defaults).sampling
    params = {name: getattr(config, name) for name in (*DRAWS, "repetition_penalty")}
    params |= {} if config.do_sample else GREEDY
    params |= {"n_predict": -1, "max_tokens": -1}  # the rest of the context
    return {"n_ctx": max_length, **params, "params": params}


def properties(
    name: str, reader: PromptReader, defaults: SamplingConfig, limits: Limits, num_slots: int
) -> dict[str, Any]:
    """Returns the answer. `num_slots` sequences run at once. Must run in a worker."""
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
