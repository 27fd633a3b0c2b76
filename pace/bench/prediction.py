"""Predicts speed: a model's costs divided by the limits of this machine, times the shares of these limits that the
kernels reach.

    prefill   `for each step of 512 tokens  max(layer weights / read bandwidth, products / FMA peak)
              + attention over the pairs of positions / FMA peak + recurrences / FMA peak + the LM head, for one row`
    decode    `max(weights / read bandwidth, products of the batch / FMA peak)
              + max(keys and values / read bandwidth, attention / FMA peak)
              + max(states read and written / read bandwidth, recurrences / FMA peak)`

Convolutions and recurrences of layers with a state are predicted by the shares of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.ops.weight_layout import GRIDS, SMALL_CODES

STEP_TOKENS = 512
"""Tokens of a prompt per step, as in the `Scheduler`."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the limits, measured in the same run. All time outside of products and attention (norms, heads,
    dispatch, sampling) counts as products. The measurements are in benchmarks/RESULTS.md, "Predicted and measured"."""

    weights: float
    """Share of the read bandwidth, outside of attention, if few rows make a step memory-bound."""
    products: float
    """Share of the fp32 FMA peak, outside of attention, if many rows share the weights."""
    cache: float
    """Share of the read bandwidth, for attention of a decode step that is bound by reading keys and values."""
    decode_attention: float
    """Share of the fp32 FMA peak, for attention of a decode step in which many query heads share a key head."""
    prefill_attention: float
    """Share of the fp32 FMA peak, for attention of a prefill."""


@dataclass(frozen=True)
class Prediction:
    prefill_seconds: float
    """Seconds from a prompt to its first token."""
    step_seconds: float
    """Seconds of a decode step of the whole batch."""


AVX2 = Efficiency(weights=0.90, products=0.85, cache=0.62, decode_attention=0.45, prefill_attention=0.65)
"""Medians (benchmarks/RESULTS.md). `generic` and `avx512` use the same shares: neither was measured."""
AVX512_BF16 = replace(AVX2, products=1.60)
"""bf16 dot products exceed the fp32 peak that these shares refer to: a prefill of 0.5B reached 1.62 times the peak
(benchmarks/RESULTS.md). Attention is always fp32; its shares are those of `AVX2`. `amx` was not measured: its tiles
multiply bf16 many times faster than vectors, so prefill is probably underestimated."""
AVX2_CODES = {
    "int8": replace(AVX2, weights=0.88, products=1.03),
    "int4": replace(AVX2, weights=0.83, products=1.63),
    "float8": replace(AVX2, weights=0.39, products=0.71),
}
"""Measured on int4 models with an int8 embedding and LM head. These and the following shares are measured
(benchmarks/RESULTS.md). Formats of the same code share one prediction, regardless of their groups, codebooks and
minima."""
AVX2_VNNI_CODES = AVX2_CODES | {
    "int8": replace(AVX2_CODES["int8"], products=2.40),
    "int4": replace(AVX2_CODES["int4"], products=1.93),
}
"""Products measured with `avx2_vnni_evex` on Zen 4; processors that only have `avx2_vnni` have not been measured."""
VNNI_CODES = {
    "int8": replace(AVX2, weights=0.95, products=2.78),
    "int4": replace(AVX2, weights=0.93, products=2.60),
    "float8": replace(AVX2, weights=0.65, products=0.81),
}
"""Shares of all instruction sets with VNNI and AVX-512. Integer products exceed the fp32 peak. `amx` multiplies many
rows on tiles and has not been measured, so its prefill is probably underestimated."""


def efficiency(isa: str, dtype: torch.dtype, code: str | None = None) -> Efficiency:
    """Returns the shares of the machine's limits that the kernels of an instruction set reach, for weights of a dtype
    or in codes (`Costs.code`). Codes of 1 to 6 bits, in super-blocks or not, and points of grids use those of int4."""
    if code is not None:
        code = "int4" if code in SMALL_CODES or code in GRIDS else code
        if isa in ("avx512_vnni", "avx512_bf16", "amx"):
            return VNNI_CODES[code]
        return (AVX2_VNNI_CODES if isa.startswith("avx2_vnni") else AVX2_CODES)[code]
    return AVX512_BF16 if dtype == torch.bfloat16 and isa in ("avx512_bf16", "amx") else AVX2


def efficiencies(isa: str, dtype: torch.dtype, costs: Costs) -> tuple[Efficiency, Efficiency]:
    """Returns the efficiency of the layers and of the LM head, which files often store in different codes."""
    return efficiency(isa, dtype, costs.layer_code), efficiency(isa, dtype, costs.head_code)


def predict(
    costs: Costs,
    reached: Efficiency,
    limits: Limits,
    prompt: int,
    context: int,
    batch: int = 1,
    head: Efficiency | None = None,
) -> Prediction:
    """Predicts prefill of one prompt of `prompt` tokens, and decode of `batch` sequences of `context` tokens each.
    `head`: efficiency of the LM head; None if equal to `reached`."""
    bandwidth, peak, head = 1e9 * limits.read_gb_s, 1e9 * limits.fma_gflops, head or reached

    def products(reached: Efficiency, weight_bytes: int, flops: int) -> float:
        return max(weight_bytes / (reached.weights * bandwidth), flops / (reached.products * peak))

    layer_bytes = costs.step_weight_bytes(STEP_TOKENS) - costs.head_bytes
    full_steps, rest = divmod(prompt, STEP_TOKENS)
    prefill = full_steps * products(reached, layer_bytes, STEP_TOKENS * costs.prompt_flops_per_token)
    if rest:
        prefill += products(reached, layer_bytes, rest * costs.prompt_flops_per_token)
    prefill += products(head, costs.head_bytes, costs.head_flops)
    tokenwise = costs.state_flops_per_token / (reached.prefill_attention * peak)
    prefill += costs.prefill_attention_flops(prompt) / (reached.prefill_attention * peak) + prompt * tokenwise

    read = (costs.step_weight_bytes(batch) - costs.head_bytes) / reached.weights + costs.head_bytes / head.weights
    multiplied = costs.layer_flops_per_token / reached.products + costs.head_flops / head.products
    attention_flops = batch * costs.decode_attention_flops(context)
    decode = max(read / bandwidth, batch * multiplied / peak) + max(
        batch * costs.kv_bytes(context) / (reached.cache * bandwidth),
        attention_flops / (reached.decode_attention * peak),
    )
    decode += batch * max(costs.state_traffic / (reached.cache * bandwidth), tokenwise)
    return Prediction(prefill, decode)
