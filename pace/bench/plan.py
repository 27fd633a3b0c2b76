"""What a model would need and how fast it would be here, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pace import _C
from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.llm.models.model_list import read_config
from pace.ops import native

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

PROCESS_BYTES = 300 << 20
"""What Python, torch and the buffers of a step take besides weights and cache."""

DECODE_EFFICIENCY = 0.9
"""Share of the read bandwidth that decode reaches, and PREFILL_EFFICIENCY of the fp32 FMA peak that prefill reaches: benchmarks/RESULTS.md."""
PREFILL_EFFICIENCY = 0.85
BF16_PREFILL_EFFICIENCY = 1.6
"""Where the instruction set multiplies bf16 pairs; measured on avx512_bf16. Nothing was measured on amx, which should do better."""


@dataclass(frozen=True)
class Plan:
    """One way of running a model. Bytes, tokens, tokens a second."""

    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_context: int
    """The longest text that fits into the memory available now, at most what the model was made for; 0 where the weights do not fit."""
    prefill_tokens_per_second: float
    """Of a prompt of `prompt` tokens."""
    decode_tokens_per_second: float
    """Of one sequence of that length."""

    @property
    def fits(self) -> bool:
        return self.max_context > 0


def plan(config_json: dict[str, Any], limits: Limits, available_bytes: int, prompt: int = 512) -> list[Plan]:
    """One plan for each dtype. Raises what reading the config raises."""
    model_class, config = read_config(config_json)
    model = model_class(config, torch.bfloat16, native)
    return [_plan(name, Costs.of(model, dtype), config.max_position_embeddings, limits, available_bytes, prompt) for name, dtype in DTYPES.items()]


def _plan(dtype: str, costs: Costs, max_positions: int, limits: Limits, available_bytes: int, prompt: int) -> Plan:
    room = available_bytes - costs.weight_bytes - PROCESS_BYTES
    multiplies_pairs = dtype == "bfloat16" and limits.isa in ("avx512_bf16", "amx")
    efficiency = BF16_PREFILL_EFFICIENCY if multiplies_pairs else PREFILL_EFFICIENCY
    return Plan(
        dtype=dtype,
        weight_bytes=costs.weight_bytes,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        max_context=max(0, min(max_positions, room // costs.kv_bytes_per_token)),
        prefill_tokens_per_second=prompt / costs.prefill_flops(prompt) * efficiency * 1e9 * limits.fma_gflops,
        decode_tokens_per_second=DECODE_EFFICIENCY * 1e9 * limits.read_gb_s / costs.decode_bytes(1, prompt),
    )


def machine_limits(num_threads: int | None = None, seconds: float = 0.5) -> Limits:
    """Measured now, with the threads that a model would use."""
    from pace.bench import limits
    from pace.llm.models.model_utils import use_threads

    before = _C.get_num_threads()
    use_threads(num_threads)
    try:
        return limits.measure(seconds)
    finally:
        _C.set_num_threads(before)
