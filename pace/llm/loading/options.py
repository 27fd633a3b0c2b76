"""What to load, and how: `LoadOptions`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pace import _C, env
from pace.llm.aliases import model_options
from pace.llm.cache.manager import check_cache_options
from pace.llm.configs import KVCacheType
from pace.llm.operators import OperatorConfig, read_backend
from pace.llm.speculation.configs import SpecConfig, read_spec_config
from pace.memory import parse_bytes
from pace.ops import native, reference
from pace.ops.protocol import Ops
from pace.quant import QuantizationConfig, read_quantization

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True)
class LoadOptions:
    """What to load and how: the arguments of `LLMModel`.

    Raises TypeError or ValueError for values that are invalid for any checkpoint, and for values that contradict each
    other. `load.open_model` checks the rest against the checkpoint, before it reads weights.
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
    spec_config: SpecConfig | str | None = None
    """Source of drafts, for faster decoding with the same tokens (docs/decoding.md): a PromptLookupConfig, MtpConfig,
    DraftModelConfig or PardConfig. "mtp" is short for MtpConfig(). A draft model is loaded with the model's dtypes,
    quantisation (without overrides) and backend."""
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
    """Maximum memory of keys and values, a draft model's included. In bytes, as "2GiB", or as "25%" of the memory
    available after loading; None for "50%". Only address space is reserved at first. Sequences that do not fit together
    take turns, with the same results. A prompt that does not fit is refused; a sequence that fills the cache ends with
    "length"."""
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

    media: bool = True
    """True to load the towers of a checkpoint that takes images or sound; False for only its text model."""
    max_image_tokens: int | None = None
    """Maximum number of tokens of an image. One with more pixels is made smaller. None for the checkpoint's own
    limit."""
    media_cache_bytes: int | str = "256MiB"
    """Memory for the rows of encoded images and clips, so that one that is asked about again is not encoded again."""
    mmproj: str | Path | None = None
    """The mmproj file of llama.cpp with the towers of a GGUF file; None for one that is found in its folder or
    repository (docs/media.md)."""
    adapter: str | Path | None = None
    """A LoRA adapter to merge into the weights, with `merge=True`: a directory that PEFT has saved, or a GGUF file."""
    merge: bool = False
    """True to merge `adapter`. Not for checkpoints that are quantised on disk (docs/adapters.md)."""
    max_adapters: int = 8
    """Maximum number of adapters that are loaded next to the model at once."""
    max_lora_rank: int = 64
    """Maximum rank of these adapters."""

    def __post_init__(self) -> None:
        optional = type(None)
        self._check("model_name_or_path", "a path or a Hub id", str, os.PathLike)
        self._check("tokenizer_name_or_path", "a path, a Hub id or None", str, os.PathLike, optional)
        check_cache_options(self.kv_cache_type, self.bmc_rows, self.prefix_bytes)
        object.__setattr__(self, "spec_config", read_spec_config(self.spec_config))
        for name in ("quantization_config", "weight_dtype", "kv_dtype", "ops"):
            getattr(self, name)  # raises for an invalid value
        read_threads(self.num_threads, self.pin_threads)
        self._check("max_seq_len", "an int >= 2 or None", int, optional)
        self.cache_budget(0)
        self._check("revision", "a branch, tag or commit, or None", str, optional)
        self._check("token", "a str, True, False or None", str, bool, optional)
        self._check("cache_dir", "a path or None", str, os.PathLike, optional)
        self._check("local_files_only", "True or False", bool)
        self._check("progress", "True or False", bool)
        self._check("media", "True or False", bool)
        self._check("max_image_tokens", "an int >= 1 or None", int, optional)
        if self.max_image_tokens is not None and self.max_image_tokens < 1:
            raise ValueError(f"max_image_tokens must be at least 1; got {self.max_image_tokens}")
        _read_bytes("media_cache_bytes", self.media_cache_bytes)
        self._check("mmproj", "a path or None", str, os.PathLike, optional)
        if self.mmproj is not None and not self.media:
            raise ValueError("mmproj must not be given with media=False, which leaves out towers")
        self._check_adapters()
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

    def _check_adapters(self) -> None:
        self._check("adapter", "a path or None", str, os.PathLike, type(None))
        self._check("merge", "True or False", bool)
        if self.merge != (self.adapter is not None):
            raise ValueError(
                "merge=True needs adapter=, the adapter to merge"
                if self.merge
                else "adapter= needs merge=True, which merges it into the weights; to keep it apart, load the model "
                "without it, and call load_adapter(path, name)"
            )
        for name in ("max_adapters", "max_lora_rank"):
            self._check(name, "an int >= 1", int)
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")

    def _check_weights(self) -> None:
        if self.weights not in ("memory", "mapped"):
            raise ValueError(f'weights must be "memory" or "mapped"; got {self.weights!r:.100}')
        if self.weights_cache is True:
            raise TypeError("weights_cache must be a path, False or None; got True")
        if self.weights_cache is False and self.weights == "mapped":
            raise ValueError('weights="mapped" needs a file for the experts; weights_cache must be a folder or None')
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
    def ops(self) -> Ops:
        """The implementation of `pace.ops` that packs weights and samples tokens."""
        return select_ops(self.backend)

    @property
    def prefix_bytes(self) -> int | None:
        """Bytes of the prefix cache; None for the default of `CacheManager`."""
        if self.prefix_cache_bytes == "auto":
            return None
        return _read_bytes("prefix_cache_bytes", self.prefix_cache_bytes, ', or "auto"')

    def cache_budget(self, available: int) -> int:
        """Returns the bytes for keys and values, if `available` bytes of memory are left after loading."""
        size = "50%" if self.kv_cache_bytes is None else self.kv_cache_bytes
        if not isinstance(size, str) or not size.strip().endswith("%"):
            return _read_bytes("kv_cache_bytes", size, """, or a share such as '25%'""")
        match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", size, re.ASCII)
        if match is None or not 0 < float(match[1]) <= 100:
            raise ValueError(f"kv_cache_bytes: a share is a percentage above 0 and up to 100; got {size!r}")
        return int(available * float(match[1]) / 100)

    @property
    def takes_share(self) -> bool:
        """True if the bytes for keys and values depend on the available memory."""
        return self.kv_cache_bytes is None or str(self.kv_cache_bytes).strip().endswith("%")

    @property
    def media_bytes(self) -> int:
        """Bytes of the cache of rows of media."""
        return _read_bytes("media_cache_bytes", self.media_cache_bytes)

    @property
    def cache_options(self) -> dict[str, Any]:
        """Keyword arguments of `CacheManager`."""
        return {
            "kv_cache_type": self.kv_cache_type,
            "bmc_rows": self.bmc_rows,
            "prefix_cache_bytes": self.prefix_bytes,
            "max_drafts": self.spec_config.num_draft_tokens if self.spec_config else 0,
        }

    @property
    def hub(self) -> dict[str, Any]:
        """Keyword arguments of `find_checkpoint`."""
        names = ("revision", "token", "cache_dir", "local_files_only", "progress")
        return {name: getattr(self, name) for name in names}


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a weight dtype given as torch's object or by name ("bfloat16", "bf16", "torch.bfloat16"). Raises
    TypeError or ValueError."""
    if isinstance(dtype, str):
        found = DTYPES.get(dtype.removeprefix("torch.").lower())
    elif isinstance(dtype, torch.dtype):
        found = dtype if dtype in DTYPES.values() else None
    else:
        raise TypeError(f"dtype must be a torch.dtype or its name, such as 'bfloat16'; got {type(dtype).__name__}")
    if found is None:
        raise ValueError(f"dtype must be bfloat16, float16 or float32 (short: bf16, fp16, fp32); got {str(dtype)!r}")
    return found


def parse_kv_cache_dtype(kv_cache_dtype: torch.dtype | str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of keys and values: as in `parse_dtype`, or int8, or "auto" for the weights' `dtype`. Raises
    TypeError or ValueError."""
    if not isinstance(kv_cache_dtype, (str, torch.dtype)):
        raise TypeError(
            f"kv_cache_dtype must be a name, such as 'auto' or 'int8', or a torch.dtype; got "
            f"{type(kv_cache_dtype).__name__}"
        )
    found = (DTYPES | {"auto": dtype, "int8": torch.int8}).get(str(kv_cache_dtype).removeprefix("torch.").lower())
    if found is None:
        raise ValueError(
            f"kv_cache_dtype must be 'auto' (that of the weights), bfloat16, float16, float32 (short: bf16, fp16, "
            f"fp32) or int8; got {str(kv_cache_dtype)!r}"
        )
    return found


