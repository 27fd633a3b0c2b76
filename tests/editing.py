"""Changes to checkpoints on disk: fields of a JSON file, and tensors of a folder with one safetensors file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def change_json(path: Path, **fields: Any) -> dict[str, Any]:
    """Sets these fields of a file, and returns all of them."""
    changed = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(changed))
    return changed


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replaces the tensors, by name, by what `change` makes of them."""
    path = folder / "model.safetensors"
    changed = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(changed, path, {"format": "pt"})


@contextlib.contextmanager
def edit_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors by name. What the block changes, adds and removes is written at its end."""
    state = load_file(folder / "model.safetensors")
    yield state
    change_tensors(folder, lambda _: state)


def rename_tensors(folder: Path, prefixes: dict[str, str]) -> None:
    """Replaces the first of these prefixes that a tensor's name has. Each of them must occur."""
    used = set()

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        used.add(old)
        return prefixes.get(old, "") + name.removeprefix(old)

    change_tensors(folder, lambda state: {renamed(name): tensor for name, tensor in state.items()})
    assert used >= prefixes.keys(), f"no tensor begins with {prefixes.keys() - used}"
