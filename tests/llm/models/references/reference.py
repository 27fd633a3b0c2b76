"""Base class of reference models. They are called, saved and loaded like the models of transformers. The cache is the
tokens of the sequence, and each call computes all of them again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Reference(nn.Module):
    """A model made from the fields of a config.json."""

    def __init__(self, fields: dict[str, Any]):
        super().__init__()
        self.config = SimpleNamespace(**fields)

    def logits(self, ids: Tensor) -> Tensor:
        """Returns the logits `[T, V]` of `ids [T]`."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(
        self, ids: Tensor, past_key_values: list[Tensor] | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """Returns the logits `[1, T, V]` of `ids [1, T]`, which continue the tokens of `past_key_values`. Appends them
        to that list."""
        past = [] if past_key_values is None else past_key_values
        past.append(ids[0])
        return SimpleNamespace(logits=self.logits(torch.cat(past))[None, -ids.shape[1] :], past_key_values=past)

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int, do_sample: bool, **others: Any) -> Tensor:
        """Returns `ids [1, T]` and the greedy tokens after them. `others` have no effect on a single row."""
        assert not do_sample and others.keys() <= {"attention_mask", "pad_token_id"}
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self.logits(ids[0])[-1:].argmax(-1)[None]], dim=1)
        return ids

    def tie_weights(self) -> None:
        """Does nothing, because no reference has a tied head."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(vars(self.config)))
        save_file(self.state_dict(), folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: Path) -> Reference:
        model = cls(json.loads((folder / "config.json").read_text()))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model
