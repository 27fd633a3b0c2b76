"""Makes the model of a checkpoint, then fills it: `make_model` or `make_encoder`, `check_fits`, `fill_model`."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext

import torch

from pace.llm.adapters.merge import MergedReader
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.loading.checkpoint import Checkpoint, errors_about
from pace.llm.loading.memory import check_memory
from pace.llm.loading.packed_weights import ExpertFile
from pace.llm.loading.plan import plan_layout
from pace.llm.loading.progress import progress_bar
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.encoders.encoder import Encoder, labels_of
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.llm.models.head_cost import LARGE, head_cost
from pace.llm.models.model import Model
from pace.llm.models.model_list import read_config
from pace.memory import available_memory_bytes
from pace.ops.protocol import Ops
from pace.quant import QuantizationConfig

logger = logging.getLogger("pace")

MAX_LOADING_THREADS = 16
"""More threads would only wait for the disk. Their pieces (`PIECE_BYTES` each) stay far below 300 MB."""


def make_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    ops: Ops,
    kv_dtype: torch.dtype | None = None,
    quantization: QuantizationConfig | None = None,
    media: bool = False,
    embeds: bool = False,
) -> BaseModelForCausalLM:
    """Makes the model described by a checkpoint's config.json, without weights: it takes no memory and cannot run yet.
    Keys and values are in `kv_dtype`; None for `dtype`. With `media`, it has its towers for images and sound. With
    `embeds`, it has a classifier if the checkpoint does, and needs no head."""
    with errors_about(checkpoint):
        model_class, config = read_config(checkpoint.config, media, embeds)
    model = model_class(config, dtype, ops)
    model.kv_dtype = kv_dtype or dtype
    if embeds:
        model.has_optional_head = True
        if labels := labels_of(checkpoint.config):
            model.add_classifier(len(labels))
    model.quantize(quantization)
    return model


def make_encoder(
    checkpoint: Checkpoint, dtype: torch.dtype, ops: Ops, quantization: QuantizationConfig | None = None
) -> Encoder:
    """Makes the encoder described by a checkpoint's config.json, without weights, like `make_model`."""
    with errors_about(checkpoint):
        encoder_class, config = read_encoder_config(checkpoint.config)
    encoder = encoder_class(config, dtype, ops)
    encoder.quantize(quantization)
    return encoder


def check_fits(model: Model, checkpoint: Checkpoint) -> None:
    """Raises MemoryError if the weights need more than the available memory, from config and headers only. Weights that
    are not downloaded yet are judged if the config says how they are stored."""
    if model.planned_nbytes(model.ops, model.dtype) <= available_memory_bytes():
        return  # quantised checkpoints take less
    try:
        reader = checkpoint.open_weights(model.config.quantization_config)
    except FileNotFoundError:
        if model.config.quantization_config or isinstance(model.weights_file, ExpertFile):
            return
    else:
        with nullcontext() if reader is checkpoint.gguf else reader, errors_about(checkpoint):
            plan_layout(model, reader)
    check_memory(model)


def fill_model(
    model: Model,
    checkpoint: Checkpoint,
    threads: int,
    progress: bool,
    adapter: AdapterWeights | None = None,
) -> None:
    """Loads the weights of a checkpoint, with `adapter` merged into them. Such weights have no packed copy. Raises
    ValueError for an adapter that cannot be merged."""
    started, path = time.perf_counter(), checkpoint.path
    if adapter is not None:
        if isinstance(model.weights_file, ExpertFile):
            raise ValueError(
                f"the adapter {adapter.name!r} cannot be merged into mapped weights; load the adapter without "
                'merge=True, or the model without weights="mapped"'
            )
        model.weights_file = None
    with checkpoint.open_weights(model.config.quantization_config) as reader, errors_about(checkpoint):
        with progress_bar(reader.total_bytes, f"Loading {path.name}", progress) as report:
            source = reader if adapter is None else MergedReader(reader, model, adapter)
            model.load_weights(source, min(threads, MAX_LOADING_THREADS), report)
        seconds = time.perf_counter() - started
        logger.info("%s: %.2f GB from %s in %.1f s", type(model).__name__, reader.total_bytes / 1e9, path, seconds)
    if model.lm_head is None:  # an encoder, or a drafter that uses its target's head
        return
    if (head := head_cost(model, model.ops, model.dtype)).share > LARGE:
        logger.info("%s; QuantizationConfig(lm_head=...) or --lm-head holds it in fewer bits", head)
