"""What holds for every family of GGUF files: `model.gguf` next to `hub`, the checkpoint that it was made from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.models.model_list import read_config
from tests.checkpoints.gguf.files import load
from tests.llm.models.visit import TOLERANCE, oracle, relative_error
from tests.support import prefill

IDS = torch.randint(2, 99, (45,), generator=torch.Generator().manual_seed(1))
"""Ids of a text."""


def check_logits(folder: Path, theirs: torch.nn.Module, same_bits: bool = True) -> None:
    """Logits of the file are those of transformers. They have the bits of the checkpoint, if the file has its
    numbers."""
    found, of_hub = (prefill(load(folder / path), IDS) for path in ("model.gguf", "hub"))
    assert relative_error(found, oracle(theirs, IDS)) < TOLERANCE
    if same_bits:
        assert torch.equal(found, of_hub)


def check_config(folder: Path, unstated: str) -> tuple[Any, Any]:
    """The config of the file and the class of its model are those of the checkpoint. The ids of a vocabulary are not
    compared. Nor are fields with names of this pattern, which a file lacks or expresses differently. Returns
    both configs."""
    with GgufCheckpoint(folder / "model.gguf") as reader:
        model_class, found = read_config(reader.config)
    other_class, expected = read_config(json.loads((folder / "hub" / "config.json").read_text()))
    assert model_class is other_class
    left_out = re.compile(f"(bos|eos|pad)_token_id|{unstated}")
    fields = [field for field in vars(expected) if not left_out.fullmatch(field)]
    assert {field: vars(found)[field] for field in fields} == {field: vars(expected)[field] for field in fields}
    return found, expected


def check_blocks(folder: Path, write: Callable[..., None], kind: str = "Q8_0") -> None:
    """Matrices in blocks have the weights of a file that holds their values in float32."""
    for as_floats, name in ((False, "model.gguf"), (True, "floats.gguf")):
        write(folder / "hub", folder / name, kind, as_floats)
    blocks, floats = (load(folder / name, backend="torch") for name in ("model.gguf", "floats.gguf"))
    assert any(matrix.plan.layouts for matrix in blocks.matrices())
    assert relative_error(*(prefill(model, IDS) for model in (blocks, floats))) < TOLERANCE
    assert prefill(load(folder / "model.gguf"), IDS).isfinite().all()
