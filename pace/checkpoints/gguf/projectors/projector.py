"""The record of one projector type of mmproj files. It defines how the tower becomes that of a checkpoint of the Hub.
The other modules here have the records.

A file does not say what llama.cpp derives from its projector type. The records supply it, as the family's published
checkpoints have it. Sizes that llama.cpp takes from tensors are taken from them here, too.

Names and keys: the module of the family in conversion/ of llama.cpp, tools/mtmd/clip.cpp, and
gguf-py/gguf/tensor_mapping.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.architectures.changes import shortest
from pace.checkpoints.gguf.architectures.forms import AS_IT_IS, Form
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.file import GgufFile, Metadata
from pace.checkpoints.gguf.tokens import read_tokens

IMAGES, SOUND = "vision", "audio"
"""Kinds of towers, as keys name them."""
STATISTICS = (0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711)
"""Means and deviations of CLIP. A file has them in fp32, from which no rule gives them back."""
PATCHES = "v.patch_embd.weight"
BLOCKS = "v.blk"
"""Prefix of the blocks of a tower for images."""
UP, DOWN = (f"{BLOCKS}.0.{part}.weight" for part in ("ffn_up", "ffn_down"))


class TowerTensor(NamedTuple):
    """Where a file has a tensor of the Hub's checkpoint."""

    sources: tuple[str, ...]
    """Names in the file. Several tensors are stacked along a new first dimension."""
    form: Form = AS_IT_IS
    heads: int = 0
    """Number of heads of queries or keys, if rows are permuted so that rotated pairs are adjacent; else 0."""


class Whole(NamedTuple):
    """The model that a tower and its text model make."""

    model_type: str
    architecture: str
    """Name of its class on the Hub."""

    @property
    def fields(self) -> Fields:
        return {"model_type": self.model_type, "architectures": [self.architecture]}


@dataclass
class Tower:
    """What one tower adds to a checkpoint."""

    config: Fields
    """Fields of config.json outside of the text part, such as `vision_config`."""
    settings: Fields
    """Settings of its processor."""
    tensors: dict[str, TowerTensor]
    """Name on the Hub -> tensor."""
    _: KW_ONLY
    text: Fields = field(default_factory=dict)
    """Fields of the text part that replace those of its file."""
    unused: tuple[str, ...] = ()
    """Tensors of the file that hold what the text model has, or what is computed here."""


