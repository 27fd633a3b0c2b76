"""Opens a model: `open_model` with its engine, `load_model` without."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pace import _C, __version__, env
from pace.batch import BLOCK_SIZE
from pace.checkpoints.reader import CheckpointReader
from pace.llm.adapters.read import read_adapter
from pace.llm.adapters.slots import AdapterSlots
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.cache.identity import ModelIdentity, Setting
from pace.llm.cache.manager import CacheManager, spec_of
from pace.llm.cache.state_cache import budget_for
from pace.llm.configs import KVCacheType, SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.model import MAX_LOADING_THREADS, check_fits, fill_model, make_model
from pace.llm.loading.options import LoadOptions, use_threads
from pace.llm.loading.packed_weights import ExpertFile, PackedCopy, WeightsFile, check_has_experts
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model import Model
from pace.llm.models.takes_media import UNKNOWN_ID
from pace.llm.operators import read_backend
from pace.llm.processors.processor import Processors
from pace.llm.processors.prompts import NO_MEDIA, PromptEncoder, id_of
from pace.llm.processors.registry import load_processors, make_processors, needs_settings
from pace.llm.processors.settings import FILES
from pace.llm.runners import make_runner
from pace.llm.speculation.build import Speculation
from pace.llm.speculation.configs import MtpConfig
from pace.memory import available_memory_bytes, format_bytes
from pace.naming import dtype_name
from pace.ops import native

logger = logging.getLogger("pace")


class Loaded(NamedTuple):
    """The result of `open_model`."""

    model: BaseModelForCausalLM
    """The model, with its weights."""
    engine: Engine
    """The engine that runs the model."""
    tokenizer: Any
    """The transformers tokenizer of the checkpoint; None if it has none."""
    defaults: SamplingConfig
    """The checkpoint's generation settings."""
    checkpoint: Checkpoint
    """The checkpoint, for its other files."""
    encoder: PromptEncoder = NO_MEDIA
    """Puts images and sound into prompts, if the model has towers for them."""


def load_model(options: LoadOptions) -> BaseModelForCausalLM:
    """Loads only the model of a checkpoint, ready to run: no tokenizer, no draft model and no engine. Sets the number
    of kernel threads of this process.

    **Memory**: at most 1.1 times the packed weights + 300 MB, as files are mapped, packed and released in small pieces.

    Raises only these errors, for any contents of the files:

    - FileNotFoundError: no such model, no config, no weights, a missing shard.
    - PermissionError: gated, or not readable.
    - NotImplementedError: an unsupported architecture, config field or weight format.
    - ValueError: anything damaged, contradictory or out of range.
    - MemoryError: not enough memory for the weights.

    A file that shrinks while it is read is the one exception: the system ends the process with SIGBUS.
    """
    threads = use_threads(options.num_threads, options.pin_threads)
    model, checkpoint = _find_model(options)
    fill_model(model, checkpoint, threads, options.progress, read_merged(options, checkpoint))
    return model


