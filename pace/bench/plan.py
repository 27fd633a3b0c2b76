"""Predicts the memory and speed of a model on this machine from its config. A quantised checkpoint also needs the types
and shapes of its tensors."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from pace import _C
from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.bench.prediction import efficiencies, predict
from pace.bench.sample import Prompts, Sample
from pace.bench.towers import IMAGE_TOKENS, Encoding, TowerPlan, encodings_of
from pace.llm.cache.state_cache import num_slots_of
from pace.llm.engine.media import MEDIA_CACHE_BYTES
from pace.llm.layers.linear import OutOfRange
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.fill import TensorReader
from pace.llm.loading.options import parse_kv_cache_dtype, use_threads
from pace.llm.loading.plan import plan_layout
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.head_cost import HeadCost, head_cost
from pace.llm.models.model_list import read_config
from pace.ops import native
from pace.quant import QuantizationConfig

logger = logging.getLogger("pace")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = ("int8", "int4")
"""Formats planned for by default."""
LOADED = torch.bfloat16
"""Default dtype of a loaded model: of matrices that stay floats, and of keys and values if weights are quantised."""

PROCESS_BYTES = 300 << 20
"""Memory of Python, torch and the buffers of a step, in addition to weights and cache."""


@dataclass(frozen=True)
class MappedPlan:
    """A model whose quantised experts stay in a file (`weights="mapped"`)."""

    expert_bytes: int
    """Bytes of experts in the file."""
    bytes_in_memory: int
    """Part of `expert_bytes` that fits into memory next to everything else, with a cache for `batch` sequences of
    `context` tokens."""
    bytes_read_per_token: int
    """Bytes read from the disk per token once memory is full, if experts are chosen uniformly at random. It is less if
    some experts are chosen more often."""
    fits: bool
    """True if everything except the experts fits into memory."""


@dataclass(frozen=True)
class Plan:
    """Memory and speed of a model for one dtype or format. Units: bytes, tokens, tokens per second."""

    dtype: str
    """Dtype of the weights, the format to quantise them to, or the format of most weights of a quantised checkpoint."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Cache bytes per token at the start of a sequence."""
    kv_bytes_per_late_token: int
    """Cache bytes per token of a long sequence, in which layers with a window free as much as they take."""
    state_bytes_per_sequence: int
    """Cache bytes of each sequence for layers with a state, which do not grow with its length; 0 without such
    layers."""
    max_context: int
    """Length of the longest sequence that fits into the available memory `batch` times. It is at most what the model
    was made for, and 0 if the weights do not fit."""
    max_sequences: int
    """Number of sequences of `context` tokens that fit into the available memory."""
    prefill_tokens_per_second: float
    """Speed for a prompt of `prompt` tokens."""
    decode_tokens_per_second: float
    """Speed of all sequences together."""
    mapped: MappedPlan | None = None
    """None if no experts are quantised."""
    file_weights: int = 0
    """Elements of tables that stay in the checkpoint's file and take no memory. They are no part of `weight_bytes`."""
    head: HeadCost | None = None
    """Size of the LM head, and its share of the weights that a token reads."""
    towers: tuple[TowerPlan, ...] = ()
    """Encoding of an image and of a clip. Their weights are part of `weight_bytes`. `max_context` leaves room for one
    encoding, and for the cache of rows."""

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
    image_tokens: int = IMAGE_TOKENS,
) -> list[Plan]:
    """Plans for a prompt of `prompt` tokens, and for decoding `batch` sequences of `context` tokens (None: `prompt`).
    If the model has towers, also for an image of `image_tokens` tokens, and a clip of a minute or its longest.

    Returns one plan for each dtype and each of `FORMATS`. With `quantization`, or a `checkpoint` (of
    `quantized_tensors`) with quantised matrices, returns a single plan. A `sample` corrects the predictions by
    measuring a few layers. If `limits` is a function, it is called after all arguments are checked.

    Raises what reading the config and planning for the checkpoint's tensors raise. NotImplementedError: the config is
    that of a quantised checkpoint, and its tensors are missing. ValueError: sequences longer than the model's
    positions, or an unknown `kv_cache_dtype`."""
    model_class, config = read_config(config_json, media=True)
    if config.quantization_config and checkpoint is None:
        raise NotImplementedError(
            f"config.json: the checkpoint is quantised already ({config.quantization_config.name}), and a plan needs "
            "its tensors: download it, and give its directory"
        )
    model = model_class(config, LOADED, native)
    context = prompt if context is None else context
    if min(prompt, context, batch) < 1:
        raise ValueError(f"prompt, context and batch must be at least 1; got {prompt}, {context}, {batch}")
    if image_tokens < 1:
        raise ValueError(f"max_image_tokens must be at least 1; got {image_tokens}")
    if (longest := max(prompt, context)) > (limit := model.max_position_embeddings):
        raise ValueError(f"{longest} tokens are more than this model has positions for: {limit} ({model.length_field})")
    plans, asked = [], Prompts(prompt, context, batch)
    encodings: list[Encoding] | None = None
    for name, dtype in _ways(model, quantization, checkpoint):
        if encodings is None:  # a checkpoint may lack towers
            encodings = list(encodings_of(model.towers, image_tokens))
        kv_dtype = parse_kv_cache_dtype(kv_cache_dtype, dtype)
        costs = Costs.of(model, dtype, kv_dtype)
        limits = limits if isinstance(limits, Limits) else limits()
        towers = tuple(encoding.plan(dtype, limits) for encoding in encodings)
        for_media = MEDIA_CACHE_BYTES + max(tower.encode_bytes for tower in towers) if towers else 0
        room = available_bytes - for_media
        found = _plan(name, dtype, costs, model.max_position_embeddings, limits, room, asked)
        found = replace(found, towers=towers, head=head_cost(model, native, dtype))
        if sample is not None:
            try:
                corrections = sample.corrections(dtype, kv_dtype, model.quantization, limits, asked)
            except OutOfRange as error:
                logger.warning("%s is left out: %s", name, error)
                continue
            found = replace(
                found,
                prefill_tokens_per_second=found.prefill_tokens_per_second / corrections.prefill,
                decode_tokens_per_second=found.decode_tokens_per_second / corrections.decode,
            )
        plans.append(found)
    if not plans:
        raise ValueError("no dtype can hold the checkpoint's weights")
    return plans


