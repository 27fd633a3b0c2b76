"""Loads a model and makes its engine: `LoadOptions`, then `open`."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from pace import _C, env
from pace.batch import BLOCK_SIZE
from pace.checkpoints.reader import CheckpointReader
from pace.llm.aliases import model_options
from pace.llm.cache.groups import most_bytes
from pace.llm.cache.manager import CacheManager, check_cache_options, spec_of
from pace.llm.configs import KVCacheType, SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.checkpoint import Checkpoint
from pace.llm.models.hf_utils import find_checkpoint
from pace.llm.models.model_utils import (
    check_room,
    fill_model,
    make_model,
    parse_dtype,
    parse_kv_cache_dtype,
    read_threads,
    select_ops,
    use_threads,
)
from pace.llm.models.packed_weights import ExpertFile, PackedCopy, WeightsFile, check_has_experts
from pace.llm.operators import OperatorConfig
from pace.llm.runners import make_runner
from pace.llm.speculation.build import Speculation, check_spec_config
from pace.llm.speculation.configs import SpecConfig
from pace.memory import available_memory_bytes, format_bytes, parse_bytes
from pace.ops import native
from pace.quant import QuantizationConfig, read_quantization

logger = logging.getLogger("pace")

CACHE_SHARE = 0.5
"""Share of the memory available after loading that the key/value cache may grow to."""


@dataclass(frozen=True)
class LoadOptions:
    """What to load and how: the arguments of `LLMModel`.

    Raises TypeError or ValueError for values that are invalid for any checkpoint, and for values that contradict each
    other. `open` checks the rest against the checkpoint, before it reads weights.
    """

    model_name_or_path: str | Path
    """A local directory, a GGUF file, or a Hub id such as "org/name" or "org/name:Q4_K_M" (docs/models.md)."""
    tokenizer_name_or_path: str | Path | None = None
    """Location of the tokenizer, if it is not with the model. A model without a tokenizer takes token ids."""
    dtype: torch.dtype | str = torch.bfloat16
    """Dtype of the weights in memory (bfloat16, float16, float32, or their names), independent of the checkpoint's
    dtype."""
    kv_cache_type: KVCacheType | str = "paged"
    """How a sequence's part of the cache grows, with the same results. "paged": blocks that sequences share. "bmc": one
    contiguous run with spare rows, which moves when they are used up. "dynamic": one run that moves whenever it is too
    short (docs/cache.md)."""
    spec_config: SpecConfig | None = None
    """Source of drafts, for faster decoding with the same tokens (docs/decoding.md): a PromptLookupConfig,
    DraftModelConfig or PardConfig. A draft model is loaded with the model's dtypes, quantisation (without overrides)
    and backend."""
    quantization: Any = None
    """Format in which a float checkpoint is stored, for less memory and faster decoding at some loss. One of "int8",
    "int4", "nf4", "fp4", "mxfp4", "mxfp8", "fp8", or a ggml type, "q2_k" to "q6_k" and "q4_0" to "q8_0". A
    QuantizationConfig, or a dict of its arguments, sets options and choices by module. Also takes transformers'
    BitsAndBytesConfig. docs/quantization.md compares the formats. The guarantees about identical bits hold for each."""
    backend: str | OperatorConfig = "native"
    """"native" for the C++ kernels with one call per step. "native-eager" for the same kernels called one by one from
    Python. "torch" for their specification in plain torch. The first two give the same bits. An OperatorConfig, or its
    short form "attention=torch,mlp=torch", chooses kernels or torch for each operator."""
    num_threads: int | None = None
    """Number of kernel threads of this process, shared by all its models; None for the physical cores that it may
    use."""
    max_seq_len: int | None = None
    """Maximum length of a sequence, prompt included; None for the limit in the model's config."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    token: str | bool | None = None
    """Access token for gated models of the Hub: None or True for the one saved by `hf auth login`, False for none."""
    cache_dir: str | Path | None = None
    """Folder of downloads; None for the Hub's own cache."""
    local_files_only: bool = False
    """True to use only files on disk and download nothing."""
    progress: bool = True
    """Shows a bar while loading, and while several prompts are continued, on a terminal or in a notebook."""
    kv_cache_bytes: int | str | None = None
    """Maximum memory of keys and values, in bytes or as "2GiB", a draft model's included; None for half of the memory
    available after loading. Only address space is reserved at first. Sequences that do not fit together take turns,
    with the same results. A prompt that does not fit is refused; a sequence that fills the cache ends with "length"."""
    pin_threads: bool | None = None
    """True pins each thread to one CPU, for a process that has its CPUs to itself. None for PACE_PIN_THREADS, which is
    off by default (docs/threads.md)."""
    bmc_rows: int | None = None
    """Rows that a "bmc" run grows by; None for the number that balances time and memory."""
    prefix_cache_bytes: int | str = "auto"
    """Part of `kv_cache_bytes` that keeps the prefixes of ended sequences, so that a sequence with the same prefix does
    not compute it again. "auto" is a quarter, or nothing for a cache type that shares no blocks; 0 is none. Running
    sequences take this memory back when they need it. Prefixes shared by running sequences cost nothing."""
    kv_cache_dtype: torch.dtype | str = "auto"
    """Dtype of keys and values. "auto": the weights' dtype. "int8" is a byte for each element and a scale for each head
    and token: about half of bfloat16's memory, at some loss (docs/numerics.md). Row determinism holds for each."""
    load_in_4bit: bool = False
    """The same as `quantization="nf4"`."""
    load_in_8bit: bool = False
    """The same as `quantization="int8"`."""
    weights: str = "memory"
    """"memory", or "mapped" for a mixture whose experts may be larger than memory. With "mapped", experts that are
    stored quantised are packed into a file once, and read from it when tokens choose them (docs/models.md). The results
    are the same. A draft model's weights are always in memory."""
    weights_cache: str | Path | bool | None = None
    """Folder of packed weights. With `weights="memory"` it has a copy of the weights in their memory layout, which
    makes the next load immediate. None for PACE_CACHE, False for no copy (docs/models.md). With "mapped" it has the
    experts; None for the folder of the checkpoint."""

    def __post_init__(self) -> None:
        optional = type(None)
        self._check("model_name_or_path", "a path or a Hub id", str, os.PathLike)
        self._check("tokenizer_name_or_path", "a path, a Hub id or None", str, os.PathLike, optional)
        check_cache_options(self.kv_cache_type, self.bmc_rows, self.prefix_bytes)
        check_spec_config(self.spec_config)
        for name in ("quantization_config", "weight_dtype", "kv_dtype", "ops"):
            getattr(self, name)  # raises for an invalid value
        read_threads(self.num_threads, self.pin_threads)
        self._check("max_seq_len", "an int >= 2 or None", int, optional)
        if self.kv_cache_bytes is not None:
            _read_bytes("kv_cache_bytes", self.kv_cache_bytes)
        self._check("revision", "a branch, tag or commit, or None", str, optional)
        self._check("token", "a str, True, False or None", str, bool, optional)
        self._check("cache_dir", "a path or None", str, os.PathLike, optional)
        self._check("local_files_only", "True or False", bool)
        self._check("progress", "True or False", bool)
        self._check("weights_cache", "a path, False or None", str, os.PathLike, bool, optional)
        self._check_weights()

    @classmethod
    def read(cls, given: Mapping[str, Any], other_names: Mapping[str, Any]) -> LoadOptions:
        """Merges options and the names of other tools for them. Raises TypeError for an unknown option and for one
        given twice, ValueError for a setting that pace does not support."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        options = dict(given)
        for name, value in model_options(other_names, defaults).items():
            if options[name] != defaults[name]:
                raise TypeError(f"{name} is given by two names ({', '.join(other_names)}); give it once")
            options[name] = value
        return cls(**options)

    def _check(self, name: str, allowed: str, *types: type) -> None:
        value = getattr(self, name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{name} must be {allowed}; got {type(value).__name__}")

    def _check_weights(self) -> None:
        if self.weights not in ("memory", "mapped"):
            raise ValueError(f'weights must be "memory" or "mapped"; got {self.weights!r:.100}')
        if self.weights_cache is True:
            raise TypeError("weights_cache must be a path, False or None; got True")
        if self.weights_cache is False and self.weights == "mapped":
            raise ValueError('weights="mapped" keeps experts in a file; give weights_cache= a folder, or None')
        if self.weights == "mapped" and self.ops is not native:
            raise ValueError(f'weights="mapped" needs the native kernels; got backend={str(self.backend)!r}')

    # -- parsed options ------------------------------------------------------------------------------------------------

    @property
    def weight_dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype)

    @property
    def kv_dtype(self) -> torch.dtype:
        return parse_kv_cache_dtype(self.kv_cache_dtype, self.weight_dtype)

    @property
    def quantization_config(self) -> QuantizationConfig | None:
        return read_quantization(self.quantization, self.load_in_4bit, self.load_in_8bit)

    @property
    def ops(self) -> ModuleType:
        """The implementation of `pace.ops` that packs weights and samples tokens."""
        return select_ops(self.backend)

    @property
    def prefix_bytes(self) -> int | None:
        """Bytes of the prefix cache; None for the default of `CacheManager`."""
        if self.prefix_cache_bytes == "auto":
            return None
        return _read_bytes("prefix_cache_bytes", self.prefix_cache_bytes, ', or "auto"')

    @property
    def cache_options(self) -> dict[str, Any]:
        """Keyword arguments of `CacheManager`."""
        return {
            "kv_cache_type": self.kv_cache_type,
            "bmc_rows": self.bmc_rows,
            "prefix_cache_bytes": self.prefix_bytes,
        }

    @property
    def hub(self) -> dict[str, Any]:
        """Keyword arguments of `find_checkpoint`."""
        names = ("revision", "token", "cache_dir", "local_files_only", "progress")
        return {name: getattr(self, name) for name in names}


class Loaded(NamedTuple):
    """The result of `open`."""

    model: BaseModelForCausalLM
    """The model, with its weights."""
    engine: Engine
    """The engine that runs the model."""
    tokenizer: Any
    """The transformers tokenizer of the checkpoint; None if it has none."""
    defaults: SamplingConfig
    """The checkpoint's generation settings."""