def open_model(
    options: LoadOptions, check_tokenizer: Callable[[Any], object] = lambda tokenizer: None, embeds: bool = False
) -> Loaded:
    """Finds a checkpoint, checks the options against it, reads its weights, and makes the engine.

    Errors in the options and the small files are found before gigabytes of weights are read or downloaded. Errors that
    options, config and headers show are found before the tokenizer is read. Sets the number of kernel threads of this
    process. `check_tokenizer` is called before weights are read, and may raise an error for a tokenizer, or for None.
    With `embeds`, the model is for rows and scores of texts: it may be a classifier, and needs no LM head.

    Raises the errors of `load_model`, and TypeError for generation settings of the wrong type.
    """
    ops, progress = options.ops, options.progress
    check_paths(options)
    if ops is native:
        warn_of_missing_kernels()
    threads = use_threads(options.num_threads, options.pin_threads)
    model, checkpoint = _find_model(options, embeds)
    if checkpoint.gguf is None:  # the headers of other formats were not read yet
        CheckpointReader(checkpoint.path).close()
    merged = read_merged(options, checkpoint)
    tokenizer = find_tokenizer(options, checkpoint, model)
    check_tokenizer(tokenizer)
    defaults = SamplingConfig() if embeds else _read_defaults(checkpoint, tokenizer, model)
    processors = _read_processors(checkpoint, model)
    _find_placeholders(model, processors, tokenizer)
    checkpoint.forget_vocabulary()
    speculation = Speculation.prepare(options.spec_config, model, checkpoint, tokenizer, ops, options.hub)
    share = speculation.cache_share(model, options.kv_cache_type)
    if share:
        _check_budget(options, model, share)
    if speculation.checkpoint is not None:
        speculation.model.weights_file = weights_file(options, speculation.model, speculation.checkpoint)

    fill_model(model, checkpoint, threads, progress, merged)
    speculation.load(model, threads, progress)

    budget = _cache_budget(options, model)
    keeps_prefixes = options.prefix_bytes != 0
    drafter = speculation.drafter(model, ops, options.backend, int(budget * share), keeps_prefixes)
    engine = Engine.create(
        make_runner(model, options.backend),
        ops,
        budget - drafter.memory().cache_budget,
        drafter,
        options.max_seq_len,
        cache_options=options.cache_options,
        media_cache_bytes=options.media_bytes,
        max_tokens_per_step=tokens_per_step(model),
    )
    engine.model.adapters = AdapterSlots(model, options.max_adapters, options.max_lora_rank)
    engine.identity = _identity(options, model, checkpoint, threads, merged)
    encoder = _make_encoder(options, processors, model, tokenizer, checkpoint.missing_towers)
    return Loaded(model, engine, tokenizer, defaults, checkpoint, encoder)


def _read_processors(checkpoint: Checkpoint, model: BaseModelForCausalLM) -> Processors:
    """Reads the settings of the processors that the model's towers need. Raises ValueError and NotImplementedError for
    settings, and the errors of reading their files."""
    if not model.towers:
        return Processors()
    if checkpoint.gguf is not None:
        towers = checkpoint.gguf.towers
        read = lambda section: (towers.settings[section], str(towers.path))
        return make_processors(towers.config["architectures"][0], towers.config, read)
    if needs_settings(checkpoint.config) and not any((checkpoint.path / name).is_file() for name in FILES):
        text = "%s has neither %s: images and sound are only taken as arrays of transformers' processor"
        logger.warning(text, checkpoint.path, " nor ".join(FILES))
        return Processors()
    return load_processors(checkpoint.path, checkpoint.config)


def _find_placeholders(model: BaseModelForCausalLM, processors: Processors, tokenizer: Any) -> None:
    """Gives towers the ids of their placeholders where config.json has none: those of the tokenizer. Raises ValueError
    for a tokenizer without them."""
    for tower in model.towers:
        if tower.placeholder == UNKNOWN_ID and tokenizer is not None:
            tower.placeholder = id_of(processors.of_kind[tower.kind].token, tokenizer)


def _make_encoder(
    options: LoadOptions, processors: Processors, model: BaseModelForCausalLM, tokenizer: Any, missing: str
) -> PromptEncoder:
    """Makes the encoder of prompts, with the processors of the towers that the model has. `missing`: as
    `Checkpoint.missing_towers`."""
    kinds = {tower.kind for tower in model.towers}
    found = {kind: processor for kind, processor in processors.of_kind.items() if kind in kinds}
    if not found or tokenizer is None:
        return PromptEncoder(Processors(missing=missing))
    return PromptEncoder(Processors(**found), tokenizer, options.max_image_tokens)


def _find_model(options: LoadOptions, embeds: bool = False) -> tuple[BaseModelForCausalLM, Checkpoint]:
    """Finds the checkpoint, downloaded if needed, and makes its model, without weights."""

    def make(path: Path) -> tuple[BaseModelForCausalLM, Checkpoint]:
        checkpoint = Checkpoint(path, options.media, options.mmproj)
        return _make_model(options, checkpoint, embeds), checkpoint

    media = options.media and options.mmproj is None
    return make(find_checkpoint(options.model_name_or_path, **options.hub, check=make, media=media))


def _make_model(options: LoadOptions, checkpoint: Checkpoint, embeds: bool) -> BaseModelForCausalLM:
    """Makes the model of a checkpoint, without weights; their files need not be downloaded yet. Raises for errors that
    config and headers show: an architecture, an option, too little memory."""
    dtypes = options.weight_dtype, options.ops, options.kv_dtype
    model = make_model(checkpoint, *dtypes, options.quantization_config, options.media, embeds)
    if isinstance(options.spec_config, MtpConfig):
        model.add_mtp()
    model.weights_file = weights_file(options, model, checkpoint)
    _check_length(options, model)
    _check_budget(options, model, Fraction(0))
    check_fits(model, checkpoint)
    return model


