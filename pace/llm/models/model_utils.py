"""From a name to a loaded model: where it is, which class it needs, which kernels run it, and its weights."""

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
"""As many pack faster than disks read, and the pieces that they hold (`PIECE_BYTES` each) stay far below 300 MB."""

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
    """Loads the model of a checkpoint, ready to run. `find_checkpoint` says where it comes from.

    `dtype` is how the weights are held, whatever they are stored as. `backend` "native" and "native-eager" run the C++
    kernels, "torch" their plain-torch specification, and an OperatorConfig one or the other for each operator.
    `num_threads` sets the threads of this process's kernels, and of loading; by default the physical cores that this
    process may use. `pin_threads` gives each of them a CPU of its own (docs/threads.md). `progress` shows a bar, on a
    terminal or in a notebook. `quantization` is a format or more (docs/quantization.md), in which a checkpoint of floats is held.

    **Memory**: at most 1.1 times the packed weights + 300 MB, as files are mapped, packed and released in small pieces.

    Raises, and nothing else, whatever the files hold:

        FileNotFoundError     no such model, no config, no weights, a missing shard
        PermissionError       gated, or not readable
        NotImplementedError   an architecture, config field or weight format that is not implemented
        ValueError            anything damaged, contradictory or out of range
        TypeError             an argument of the wrong type
        MemoryError           weights that are more than the memory that is left

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
    """The model that a checkpoint's config.json describes, without weights: it costs no memory and cannot run yet. Keys
    and values are in `kv_dtype`; None for `dtype`."""
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
    """Raises MemoryError where the weights are more than the memory that is left, by config and headers alone. Weights
    that are not there yet are judged where the config says how they will be held."""
    if model.planned_nbytes(model.ops, model.dtype) <= available_memory_bytes():
        return  # what a checkpoint holds quantised takes less
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
    """Messages speak of config.json and the Hub's names of tensors; of a GGUF file they say that it is the one
    meant."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if checkpoint.gguf is None:
            raise
        kind = ValueError if isinstance(error, ValueError) else NotImplementedError
        raise kind(f"{checkpoint.path}, read as a checkpoint of the Hub: {error}") from None


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of weights by torch's object or by name ("bfloat16", "bf16", "torch.bfloat16"); TypeError or
    ValueError."""
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
    """The dtype of keys and values: as in `parse_dtype`, or int8, or "auto" for `dtype`, that of the weights; TypeError
    or ValueError."""
    if not isinstance(kv_cache_dtype, (str, torch.dtype)):
        raise TypeError(
            f"kv_cache_dtype must be a name, such as 'auto' or 'int8', or a torch.dtype; got {type(kv_cache_dtype).__name__}"
        )
    found = (DTYPES | {"auto": dtype, "int8": torch.int8}).get(str(kv_cache_dtype).removeprefix("torch.").lower())
    if found is None:
        raise ValueError(
            f"kv_cache_dtype must be 'auto' (that of the weights), bfloat16, float16, float32 (short: bf16, fp16, fp32) or int8; got {str(kv_cache_dtype)!r}"
        )
    return found


def select_ops(backend: str | OperatorConfig) -> ModuleType:
    """The implementation of `pace.ops` that packs the weights and samples for a backend; ValueError for an unknown
    one."""
    return reference if read_backend(backend) == "torch" else native


def read_threads(num_threads: int | None, pin_threads: bool | None = None) -> tuple[int, bool]:
    """How many threads the kernels get, and whether each has a CPU of its own: what is said, else what PACE_NUM_THREADS
    and PACE_PIN_THREADS say, else the physical cores that this process may use, not pinned. TypeError or ValueError."""
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
    """Sets the threads of this process's kernels, for all its models, as `read_threads` understands them, and returns
    their number. ValueError for more pinned threads than CPUs in the mask, too."""
    num_threads, pin_threads = read_threads(num_threads, pin_threads)
    _C.set_num_threads(num_threads, pin_threads)
    return num_threads


@contextmanager
def progress_bar(total: int, title: str, wanted: bool, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """A function to be told of bytes (or other units) done, from any thread; it moves a bar on stderr where someone
    watches that."""
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
