"""AWQ, in the layout "gemm" of AutoAWQ.

    qweight int32 [K, N / 8]    u, 4 bits each

    qzeros  int32 [G, N / 8]    zero points, in the same order

    scales  float [G, N]

    W[n, k] = (u[k, n] - zero[k // group, n]) * scales[k // group, n]

Bits 4 i of word w hold output 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[i].

Source: the code of AutoAWQ, https://github.com/casper-hansen/AutoAWQ"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.checkpoints.quantized.method import Method, modules_with, read_bits, read_group_size, read_name, refused
from pace.checkpoints.quantized.stored import FLOATS, Groups, IntegerMatrix, StoredTensors, unpack

FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index of the field in its word that holds output i of 8."""


@dataclass(frozen=True)
class AWQ(Method):
    name: ClassVar[str] = "AWQ"

    group_size: int | None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> AWQ:
        raw = {"bits": raw.get("w_bit"), "group_size": raw.get("q_group_size", 128), **raw}
        for field in ("version", "format"):
            if read_name(raw, field, "gemm") != "gemm":
                raise refused(field, raw[field], 'take a checkpoint in the layout "gemm", or the original one')
        if read_name(raw, "backend", "auto") == "llm-awq":
            raise refused("backend", raw["backend"], "take a checkpoint that AutoAWQ wrote, or the original one")
        read_bits(raw, (4,))
        return cls(group_size=read_group_size(raw))

    def matrices(self, source: StoredTensors) -> Iterator[AWQMatrix]:
        for module in modules_with(source, ".qweight"):
            yield AWQMatrix(source, module, self)


class AWQMatrix(IntegerMatrix):
    bits = 4

    def __init__(self, source: StoredTensors, module: str, method: AWQ):
        super().__init__(source, module, {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"})
        k, words = self.expect("codes", (torch.int32,), (-1, -1))
        count = -(-k // (method.group_size or max(1, k)))
        self.expect("zeros", (torch.int32,), (count, words))
        self.expect("scales", FLOATS, (count, 8 * words))
        self.shape = (8 * words, k)
        self.groups = Groups(k, count, method.group_size or k)
        self.choose_layout(symmetric=False)

    def codes(self, start: int, stop: int) -> Tensor:
        return self._outputs("codes", start, stop)

    def zeros(self, start: int, stop: int) -> Tensor:
        return self._outputs("zeros", start, stop).to(torch.int16)

    def scales(self, start: int, stop: int) -> Tensor:
        return self.finite("scales", self.columns("scales", start, stop))

    def _outputs(self, role: str, start: int, stop: int) -> Tensor:
        """Unpacks fields `[H, N / 8]` to uint8 `[stop - start, H]`."""
        first, last = start // 8, -(-stop // 8)
        fields = unpack(self.columns(role, first, last)[..., None], 4)  # [words, H, 8]
        outputs = fields.permute(0, 2, 1)[:, FIELD_OF_OUTPUT].flatten(0, 1)
        return outputs[start - 8 * first : stop - 8 * first]