class TowerFile:
    """An open mmproj file as one of its towers, and the text model that it belongs to. Its methods raise ValueError
    that names the file."""

    def __init__(self, file: GgufFile, kind: str, text: Metadata, config: Fields):
        self.file, self.path, self.text, self.config = file, file.path, text, config
        self.keys = Metadata(file.path, file.metadata, f"clip.{kind}.")
        of_sound = [source for source in file.tensors if source.startswith(("a.", "mm.a."))]
        self.sources = of_sound if kind == SOUND else [name for name in file.tensors if name not in of_sound]
        """Names of the tower's tensors."""
        self.renamed: dict[int, str] = {}
        """Ids of unused tokens of the text's vocabulary, and the placeholders that take their place."""

    def integer(self, name: str) -> int:
        """Value of a key that must be there."""
        return self.keys.required(name, self.keys.integer(name))

    def number(self, name: str) -> float:
        return shortest(self.keys.required(name, self.keys.number(name)))

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Returns the shape of a tensor that must be there."""
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != dimensions:
            raise ValueError(f"{self.path} has no tensor {name} of {dimensions} dimensions")
        return tensor.shape

    def side(self, name: str) -> int:
        """Patches on a side of the square that a table `[positions, width]` is for."""
        return isqrt(self.shape(name, 2)[0])

    def check_width(self, width: int, where: str) -> None:
        """Raises ValueError if the tower makes rows of another width than the text model's."""
        own = self.config["hidden_size"]
        if width != own:
            raise ValueError(
                f"{self.path} belongs to another model: its rows have {width} numbers ({where}), and those of "
                f"{self.text.path} {own}"
            )

    @cached_property
    def exchanged(self) -> bool:
        """True if two matrices of an MLP have each other's name, as in files of the first converters."""
        up, down, hidden = self.shape(UP, 2), self.shape(DOWN, 2), self.integer("embedding_length")
        return up[1] != hidden == down[1]

    @property
    def intermediate_size(self) -> int:
        """Width of the MLPs. The first files of Qwen2-VL state it wrongly."""
        return self.shape(DOWN if self.exchanged else UP, 2)[0]

    def activation(self, gelu: str) -> str:
        """The activation that flags state. `gelu` is the family's kind of GELU, which has one flag for all kinds."""
        names = {f"clip.use_{name}": found for name, found in (("gelu", gelu), ("silu", "silu"))}
        return next((found for key, found in names.items() if self.file.metadata.flag(key)), "quick_gelu")

    def transformer(self) -> Fields:
        """Fields of `vision_config` that most families have."""
        return {
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": self.integer("attention.head_count"),
            "num_channels": self.shape(PATCHES, 4)[1],
            "patch_size": self.integer("patch_size"),
        }

    def normalisation(self) -> Fields:
        """Means and deviations of pixels."""
        found = {}
        for name in ("image_mean", "image_std"):
            values = self.keys.required(name, self.keys.numbers(name))
            found[name] = [_statistic(float(value)) for value in values]
        return found

    def placeholder(self, token: str, instead: str | None = None) -> int:
        """Returns the id of a placeholder in the text's vocabulary. If that has none, the token becomes the first that
        matches the pattern `instead`."""
        tokens = read_tokens(self.text)
        if tokens is not None and token in tokens.ids:
            return tokens.ids[token]
        if tokens is not None and instead is not None:
            for index, text in enumerate(tokens.texts):
                if re.fullmatch(instead, text):
                    self.renamed[index] = token
                    return index
        raise ValueError(
            f"{self.text.path} has no token {token} in its vocabulary, which stands for a row of the tower in "
            f"{self.path}"
        )

    def tensors(self, names: TensorNames, forms: Mapping[str, Form] = {}) -> dict[str, TowerTensor]:
        """The tensors of the tower by the Hub's names. `forms`: forms by names of the file."""
        if names.blocks == BLOCKS and names.inner and self.exchanged:
            names = names.but({"ffn_up": names.inner["ffn_down"], "ffn_down": names.inner["ffn_up"]})
        return {names.on_hub(source): TowerTensor((source,), forms.get(source, AS_IT_IS)) for source in self.sources}


def _statistic(value: float) -> float:
    """The number in preprocessor_config.json that an fp32 value stands for."""
    return next((known for known in STATISTICS if np.float32(known) == value), shortest(value))


@dataclass(frozen=True)
class Projector:
    """The conversion of one projector type."""

    name: str
    """Value of clip.projector_type."""
    models: Mapping[str, Whole]
    """Architecture of the text -> model of a file that has only this tower."""
    read: Callable[[TowerFile], Tower]
    """Converts a tower. Raises ValueError or NotImplementedError that names the file."""
    states_width: bool = True
    """False if projection_dim is not the width of the tower's rows for the text model."""


@dataclass
class Towers:
    """What an mmproj file adds to the checkpoint of its text."""

    path: Path | None = None
    """The mmproj file; None for no towers."""
    config: Fields = field(default_factory=dict)
    """The contents of config.json, with the text's."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section of processor_config.json -> settings of a processor."""
    tensors: dict[str, TowerTensor] = field(default_factory=dict)
    """Name on the Hub -> tensor."""
    renamed: dict[int, str] = field(default_factory=dict)
    """Tokens of the text's vocabulary that get another text, by id."""


def with_sections(text: Metadata, config: Fields) -> Fields:
    """How the frequencies of a head are split among time, height and width, as fields of the text part. A file without
    it has the default."""
    sections = text.numbers(f"{text['general.architecture']}.rope.dimension_sections")
    if sections is None:
        return {}
    rope = config.get("rope_scaling") or {"rope_type": "default"}
    return {"rope_scaling": {**rope, "mrope_section": sections[:3].tolist()}}
