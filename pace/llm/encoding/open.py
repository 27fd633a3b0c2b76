"""Opens a checkpoint for vectors and scores: `open_parts`, for encoders and causal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.encoding.causal import LAST, CausalEmbedder
from pace.llm.encoding.embedder import Embedder, Pooling
from pace.llm.encoding.load import open_encoder
from pace.llm.encoding.pooling import Dense, dense_of, make_layers
from pace.llm.encoding.settings import EncodingSettings, read_settings
from pace.llm.engine.driver import EngineDriver
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.load import open_model
from pace.llm.loading.options import DTYPES, LoadOptions
from pace.llm.models.encoders.encoder_list import find_encoder
from pace.llm.models.model import Model
from pace.llm.models.model_list import read_config
from pace.ops.protocol import Ops

MEAN: Pooling = ("mean",)
SANE_LENGTH = 10**9
"""Tokenizers without a maximum length give a larger one."""


@dataclass(frozen=True)
class Parts:
    """The parts of an `EmbeddingModel`."""

    embedder: Embedder
    model: Model
    tokenizer: Any
    config: Mapping[str, Any]
    """The parsed config.json."""
    settings: EncodingSettings
    pooling: Pooling
    layers: list[Dense | None]
    """What is done with pooled rows; None divides them by their length."""

    @property
    def ops(self) -> Ops:
        return self.model.ops


def open_parts(options: LoadOptions, keeps_dtype: bool) -> Parts:
    """Finds and loads a checkpoint. With `keeps_dtype`, weights have the dtype of its config, instead of the options'.

    Errors of config and settings are raised before weights are read or downloaded. Raises the errors of `open_encoder`
    and `open_model`, and those of `read_settings`."""

    def look(path: Path) -> Checkpoint:
        checkpoint = Checkpoint(path)
        _settings_of(checkpoint)  # first, since a model of other modules may have no config.json
        if find_encoder(checkpoint.config) is None:
            read_config(checkpoint.config, embeds=True)
        return checkpoint

    checkpoint = look(find_checkpoint(options.model_name_or_path, **options.hub, check=look))
    options = replace(options, model_name_or_path=checkpoint.path, revision=None, media=False)
    if keeps_dtype:
        options = replace(options, dtype=stored_dtype(checkpoint))
    checkpoint.forget_vocabulary()
    if find_encoder(checkpoint.config) is None:
        loaded = open_model(options, embeds=True)
        driver = EngineDriver(loaded.engine, reload="EmbeddingModel(...)")
        parts = causal_parts(driver, loaded.model, loaded.tokenizer, checkpoint)
    else:
        encoder = open_encoder(options)
        parts = _parts(encoder.driver, encoder.driver.encoder, encoder.tokenizer, checkpoint, MEAN)
    if checkpoint.gguf is not None:
        checkpoint.gguf.close()
    return parts


def causal_parts(driver: EngineDriver, model: Model, tokenizer: Any, checkpoint: Checkpoint) -> Parts:
    """Makes the parts of a loaded causal model. Raises the errors of `read_settings`."""
    embedder = CausalEmbedder(driver, checkpoint.config.get("pad_token_id"))
    return _parts(embedder, model, tokenizer, checkpoint, LAST)


def _parts(embedder: Embedder, model: Model, tokenizer: Any, checkpoint: Checkpoint, default: Pooling) -> Parts:
    settings = _settings_of(checkpoint)
    pooling, size = settings.pooling or default, embedder.hidden_size
    if settings.pooled_size not in (None, size):
        raise ValueError(
            f"{checkpoint.path}: the Pooling is for rows of {settings.pooled_size} floats, but the model has {size}"
        )
    if checkpoint.gguf is None:
        layers = make_layers(model.ops, size * len(pooling), settings.after)
    else:  # a file does not say whether its vectors are normalised; llama.cpp does it
        layers = [*_dense_layers(model.ops, checkpoint.gguf, size), None]
    return Parts(embedder, model, tokenizer, checkpoint.config, settings, pooling, layers)


def _settings_of(checkpoint: Checkpoint) -> EncodingSettings:
    if checkpoint.gguf is None:
        return read_settings(checkpoint.path)
    file = checkpoint.gguf
    return EncodingSettings(pooling=(file.pooling,) if file.pooling else None, asks=file.asks)


def _dense_layers(ops: Ops, file: GgufCheckpoint, size: int) -> list[Dense]:
    """The matrices of a GGUF file that apply to pooled rows of `size` floats. Raises ValueError if they do not fit."""
    layers = []
    for name in file.after_pooling:
        weight = file.dense(name)
        if weight.shape[1] != size:
            raise ValueError(
                f"{file.path}: {name} is for rows of {weight.shape[1]} floats, but the rows before have {size}"
            )
        layers.append(dense_of(ops, weight))
        size = layers[-1].size
    return layers


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that a checkpoint's config states for its weights; float32 if it states none that pace stores. For a
    GGUF file, the type of its floats."""
    if checkpoint.gguf is not None:
        return {"F16": "float16", "BF16": "bfloat16"}.get(str(checkpoint.gguf.file_type), "float32")
    config = checkpoint.config
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if (dtype := str(fields.get(name)).removeprefix("torch.")) in DTYPES:
                return dtype
    return "float32"