def open(options: LoadOptions) -> Loaded:
    """Finds a checkpoint, checks the options against it, reads its weights, and makes the engine.

    Errors in the options and the small files are found before gigabytes of weights are read or downloaded. Errors that
    options, config and headers show are found before the tokenizer is read. Sets the number of kernel threads of this
    process.

    Raises: NotImplementedError for unsupported architectures; FileNotFoundError, PermissionError, ValueError,
    TypeError, MemoryError as in `model_utils.load_model`.
    """
    ops, progress = options.ops, options.progress
    _check_paths(options)
    if ops is native:
        _warn_of_missing_kernels()
    threads = use_threads(options.num_threads, options.pin_threads)
    found = find_checkpoint(
        options.model_name_or_path, **options.hub, check=lambda path: _make_model(options, Checkpoint(path))
    )
    checkpoint = Checkpoint(found)
    model = _make_model(options, checkpoint)
    if checkpoint.gguf is None:  # the headers of other formats were not read yet
        CheckpointReader(checkpoint.path).close()
    tokenizer = _find_tokenizer(options, checkpoint, model)
    defaults = _read_defaults(checkpoint, tokenizer, model)
    checkpoint.forget_vocabulary()
    speculation = Speculation.prepare(options.spec_config, model, tokenizer, ops, options.hub)
    share = speculation.cache_share(model, options.kv_cache_type)
    if share:
        _check_budget(options, model, share)
        speculation.model.weights_file = _weights_file(options, speculation.model, speculation.checkpoint)

    fill_model(model, checkpoint, threads, progress)
    speculation.load(threads, progress)

    budget = _cache_budget(options, model)
    drafter = speculation.drafter(model, ops, options.backend, int(budget * share))
    engine = Engine.create(
        make_runner(model, options.backend),
        ops,
        budget - drafter.memory().cache_budget,
        drafter,
        options.max_seq_len,
        cache_options=options.cache_options,
        max_tokens_per_step=tokens_per_step(model),
    )
    return Loaded(model, engine, tokenizer, defaults)


