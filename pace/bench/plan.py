"""What a model would need and how fast it would be here, from its config alone; of a quantised checkpoint, from its
tensors' types and shapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pace import _C
from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.bench.prediction import efficiencies, predict
from pace.bench.sample import Prompts, Sample
from pace.checkpoints.gguf.file import is_gguf
from pace.llm.models.base_model import BaseModelForCausalLM, TensorReader
from pace.llm.models.checkpoint import Checkpoint
from pace.llm.models.model_list import read_config
from pace.llm.models.model_utils import parse_kv_cache_dtype, use_threads
from pace.ops import native
from pace.quant import QuantizationConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = ("int8", "int4")
"""That are planned for where nobody asks for one."""
LOADED = torch.bfloat16
"""What a model is loaded in where nobody says: of keys and values beside quantised weights, and of matrices that stay
floats."""

PROCESS_BYTES = 300 << 20
"""What Python, torch and the buffers of a step take besides weights and cache."""


@dataclass(frozen=True)
class MappedPlan:
    """A model whose quantised experts stay in a file (`weights="mapped"`)."""

    expert_bytes: int
    """In the file."""
    bytes_in_memory: int
    """Of those, what fits into memory beside all else, with a cache for `batch` sequences of `context` tokens."""
    bytes_read_per_token: int
    """From the disk, once memory is full, where each token chooses its experts as if by lot. Where some are chosen more
    often than others, it is less."""
    fits: bool
    """Whether all else fits into memory."""


@dataclass(frozen=True)
class Plan:
    """One way of running a model. Bytes, tokens, tokens a second."""

    dtype: str
    """Of the weights; or a format that they are held in, or how a quantised checkpoint stores most of them."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Of cache, of the first tokens of a sequence."""
    kv_bytes_per_late_token: int
    """Of later ones, for which layers with a window give back as much as they take."""
    max_context: int
    """The longest sequence, or each of `batch`, that fits into the memory available now, at most what the model was
    made for; 0 where the weights do not fit."""
    prefill_tokens_per_second: float
    """Of a prompt of `prompt` tokens."""
    decode_tokens_per_second: float
    """Of all sequences together."""
    mapped: MappedPlan | None = None
    """None where no experts are quantised."""

    @property
    def fits(self) -> bool:
        return self.max_context > 0


def plan(
    config_json: dict[str, Any],
    limits: Limits | Callable[[], Limits],
    available_bytes: int,
    prompt: int = 512,
    context: int | None = None,
    batch: int = 1,
    kv_cache_dtype: torch.dtype | str = "auto",
    quantization: QuantizationConfig | None = None,
    checkpoint: TensorReader | None = None,
    sample: Sample | None = None,
) -> list[Plan]:
    """One plan for each dtype and each of `FORMATS`, for a prompt of `prompt` tokens and decoding `batch` sequences of
    `context` (None: as many); with `quantization`, or a `checkpoint` (of `quantized_tensors`) that holds quantised
    matrices, the one plan for that. With a `sample`, predictions are corrected by what a few layers of it were measured
    at. Where `limits` is a function, it measures them once all arguments are checked.

    Raises what reading the config and planning for the checkpoint's tensors raise, NotImplementedError for a config of
    a quantised checkpoint without its tensors, and ValueError for sequences longer than the model's positions or an
    unknown `kv_cache_dtype`."""
    model_class, config = read_config(config_json)
    if config.quantization_config and checkpoint is None:
        raise NotImplementedError(
            f"config.json: quantization_config: the checkpoint is quantised already ({config.quantization_config.name}), and its tensors alone tell what they take; "
            "they are not here: download it, and give its directory"
        )
    model = model_class(config, LOADED, native)
    context = prompt if context is None else context
    if min(prompt, context, batch) < 1:
        raise ValueError(f"prompt, context and batch must be at least 1; got {prompt}, {context}, {batch}")
    if max(prompt, context) > config.max_position_embeddings:
        raise ValueError(
            f"{max(prompt, context)} tokens are more than this model has positions for: {config.max_position_embeddings} (max_position_embeddings)"
        )
    plans, asked = [], Prompts(prompt, context, batch)
    for name, dtype in _ways(model, quantization, checkpoint):
        kv_dtype = parse_kv_cache_dtype(kv_cache_dtype, dtype)
        costs = Costs.of(model, dtype, kv_dtype)
        limits = limits if isinstance(limits, Limits) else limits()
        found = _plan(name, dtype, costs, config.max_position_embeddings, limits, available_bytes, asked)
        if sample is not None:
            corrections = sample.corrections(dtype, kv_dtype, model.quantization, limits, asked)
            found = replace(
                found,
                prefill_tokens_per_second=found.prefill_tokens_per_second / corrections.prefill,
                decode_tokens_per_second=found.decode_tokens_per_second / corrections.decode,
            )
        plans.append(found)
    return plans


def _ways(
    model: BaseModelForCausalLM, quantization: QuantizationConfig | None, checkpoint: TensorReader | None
) -> Iterator[tuple[str, torch.dtype]]:
    """Name and dtype of each way of holding the weights, while the matrices of `model` are planned for it."""
    model.quantize(quantization)
    if checkpoint is not None:
        model.plan_layout(checkpoint)
        if model.usual_layout is not None:
            yield model.held_as, LOADED
            return
    if quantization is not None:
        yield str(quantization.format), LOADED
        return
    yield from DTYPES.items()
    for name in FORMATS:
        model.quantize(QuantizationConfig(name))
        yield name, LOADED


@contextmanager
def quantized_tensors(path: Path, config_json: dict[str, Any]) -> Iterator[TensorReader | None]:
    """Returns the tensors of a checkpoint that may be quantised, for `plan`.

    None for a checkpoint of floats, whose config says all, and for one whose weights are not here. Raises what opening
    it raises."""
    _, config = read_config(config_json)
    reader = None
    if is_gguf(path) or config.quantization_config:
        with suppress(FileNotFoundError):  # of a Hub id, where the config alone is downloaded
            reader = Checkpoint(path).open_weights(config.quantization_config)
    with nullcontext() if reader is None else reader:
        yield reader


def _plan(
    name: str,
    dtype: torch.dtype,
    costs: Costs,
    max_positions: int,
    limits: Limits,
    available_bytes: int,
    asked: Prompts,
) -> Plan:
    prompt, context, batch = asked
    room = available_bytes - costs.weight_bytes - PROCESS_BYTES
    layers, head = efficiencies(limits.isa, dtype, costs)
    predicted = predict(costs, layers, limits, prompt, context, batch, head)
    return Plan(
        dtype=name,
        weight_bytes=costs.weight_bytes,
        kv_bytes_per_token=costs.cached_bytes(1),
        kv_bytes_per_late_token=costs.kv_bytes_per_late_token,
        max_context=bisect_right(range(1, max_positions + 1), room // batch, key=costs.cached_bytes),
        prefill_tokens_per_second=prompt / predicted.prefill_seconds,
        decode_tokens_per_second=batch / predicted.step_seconds,
        mapped=_mapped_plan(costs, available_bytes, context, batch) if costs.mappable_bytes else None,
    )


def _mapped_plan(costs: Costs, available_bytes: int, context: int, batch: int) -> MappedPlan:
    experts = costs.mappable_bytes
    room = available_bytes - (costs.weight_bytes - experts) - PROCESS_BYTES - batch * costs.cached_bytes(context)
    held = min(experts, max(0, room))
    return MappedPlan(
        expert_bytes=experts,
        bytes_in_memory=held,
        bytes_read_per_token=round(costs.mapped_bytes(batch) * (1 - held / experts) / batch),
        fits=room >= 0,
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
