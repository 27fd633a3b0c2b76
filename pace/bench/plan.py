"""What a model would need and how fast it would be here, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pace import _C
from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.bench.prediction import efficiency, predict
from pace.llm.models.model_list import read_config
from pace.llm.models.model_utils import parse_kv_cache_dtype, use_threads
from pace.ops import native

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

PROCESS_BYTES = 300 << 20
"""What Python, torch and the buffers of a step take besides weights and cache."""


@dataclass(frozen=True)
class Plan:
    """One way of running a model. Bytes, tokens, tokens a second."""

    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_context: int
    """The longest text, or each of `batch`, that fits into the memory available now, at most what the model was made for; 0 where the weights do not fit."""
    prefill_tokens_per_second: float
    """Of a prompt of `prompt` tokens."""
    decode_tokens_per_second: float
    """Of all sequences together."""

    @property
    def fits(self) -> bool:
        return self.max_context > 0


def plan(
    config_json: dict[str, Any],
    limits: Limits,
    available_bytes: int,
    prompt: int = 512,
    context: int | None = None,
    batch: int = 1,
    kv_cache_dtype: torch.dtype | str = "auto",
) -> list[Plan]:
    """One plan for each dtype, for a prompt of `prompt` tokens and decoding `batch` sequences of `context` (None: as many).

    Raises what reading the config raises, and ValueError for texts longer than the model's positions or an unknown `kv_cache_dtype`."""
    model_class, config = read_config(config_json)
    if config.quantization_config:
        raise NotImplementedError(
            f"config.json: quantization_config: the checkpoint is quantised already ({config.quantization_config.name}), and its tensors alone tell what they take; "
            "load it, and see memory_report()"
        )
    model = model_class(config, torch.bfloat16, native)
    context = prompt if context is None else context
    if min(prompt, context, batch) < 1:
        raise ValueError(f"prompt, context and batch must be at least 1; got {prompt}, {context}, {batch}")
    if max(prompt, context) > config.max_position_embeddings:
        raise ValueError(f"{max(prompt, context)} tokens are more than this model has positions for: {config.max_position_embeddings} (max_position_embeddings)")
    costs = {name: Costs.of(model, dtype, parse_kv_cache_dtype(kv_cache_dtype, dtype)) for name, dtype in DTYPES.items()}
    return [_plan(name, dtype, costs[name], config.max_position_embeddings, limits, available_bytes, prompt, context, batch) for name, dtype in DTYPES.items()]


def _plan(
    name: str, dtype: torch.dtype, costs: Costs, max_positions: int, limits: Limits, available_bytes: int, prompt: int, context: int, batch: int
) -> Plan:
    room = available_bytes - costs.weight_bytes - PROCESS_BYTES
    predicted = predict(costs, efficiency(limits.isa, dtype), limits, prompt, context, batch)
    return Plan(
        dtype=name,
        weight_bytes=costs.weight_bytes,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        max_context=max(0, min(max_positions, room // (batch * costs.kv_bytes_per_token))),
        prefill_tokens_per_second=prompt / predicted.prefill_seconds,
        decode_tokens_per_second=batch / predicted.step_seconds,
    )


def machine_limits(num_threads: int | None = None, seconds: float = 0.5) -> Limits:
    """Measured now, with the threads that a model would use."""
    from pace.bench import limits

    before = _C.get_num_threads()
    use_threads(num_threads)
    try:
        return limits.measure(seconds)
    finally:
        _C.set_num_threads(before)
