"""Loads a model by name: finds it, chooses its class and kernels, and reads its weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pace import _C, env
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.checkpoint import Checkpoint
from pace.llm.models.hf_utils import find_checkpoint
from pace.llm.models.model_list import read_config
from pace.llm.models.packed_weights import ExpertFile
from pace.llm.operators import OperatorConfig, read_backend
from pace.memory import available_memory_bytes
from pace.ops import native, reference
from pace.quant import QuantizationConfig, read_quantization

logger = logging.getLogger("pace")

MAX_LOADING_THREADS = 16
"""More threads would only wait for the disk. Their pieces (`PIECE_BYTES` each) stay far below 300 MB."""

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


def load_model(
    path_or_id: str | Path,
    dtype: torch.dtype | str = torch.bfloat16,
    backend: str | OperatorConfig = "native",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    num_threads: int | None = None,
    pin_threads: bool | None = None,
    quantization: Any = None,
) -> BaseModelForCausalLM:
    """Loads the model of a checkpoint, ready to run. `find_checkpoint` describes where it is found.

    `dtype` is the dtype of the weights in memory, independent of the checkpoint's. `backend` "native" and
    "native-eager" run the C++ kernels, "torch" their plain-torch specification, and an OperatorConfig chooses for each
    operator. `num_threads` sets the number of kernel and loading threads of this process; by default the physical
    cores that it may use. `pin_threads` pins each of them to one CPU (docs/threads.md). `progress` shows a bar, on a
    terminal or in a notebook. `quantization` is the format or formats in which a float checkpoint is stored
    (docs/quantization.md).

    **Memory**: at most 1.1 times the packed weights + 300 MB, as files are mapped, packed and released in small pieces.

    Raises only these errors, for any contents of the files:

    - FileNotFoundError: no such model, no config, no weights, a missing shard.
    - PermissionError: gated, or not readable.
    - NotImplementedError: an unsupported architecture, config field or weight format.
    - ValueError: anything damaged, contradictory or out of range.
    - TypeError: an argument of the wrong type.
    - MemoryError: not enough memory for the weights.

    A file that shrinks while it is read is the one exception: the system ends the process with SIGBUS.
    """
    dtype, ops, threads = parse_dtype(dtype), select_ops(backend), use_threads(num_threads, pin_threads)
    asked = read_quantization(quantization)

    def make(path: Path) -> tuple[Checkpoint, BaseModelForCausalLM]:
        checkpoint = Checkpoint(path)
        model = make_model(checkpoint, dtype, ops, quantization=asked)
        check_room(model, checkpoint)
        return checkpoint, model

    found = find_checkpoint(path_or_id, revision, token, cache_dir, local_files_only, progress=progress, check=make)
    checkpoint, model = make(found)
    fill_model(model, checkpoint, threads, progress)
    return model


def make_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    ops: ModuleType,
    kv_dtype: torch.dtype | None = None,
    quantization: QuantizationConfig | None = None,
) -> BaseModelForCausalLM:
    """Makes the model described by a checkpoint's config.json, without weights: it takes no memory and cannot run yet.
    Keys and values are in `kv_dtype`; None for `dtype`."""
    with _naming(checkpoint):
        model_class, config = read_config(checkpoint.config)
    model = model_class(config, dtype, ops)
    model.kv_dtype = kv_dtype or dtype
    model.quantize(quantization)
    return model


def fill_model(model: BaseModelForCausalLM, checkpoint: Checkpoint, threads: int, progress: bool) -> None:
    """Loads the weights of a checkpoint."""
    started, path = time.perf_counter(), checkpoint.path
    with checkpoint.open_weights(model.config.quantization_config) as reader, _naming(checkpoint):
        with progress_bar(reader.total_bytes, f"Loading {path.name}", progress) as report:
            model.load_weights(reader, min(threads, MAX_LOADING_THREADS), report)
        seconds = time.perf_counter() - started
        logger.info("%s: %.2f GB from %s in %.1f s", type(model).__name__, reader.total_bytes / 1e9, path, seconds)


def check_room(model: BaseModelForCausalLM, checkpoint: Checkpoint) -> None:
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
        with nullcontext() if reader is checkpoint.gguf else reader, _naming(checkpoint):
            model.plan_layout(reader)
    model.check_memory()


@contextmanager
def _naming(checkpoint: Checkpoint) -> Iterator[None]:
    """Adds the path of a GGUF file to errors. Those about its metadata refer to config.json."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if checkpoint.gguf is None:
            raise
        kind = ValueError if isinstance(error, ValueError) else NotImplementedError
        converted = " (its metadata as config.json)" if "config.json" in str(error) else ""
        raise kind(f"{checkpoint.path}{converted}: {error}") from None


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
            "kv_cache_dtype must be a name, such as 'auto' or 'int8', or a torch.dtype; got "
            f"{type(kv_cache_dtype).__name__}"
        )
    found = (DTYPES | {"auto": dtype, "int8": torch.int8}).get(str(kv_cache_dtype).removeprefix("torch.").lower())
    if found is None:
        raise ValueError(
            "kv_cache_dtype must be 'auto' (that of the weights), bfloat16, float16, float32 (short: bf16, fp16, "
            f"fp32) or int8; got {str(kv_cache_dtype)!r}"
        )
    return found


def select_ops(backend: str | OperatorConfig) -> ModuleType:
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
        raise ValueError(f"num_threads must be in 1..{env.MAX_THREADS}; got {num_threads}")
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


@contextmanager
def progress_bar(total: int, title: str, wanted: bool, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the bytes (or other units) done, from any thread. It moves a bar on stderr, if a
    person can see it."""
    if not wanted or not env.shows_bars():
        yield lambda done: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc=title, unit=unit, unit_scale=True, leave=False) as bar:

        def report(done: int) -> None:
            with lock:
                bar.update(done)

        yield report
