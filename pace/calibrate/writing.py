"""Plans the tensors of the result and writes them piece by piece: `Output`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

import pace
from pace.calibrate import encoding
from pace.calibrate.method import Method
from pace.calibrate.parts import Parts, num_rows
from pace.checkpoints.reader import CheckpointReader
from pace.checkpoints.safetensors_file import TensorInfo
from pace.checkpoints.safetensors_writer import SafetensorsWriter
from pace.llm.adapters.merge import MergedReader
from pace.llm.layers import Layer, TiedLMHead
from pace.llm.layers.base import Vectors
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops.weight_layout import QuantizedRows, WeightLayout


class Output:
    """The result's model.safetensors. `layouts`: layout of each part, None for floats."""

    def __init__(
        self,
        folder: Path,
        model: BaseModelForCausalLM,
        reader: CheckpointReader | MergedReader,
        parts: Parts,
        layouts: Mapping[str, WeightLayout | None],
        method: Method,
        stored: Mapping[str, TensorInfo],
    ):
        """`stored`: the tensors of the checkpoint, whose dtypes floats keep."""
        self._stored = stored
        self.reader, self.parts, self.layouts, self.method = reader, parts, layouts, method
        self.tied = next(iter(model.lm_head.embedding.parts)) if isinstance(model.lm_head, TiedLMHead) else None
        """The embedding that is also the LM head, or None."""
        tensors = {parts.target(name): info for name, info in self._planned(model)}
        self.apart = [
            name for name in reader.tensors if any(re.fullmatch(pattern, name) for pattern in model.tensors_apart)
        ]
        """Tensors of the checkpoint next to the model's own, which are copied."""
        tensors |= {name: reader.tensors[name] for name in self.apart}
        if self.tied and encoding.shares_codes(layouts[self.tied]):
            tensors["lm_head.weight_scale"] = tensors[f"{self.module(self.tied)}.weight_scale"]
        self.writer = SafetensorsWriter(
            folder / "model.safetensors", tensors, {"quantized_by": f"pace {pace.__version__}, {method}"}
        )

    def _planned(self, model: BaseModelForCausalLM) -> Iterator[tuple[str, TensorInfo]]:
        """Names, dtypes and shapes of the result's tensors. Vectors and routers that a migration may scale are float32,
        as they are computed, because rounding would harm them."""
        inside = {id(leaf) for layer in model.layers for leaf in layer.walk()}
        scaled = inside if self.method.migration else set()
        for product in model.matrices():
            if id(product) in self.parts.heads:
                continue
            dtype = self.stored(product.tensor(next(iter(product.parts)))).dtype
            for part, rows in self.parts.of(product):
                shape = (num_rows(rows), product.k)
                if layout := self.layouts[part]:
                    calibrated = self.method.is_calibrated and layout.group and id(product) in inside
                    # Calibration rounds groups' scales to bfloat16, which takes half the bytes.
                    scale_dtype = torch.bfloat16 if calibrated else torch.float32
                    yield from encoding.planned(self.module(part), shape, layout, scale_dtype).items()
                else:
                    kept = torch.float32 if product.keeps_floats and id(product) in scaled else dtype
                    yield f"{part}.weight", TensorInfo(kept, shape)
        for leaf in model.walk():
            if isinstance(leaf, Vectors):
                for name, elements in self.parts.elements(leaf).items():
                    own = TensorInfo(torch.float32, (num_rows(elements),))
                    info = self.stored(name) if name in self.parts.sources else own
                    in_float32 = id(leaf) in scaled and len(info.shape) == 1
                    yield name, TensorInfo(torch.float32, info.shape) if in_float32 else info
        for name in self.parts.copied:
            yield name, self.stored(name)

    def stored(self, name: str) -> TensorInfo:
        """Dtype and shape of a model's tensor in the checkpoint."""
        return self._stored[self.parts.sources[name]]

    def module(self, part: str) -> str:
        """Name of the part's module in the result."""
        return self.parts.target(f"{part}.weight").removesuffix(".weight")

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yields the checkpoint's tensor for one of the model in pieces: the first row of each, and its rows."""
        source = self.parts.sources[name]
        for start, stop in self.reader.row_ranges(source):
            yield start, self.reader.read(source, start, stop)
            self.reader.release(source, start, stop)

    def copy(self, name: str) -> None:
        """Writes a tensor in its own dtype."""
        dtype = self.stored(name).dtype
        for start, piece in self.pieces(name):
            self.write(name, piece.to(dtype), start)

    def copy_apart(self) -> None:
        """Writes the tensors next to the model's own."""
        for name in self.apart:
            self.writer.write(name, self.reader.read(name).view(self.reader.tensors[name].shape))
            self.reader.release(name)

    def write(self, name: str, rows: Tensor, start: int = 0) -> None:
        self.writer.write(self.parts.target(name), rows, start)

    def codes(self, part: str, rows: QuantizedRows, start: int = 0) -> None:
        """Writes rows of a quantised part."""
        module, tensors = self.module(part), self.writer.tensors
        for name, piece in encoding.encode(module, rows).items():
            is_scale = name.endswith(".weight_scale")
            piece = piece.to(tensors[name].dtype) if is_scale else piece
            self.writer.write(name, piece, start)
            if is_scale and part == self.tied and "lm_head.weight_scale" in tensors:
                self.writer.write("lm_head.weight_scale", piece, start)
        if start == 0 and (shape := f"{module}.weight_shape") in tensors:
            self.writer.write(shape, torch.tensor([tensors[f"{module}.weight_scale"].shape[0], rows.shape[1]]))

    def floats(self, layer: Layer) -> None:
        """Writes the parts of a loaded layer that stay floats: vectors and unquantised matrices."""
        for leaf in layer.walk():
            if isinstance(leaf, Vectors) and leaf.lengths:
                stored = torch.cat([values for _, values in leaf.stored()])
                for name, elements in self.parts.elements(leaf).items():
                    info = self.writer.tensors[self.parts.target(name)]
                    self.write(name, stored[elements].to(info.dtype).view(info.shape))
        for product in layer.matrices():
            for part, rows in self.parts.of(product):
                if id(product) not in self.parts.heads and not self.layouts[part]:
                    info = self.writer.tensors[f"{self.module(part)}.weight"]
                    self.write(f"{part}.weight", product.weight.matrix[rows].to(info.dtype))
        for name in self.parts.copied & layer.targets().keys():
            self.copy(name)