def _make_model(options: LoadOptions, checkpoint: Checkpoint) -> BaseModelForCausalLM:
    """Makes the model of a checkpoint, without weights; their files need not be downloaded yet. Raises for errors that
    config and headers show: an architecture, an option, too little memory."""
    model = make_model(checkpoint, options.weight_dtype, options.ops, options.kv_dtype, options.quantization_config)
    model.weights_file = _weights_file(options, model, checkpoint)
    _check_length(options, model)
    _check_budget(options, model, Fraction(0))
    check_room(model, checkpoint)
    return model


def _weights_file(options: LoadOptions, model: BaseModelForCausalLM, checkpoint: Checkpoint) -> WeightsFile | None:
    """The file of packed weights, present or to be written; None if weights are only kept in memory."""
    folder = options.weights_cache and Path(options.weights_cache).expanduser()
    if options.weights == "mapped":
        check_has_experts(model)
        return ExpertFile(checkpoint.path, folder)
    folder = env.cache_directory() if folder is None else folder
    return PackedCopy(checkpoint.path, folder) if folder and options.ops is native else None


def _check_paths(options: LoadOptions) -> None:
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


def _warn_of_missing_kernels() -> None:
    best = _C.best_isa()
    if best not in _C.built_isas():
        logger.warning(
            "this build of pace has no kernels for %s, the best instruction set of this CPU, and is slower without: "
            "build it with PACE_TABLES=all (`pace env` shows what it has)",
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
            f"max_seq_len must be from 2 to the {most} positions that config.json gives this model; got {options.max_seq_len}"
        )