def weights_file(options: LoadOptions, model: Model, checkpoint: Checkpoint) -> WeightsFile | None:
    """The file of packed weights, present or to be written; None if weights are only kept in memory."""
    folder = options.weights_cache and Path(options.weights_cache).expanduser()
    if options.weights == "mapped":
        check_has_experts(model)
        return ExpertFile(checkpoint.path, folder)
    folder = env.cache_directory() if folder is None else folder
    return PackedCopy(checkpoint.path, folder) if folder and options.ops is native else None


def check_paths(options: LoadOptions) -> None:
    """Raises the errors of `find_checkpoint` for a tokenizer or draft model given by path, before anything is read or
    downloaded."""
    for other in (options.tokenizer_name_or_path, getattr(options.spec_config, "model", None)):
        if other is not None and _is_path(other):
            find_checkpoint(other, weights=False)


def _is_path(path_or_id: str | Path) -> bool:
    """True unless it is a Hub id: it exists here, or is written as a path."""
    text = os.fspath(path_or_id)
    return (
        isinstance(path_or_id, os.PathLike)
        or text.startswith((".", "/", "~"))
        or text.endswith(("/", ".gguf"))
        or text.count("/") > 1
        or os.path.exists(text)
    )


def warn_of_missing_kernels() -> None:
    """Logs a warning if this build has no kernels for the best instruction set of this CPU."""
    best = _C.best_isa()
    if best not in _C.built_isas():
        logger.warning(
            "this build of pace has no kernels for %s, the best instruction set of this CPU, so it is slower than it "
            "could be; build it with PACE_TABLES=all (`pace env` lists the sets of this build)",
            best,
        )


def tokens_per_step(model: BaseModelForCausalLM) -> int:
    """Maximum number of tokens in a step. A step of many tokens reads all experts of a mixture. AMX multiplies so fast
    that this reading limits it, so it takes more tokens per step."""
    return 2048 if model.ops is native and _C.isa() == "amx" and any(model.stacks()) else 512


def _check_length(options: LoadOptions, model: BaseModelForCausalLM) -> None:
    most = model.max_position_embeddings
    if options.max_seq_len is not None and not 2 <= options.max_seq_len <= most:
        raise ValueError(
            f"max_seq_len must be from 2 to {most}, which is {model.length_field} in config.json; got "
            f"{options.max_seq_len}"
        )


def find_tokenizer(options: LoadOptions, checkpoint: Checkpoint, model: Model) -> Any:
    """The tokenizer of the options, or of the checkpoint; None if that has none."""
    if options.tokenizer_name_or_path is None:
        return checkpoint.load_tokenizer(model.vocab_size, required=False)
    return Checkpoint(_tokenizer_path(options, checkpoint)).load_tokenizer(model.vocab_size)


def _tokenizer_path(options: LoadOptions, checkpoint: Checkpoint) -> Path:
    if options.tokenizer_name_or_path is None:
        return checkpoint.path
    return find_checkpoint(options.tokenizer_name_or_path, **options.hub | {"revision": None}, weights=False)


def read_merged(options: LoadOptions, checkpoint: Checkpoint) -> AdapterWeights | None:
    """The adapter to merge into the weights; None for none."""
    return None if options.adapter is None else read_adapter(options.adapter, str(options.adapter), checkpoint)