def select_ops(backend: str | OperatorConfig) -> Ops:
    """Returns the implementation of `pace.ops` that packs weights and samples for a backend. Raises ValueError for an
    unknown one."""
    return reference if read_backend(backend) == "torch" else native


def read_threads(num_threads: int | None, pin_threads: bool | None = None) -> tuple[int, bool]:
    """Returns the number of kernel threads, and whether each is pinned to a CPU. The arguments override
    PACE_NUM_THREADS and PACE_PIN_THREADS; the default is the physical cores that this process may use, not pinned.
    Raises TypeError or ValueError."""
    if num_threads is None:
        num_threads = env.num_threads() or _C.cpu_info()["default_threads"]
    if type(num_threads) is not int:
        raise TypeError(f"num_threads must be an integer or None; got {type(num_threads).__name__}")
    if not 1 <= num_threads <= env.MAX_THREADS:
        raise ValueError(f"num_threads must be from 1 to {env.MAX_THREADS}; got {num_threads}")
    if pin_threads is None:
        pin_threads = env.pin_threads()
    if type(pin_threads) is not bool:
        raise TypeError(f"pin_threads must be True, False or None; got {type(pin_threads).__name__}")
    return num_threads, pin_threads


def use_threads(num_threads: int | None, pin_threads: bool | None = None) -> int:
    """Sets the number of kernel threads of this process, for all its models, by the rules of `read_threads`; returns
    it. Also raises ValueError for more pinned threads than CPUs in the mask."""
    num_threads, pin_threads = read_threads(num_threads, pin_threads)
    _C.set_num_threads(num_threads, pin_threads)
    return num_threads


def _read_bytes(name: str, size: int | str, otherwise: str = "") -> int:
    """Parses a size. Raises a TypeError or ValueError that names the argument."""
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}{otherwise}") from None
