"""Predicts speed: a model's costs divided by the limits of this machine, times the shares of these limits that the
kernels reach.

    prefill   `for each step of 512 tokens  max(layer weights / read bandwidth, products / FMA peak)
              + attention over the pairs of positions / FMA peak + recurrences / FMA peak + the LM head, for one row`
    decode    `max(weights / read bandwidth or decoding of their codes / FMA peak, products of the batch / FMA peak)
              + max(keys and values / read bandwidth, attention / FMA peak)
              + max(states read and written / read bandwidth, recurrences / FMA peak)`

Convolutions and recurrences of layers with a state are predicted by the shares of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pace.bench.costs import Costs
from pace.bench.limits import Limits

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
    one_row: float = math.inf
    """Share of the fp32 FMA peak for the products of one row, if decoding the codes may take longer than reading them.
    Few rows take as long as one. Infinite if reading always takes longer."""


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
GRIDS = {
    "iq1_s": (1.00, 0.26, 0.17),
    "iq1_m": (1.00, 0.24, 0.16),
    "iq2_xxs": (1.20, 0.29, 0.46),
    "iq2_xs": (1.20, 0.27, 0.33),
    "iq2_s": (1.20, 0.27, 0.26),
    "iq3_xxs": (1.20, 0.20, 0.34),
    "iq3_s": (1.20, 0.19, 0.23),
}
"""Codes of points of grids: `products` and `one_row` in `AVX2_CODES`, `one_row` in `VNNI_CODES`. Points take longer to
look up than to read. These are estimates from only the times of kernels (benchmarks/RESULTS.md, "Points of
grids"). They were not measured with `pace bench`."""
AVX2_CODES |= {code: replace(AVX2_CODES["int4"], products=many, one_row=one) for code, (many, one, _) in GRIDS.items()}
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
VNNI_CODES |= {code: replace(VNNI_CODES["int4"], products=2.00, one_row=one) for code, (_, _, one) in GRIDS.items()}
"""Shares of all instruction sets with VNNI and AVX-512. Integer products exceed the fp32 peak. `amx` multiplies many
rows on tiles and has not been measured, so its prefill is probably underestimated."""


def efficiency(isa: str, dtype: torch.dtype, code: str | None = None) -> Efficiency:
    """Returns the shares of the machine's limits that the kernels of an instruction set reach, for weights of a dtype
    or in codes (`Costs.code`). Codes of 3 to 6 bits, in super-blocks or not, use those of int4."""
    if code is not None:
        vnni = isa in ("avx512_vnni", "avx512_bf16", "amx")
        shares = VNNI_CODES if vnni else AVX2_VNNI_CODES if isa.startswith("avx2_vnni") else AVX2_CODES
        return shares.get(code) or shares["int4"]
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

    layer_bytes = {tokens: costs.step_weight_bytes(tokens) - costs.head_bytes for tokens in (1, batch, STEP_TOKENS)}

    def read_layers(tokens: int) -> float:
        """Seconds to read and decode the weights of the layers that a step of `tokens` tokens uses."""
        decoded = costs.layer_flops_per_token / layer_bytes[1] / (reached.one_row * peak)
        return layer_bytes[tokens] * max(1 / (reached.weights * bandwidth), decoded)

    def prompt_step(tokens: int) -> float:
        return max(read_layers(STEP_TOKENS), tokens * costs.prompt_flops_per_token / (reached.products * peak))

    read_head = max(costs.head_bytes / (head.weights * bandwidth), costs.head_flops / (head.one_row * peak))
    full_steps, rest = divmod(prompt, STEP_TOKENS)
    prefill = full_steps * prompt_step(STEP_TOKENS) + (prompt_step(rest) if rest else 0.0)
    prefill += max(read_head, costs.head_flops / (head.products * peak))
    tokenwise = costs.state_flops_per_token / (reached.prefill_attention * peak)
    prefill += costs.prefill_attention_flops(prompt) / (reached.prefill_attention * peak) + prompt * tokenwise

    multiplied = costs.layer_flops_per_token / reached.products + costs.head_flops / head.products
    attention_flops = batch * costs.decode_attention_flops(context)
    decode = max(read_layers(batch) + read_head, batch * multiplied / peak) + max(
        batch * costs.kv_bytes(context) / (reached.cache * bandwidth),
        attention_flops / (reached.decode_attention * peak),
    )
    decode += batch * max(costs.state_traffic / (reached.cache * bandwidth), tokenwise)
    return Prediction(prefill, decode)