def _identity(
    options: LoadOptions,
    model: BaseModelForCausalLM,
    checkpoint: Checkpoint,
    threads: int,
    merged: AdapterWeights | None,
) -> ModelIdentity:
    """What saved keys and values must agree with. Numbers of threads and tokens are not a part of it."""
    backend = str(read_backend(options.backend)).removesuffix("-eager")  # the same bits
    isa = torch.backends.cpu.get_cpu_capability().lower() if backend == "torch" else _C.isa()
    quantization = options.quantization_config
    settings = {
        "pace": Setting(__version__, "the version of pace", "use pace {}"),
        "dtype": Setting(dtype_name(model.dtype), "the dtype of the weights", "load the model with dtype={!r}"),
        "quantization": Setting(
            "none" if quantization is None else repr(quantization.to_dict()),
            "the quantisation",
            "load the model with quantization={}",
        ),
        "kv_cache_dtype": Setting(
            dtype_name(model.kv_spec.dtype), "the dtype of keys and values", "load the model with kv_cache_dtype={!r}"
        ),
        "kv_cache_type": Setting(
            str(KVCacheType(options.kv_cache_type).value), "the cache type", "load the model with kv_cache_type={!r}"
        ),
        "backend": Setting(backend, "the backend", "load the model with backend={!r}"),
        "isa": Setting(isa, "the instruction set", "set PACE_ISA={} if this CPU has it"),
        "kept_before": Setting(
            str(model.kept_before),
            "the number of positions kept before windows for a drafter",
            "load the model with the same spec_config",
        ),
    }
    workers = min(threads, MAX_LOADING_THREADS)
    end = "" if merged is None else f" with {merged.digest}"
    digest = lambda version: checkpoint.digest(_tokenizer_path(options, checkpoint), workers, version) + end
    return ModelIdentity(settings, digest, checkpoint.mmproj_digest)


def _read_defaults(checkpoint: Checkpoint, tokenizer: Any, model: BaseModelForCausalLM) -> SamplingConfig:
    """The checkpoint's generation settings: generation_config.json, then config.json, then the tokenizer. The
    tokenizer's own end token always ends a text."""
    vocab_size = model.vocab_size
    directory, config = checkpoint.path, checkpoint.config
    source = f"{directory}/generation_config.json"
    defaults = SamplingConfig.from_dict(checkpoint.generation_config, source=source)
    special = {name: config.get(name) for name in ("eos_token_id", "pad_token_id")}
    defaults.merge_from(SamplingConfig.from_dict(special, source=f"{directory}/config.json"))
    defaults.merge_from(SamplingConfig(**{name: getattr(tokenizer, name, None) for name in special}))
    if defaults.eos_token_id is not None:
        own = [token for token in [getattr(tokenizer, "eos_token_id", None)] if token is not None]
        ends = [*defaults.eos_token_id, *own, *getattr(tokenizer, "turn_ends", ())]
        defaults.eos_token_id = list(dict.fromkeys(ends))
        known = [token for token in defaults.eos_token_id if token < vocab_size]
        if len(known) < len(defaults.eos_token_id):
            logger.warning(
                "some of the checkpoint's end tokens %s are not among the model's %d ids",
                defaults.eos_token_id,
                vocab_size,
            )
        defaults.eos_token_id = known or None
    if defaults.suppress_tokens is not None:
        defaults.suppress_tokens = [token for token in defaults.suppress_tokens if token < vocab_size]
    return defaults


def _check_budget(options: LoadOptions, model: BaseModelForCausalLM, draft_share: Fraction) -> None:
    """Raises ValueError if the cache has no room for one block, or for one sequence of `max_seq_len` tokens, after
    subtracting a draft model's share. Also for inconsistent sizes."""
    budget = options.cache_budget(available_memory_bytes())
    if not options.takes_share:
        length = options.max_seq_len
        spec = spec_of(model.kv_spec, options.kv_cache_type)
        max_drafts = options.cache_options["max_drafts"]
        least = math.ceil(budget_for(spec, length or 1, tokens_per_step(model), max_drafts) / (1 - draft_share))
        if budget < least:
            why = f"max_seq_len={length} tokens take" if length else f"a block of {BLOCK_SIZE} tokens takes"
            raise ValueError(
                f"kv_cache_bytes={options.kv_cache_bytes} is too small: {why} {least} bytes "
                f"({format_bytes(least)}) in this model{' and its draft model' if draft_share else ''}"
            )
    CacheManager(model.kv_spec, int(budget * (1 - draft_share)), **options.cache_options)


def _cache_budget(options: LoadOptions, model: BaseModelForCausalLM) -> int:
    """Bytes for the keys and values of all models, once the weights are in memory. Pages of a packed copy are reported
    as available but must stay in memory."""
    available = available_memory_bytes(kept=model.mapped_nbytes if options.weights == "memory" else 0)
    budget = options.cache_budget(available)
    if budget > available:
        logger.warning(
            (
                "kv_cache_bytes=%s is more than the %s of free memory; if the cache grows beyond that, the system ends "
                "the process"
            ),
            options.kv_cache_bytes,
            format_bytes(available),
        )
    return budget
