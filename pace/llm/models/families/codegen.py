"""CodeGen 350M to 16B: GPT-J with one tensor for queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import Linear, RowRange, TensorSource
from pace.llm.models.families.gptj import GPTJConfig, GPTJForCausalLM

PARTS = 4
"""The tensor was trained in this many parts. Each has rows of queries, then of values, then of keys."""


@dataclass(frozen=True, kw_only=True)
class CodeGenConfig(GPTJConfig):
    def check(self) -> None:
        super().check()
        if self.hidden_size % PARTS:
            raise ValueError(f"config.json: n_embd must be a multiple of {PARTS}; got {self.hidden_size}")


class CodeGenForCausalLM(GPTJForCausalLM):
    Config = CodeGenConfig
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *GPTJForCausalLM.ignored_tensors,
        r"transformer\.h\.\d+\.attn\.causal_mask",
    )

    def make_qkv(self, name: str) -> Linear:
        hidden = self.config.hidden_size
        part = hidden // PARTS
        rows = tuple(RowRange(place * part, hidden, part, 3 * part) for place in (0, 2, 1))
        return Linear({f"{name}.qkv_proj": TensorSource((3 * hidden, hidden), rows)}, hidden)
