"""`read_adapter`: an adapter on disk, in any format, for one base model."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.reader import WEIGHT_DTYPES, CheckpointReader
from pace.llm.adapters.gguf import ROW_ORDERS, read_gguf
from pace.llm.adapters.peft import read_peft
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.loading.checkpoint import Checkpoint


def read_adapter(path: str | Path, name: str, base: Checkpoint) -> AdapterWeights:
    """Reads a LoRA adapter: a directory that PEFT has saved, or a GGUF file. `name` is for messages, `base` is the
    checkpoint of the model that it is for. Nothing is downloaded.

    Raises FileNotFoundError, PermissionError, NotImplementedError for what is not implemented, and ValueError for
    anything damaged, unknown or contradictory. Whether its shapes fit the model is `AdapterSlots.check`'s question."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"an adapter is given by its path; got {type(path).__name__}")
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give the directory of an adapter on this machine, or its GGUF file (adapters are "
            "not downloaded: use `hf download`)"
        )
    gguf = base.gguf
    if is_gguf(path):
        architecture = None if gguf is None else gguf.metadata.text("general.architecture")
        return read_gguf(path, name, base.config, architecture)
    if gguf is not None and ROW_ORDERS & base.config.keys():
        raise NotImplementedError(
            f"{base.path} has the rows of some matrices in another order than the checkpoint that {path} was trained "
            "on; convert the adapter with llama.cpp's convert_lora_to_gguf.py"
        )
    return read_peft(path, name, BaseTensors(base))


class BaseTensors:
    """The tensors of a base model by name, to compare with copies in an adapter."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base

    def __call__(self, name: str) -> Tensor | None:
        """Returns a tensor, in memory of its own; None if the checkpoint does not have it as floats. Raises KeyError
        for a name that it does not have. Tied embeddings are found under either name."""
        if self._base.gguf is not None:
            return None
        with CheckpointReader(self._base.path) as reader:
            names = [name, *TIED.get(name, ())]
            found = next((each for each in names if each in reader.tensors), None)
            if found is None:
                raise KeyError(name)
            info = reader.tensors[found]
            return reader.read(found).clone().view(info.shape) if info.dtype in WEIGHT_DTYPES else None


TIED = {"lm_head.weight": ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")}
"""A tied head -> names under which the matrix may be saved."""
