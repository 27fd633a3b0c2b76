"""Opens an encoder: `open_encoder`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pace.checkpoints.reader import CheckpointReader
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.encoding.encoder_driver import EncoderDriver
from pace.llm.encoding.steps import MAX_LENGTH
from pace.llm.loading.checkpoint import Checkpoint, errors_about
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.load import check_paths, find_tokenizer, read_merged, warn_of_missing_kernels, weights_file
from pace.llm.loading.model import check_fits, fill_model, make_encoder
from pace.llm.loading.options import LoadOptions, use_threads
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.runners.encoder import EncoderRunner
from pace.ops import native


class LoadedEncoder(NamedTuple):
    """The result of `open_encoder`."""

    driver: EncoderDriver
    """Runs the encoder."""
    tokenizer: Any
    """The tokenizer of the checkpoint; None if it has none."""
    checkpoint: Checkpoint
    """The checkpoint, for its other files."""


def open_encoder(
    options: LoadOptions, check: Callable[[Any, Encoder, Checkpoint], object] = lambda *loaded: None
) -> LoadedEncoder:
    """Finds the checkpoint of an encoder, checks the options against it and reads its weights.

    Errors that options, config and headers show are raised before weights are read or downloaded. Of the options, those
    about keys and values, drafts and media have no meaning for an encoder. `check(tokenizer, encoder, checkpoint)` is
    called before weights are read, and may raise. Sets the number of kernel threads of this process. Raises the errors
    of `load_model`."""
    check_paths(options)
    if options.ops is native:
        warn_of_missing_kernels()
    threads = use_threads(options.num_threads, options.pin_threads)

    def make(path: Path) -> tuple[Encoder, Checkpoint]:
        checkpoint = Checkpoint(path)
        return _make_encoder(options, checkpoint), checkpoint

    encoder, checkpoint = make(find_checkpoint(options.model_name_or_path, **options.hub, check=make))
    if checkpoint.gguf is None:  # the headers of other formats were not read yet
        CheckpointReader(checkpoint.path).close()
    merged = read_merged(options, checkpoint)
    tokenizer = find_tokenizer(options, checkpoint, encoder)
    check(tokenizer, encoder, checkpoint)
    checkpoint.forget_vocabulary()
    fill_model(encoder, checkpoint, threads, options.progress, merged)
    runner = EncoderRunner(encoder, options.backend, tasks=_read_tasks(encoder, checkpoint))
    driver = EncoderDriver(runner, options.max_seq_len)
    return LoadedEncoder(driver, tokenizer, checkpoint)


def _read_tasks(encoder: Encoder, checkpoint: Checkpoint) -> list[AdapterWeights]:
    """Reads the adapters for tasks of an encoder that has some."""
    if not encoder.instructions:
        return []
    with checkpoint.open_weights(encoder.config.quantization_config) as reader, errors_about(checkpoint):
        return encoder.read_tasks(reader)


def _make_encoder(options: LoadOptions, checkpoint: Checkpoint) -> Encoder:
    """Makes the encoder of a checkpoint, without weights. Raises for errors that config and headers show."""
    encoder = make_encoder(checkpoint, options.weight_dtype, options.ops, options.quantization_config)
    most = encoder.max_length
    if options.max_seq_len is not None and not 1 <= options.max_seq_len <= most:
        raise ValueError(
            f"max_seq_len must be from 1 to {most}, the number of positions in config.json; got {options.max_seq_len} "
            f"(None is {min(most, MAX_LENGTH)})"
        )
    encoder.weights_file = weights_file(options, encoder, checkpoint)
    check_fits(encoder, checkpoint)
    return encoder