def _ways(
    model: BaseModelForCausalLM, quantization: QuantizationConfig | None, checkpoint: TensorReader | None
) -> Iterator[tuple[str, torch.dtype]]:
    """Yields the name and dtype of each way to store the weights. At each yield, the matrices of `model` are planned
    for it."""
    model.quantize(quantization)
    if checkpoint is not None:
        plan_layout(model, checkpoint)
        if model.usual_layout is not None:
            yield model.storage_name, LOADED
            return
    if quantization is not None:
        yield model.storage_name, LOADED
        return
    yield from DTYPES.items()
    for name in FORMATS:
        model.quantize(QuantizationConfig(name))
        yield name, LOADED


@contextmanager
def quantized_tensors(checkpoint: Checkpoint) -> Iterator[TensorReader | None]:
    """Opens the tensors of a checkpoint that may be quantised, for `plan`.

    Yields None for a checkpoint of floats, whose config suffices, and for one whose weights are not on this machine.
    Raises what opening it raises."""
    _, config = read_config(checkpoint.config)
    reader = None
    if checkpoint.gguf is not None or config.quantization_config:
        with suppress(FileNotFoundError):  # a Hub id: only its config is downloaded
            reader = checkpoint.open_weights(config.quantization_config)
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
    max_context, max_sequences = _capacity(costs, room, max_positions, context, batch)
    layers, head = efficiencies(limits.isa, dtype, costs)
    predicted = predict(costs, layers, limits, prompt, context, batch, head)
    return Plan(
        dtype=name,
        weight_bytes=costs.weight_bytes,
        kv_bytes_per_token=costs.position_bytes(1),
        kv_bytes_per_late_token=costs.kv_bytes_per_late_token,
        state_bytes_per_sequence=costs.slot_bytes,
        max_context=max_context,
        max_sequences=max_sequences,
        prefill_tokens_per_second=prompt / predicted.prefill_seconds,
        decode_tokens_per_second=batch / predicted.step_seconds,
        mapped=_mapped_plan(costs, available_bytes, context, batch) if costs.mappable_bytes else None,
        file_weights=costs.file_weights,
    )


def _capacity(costs: Costs, room: int, max_positions: int, context: int, batch: int) -> tuple[int, int]:
    """Returns the maximum length of `batch` sequences in a cache of `room` bytes, and the maximum number of sequences
    of `context` tokens. States have a part of the cache of their own."""
    num_slots = num_slots_of(costs.cache, costs.cache.slots(), room)
    for_positions = room - num_slots * costs.slot_bytes
    if for_positions < 0:
        return 0, 0
    longest = bisect_right(range(1, max_positions + 1), for_positions // batch, key=costs.position_bytes)
    if not costs.states:
        return longest, for_positions // costs.position_bytes(context)
    fitting = for_positions // costs.position_bytes(context) if costs.attention else num_slots
    return longest if batch <= num_slots else 0, min(num_slots, fitting)


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
    """Measures the limits now, with the number of threads that a model would use."""
    from pace.bench import limits

    before = _C.get_num_threads()
    use_threads(num_threads)
    try:
        return limits.measure(seconds)
    finally:
        _C.set_num_threads(before)