def _find_tokenizer(options: LoadOptions, checkpoint: Checkpoint, model: BaseModelForCausalLM) -> Any:
    if options.tokenizer_name_or_path is None:
        return checkpoint.load_tokenizer(model.vocab_size, required=False)
    found = find_checkpoint(options.tokenizer_name_or_path, **options.hub | {"revision": None}, weights=False)
    return Checkpoint(found).load_tokenizer(model.vocab_size)


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
                "the checkpoint's end tokens %s are not all among the model's %d ids", defaults.eos_token_id, vocab_size
            )
        defaults.eos_token_id = known or None
    return defaults


def _check_budget(options: LoadOptions, model: BaseModelForCausalLM, draft_share: Fraction) -> None:
    """Raises ValueError if the cache has no room for one block, or for one sequence of `max_seq_len` tokens, after
    subtracting a draft model's share. Also for inconsistent sizes."""
    budget = available_memory_bytes() * CACHE_SHARE
    if options.kv_cache_bytes is not None:
        budget = parse_bytes(options.kv_cache_bytes)
        length = options.max_seq_len
        spec = spec_of(model.kv_spec, options.kv_cache_type)
        least = math.ceil(most_bytes(spec, length or 1, tokens_per_step(model)) / (1 - draft_share))
        if budget < least:
            why = f"max_seq_len={length} tokens take" if length else f"a block of {BLOCK_SIZE} tokens takes"
            raise ValueError(
                f"kv_cache_bytes={options.kv_cache_bytes} is too little: {why} {least} bytes ({format_bytes(least)}) in this model{' and its draft model' if draft_share else ''}"
            )
    CacheManager(model.kv_spec, int(budget * (1 - draft_share)), **options.cache_options)


def _cache_budget(options: LoadOptions, model: BaseModelForCausalLM) -> int:
    """Bytes for the keys and values of all models, once the weights are in memory. Pages of a packed copy are reported
    as available but must stay in memory."""
    available = available_memory_bytes(kept=model.mapped_nbytes if options.weights == "memory" else 0)
    if options.kv_cache_bytes is None:
        return int(available * CACHE_SHARE)
    budget = parse_bytes(options.kv_cache_bytes)
    if budget > available:
        logger.warning(
            "kv_cache_bytes=%s is more than the %s of memory that are left; once that is used, the system ends the process",
            options.kv_cache_bytes,
            format_bytes(available),
        )
    return budget


def _read_bytes(name: str, size: int | str, otherwise: str = "") -> int:
    """Parses a size. Raises a TypeError or ValueError that names the argument."""
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}{otherwise}") from None
