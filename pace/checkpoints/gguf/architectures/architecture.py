"""The record of one architecture of GGUF files. It defines how their tensors and metadata become those of a checkpoint
of the Hub. The other modules here have the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pace.checkpoints.gguf.architectures.forms import Form
from pace.checkpoints.gguf.architectures.names import LLAMA, TensorNames
from pace.checkpoints.gguf.file import Metadata

Fields = dict[str, Any]
"""Fields of a config.json."""


class Key(NamedTuple):
    """A key that becomes a field. Without a default it is required, and an integer. Otherwise it has the default's
    type."""

    name: str
    default: bool | int | float | None = None


class Keys(Metadata):
    """The metadata of a file's architecture, without the architecture's prefix, and the shapes of its tensors."""

    def __init__(self, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]):
        """`shapes`: by the Hub's names of tensors."""
        super().__init__(metadata.path, metadata, f"{metadata['general.architecture']}.")
        self.shapes = shapes
        self.of_file = metadata
        """All metadata of the file, for keys without the architecture's prefix."""

    def read(self, name: str, default: bool | int | float | None = None) -> Any:
        """Value of a `Key`. Raises ValueError if it is missing and has no default."""
        method = {bool: self.flag, float: self.number}.get(type(default), self.integer)
        return self.required(name, method(name, default))

    def per_layer(self, name: str, num_layers: int) -> list[int]:
        """Integers or flags of the layers: those of an array, which may have more, or the same for all. Raises
        ValueError if they are missing, not integers, or too few."""
        values = self.get(name)
        if not isinstance(values, np.ndarray):
            return [self.read(name)] * num_layers
        if len(values) < num_layers or values.dtype.kind not in "iub":
            raise ValueError(
                f"{self.path}: {self.prefix}{name} must have an integer for each of {num_layers} layers; "
                f"got {len(values)} of type {values.dtype}"
            )
        return values[:num_layers].tolist()

    def has_tensor(self, end: str) -> bool:
        """True if the file has a tensor whose name on the Hub has this end."""
        return any(name.endswith(end) for name in self.shapes)

    def refused(self, text: str) -> NotImplementedError:
        """An error that names the file."""
        return NotImplementedError(f"{self.path}: {text}")


Change = Callable[[Fields, Keys], Fields]
"""Function that returns changed fields. It raises ValueError or NotImplementedError that names the file."""


def unchanged(fields: Fields, keys: Keys) -> Fields:
    return fields


def without_window(fields: Fields, keys: Keys) -> Fields:
    """Refuses a file with a sliding window. llama.cpp writes none for Qwen."""
    window = keys.integer("attention.sliding_window", 0)
    if 0 < window < fields["max_position_embeddings"]:
        raise keys.refused(f"{keys.prefix}attention.sliding_window = {window} is not implemented")
    return fields


@dataclass(frozen=True)
class Architecture:
    """The conversion of one architecture's files to a checkpoint of the Hub. The defaults are those of a Llama.

    Fields of config.json come from these, in this order: keys that all architectures have, `present`, `window`,
    `convert` and `keys`. They replace `defaults` and each other."""

    name: str
    """Value of general.architecture."""
    model_type: str
    """The Hub's name."""
    _: KW_ONLY
    marker: str = ""
    """A tensor or key that only files of this record have, if another record has the same name."""
    names: TensorNames = LLAMA
    permuted: bool = False
    """True if the rows of queries and keys are permuted, so that rotated pairs are adjacent."""
    forms: Mapping[str, Form] = field(default_factory=dict)
    """End of a tensor's name on the Hub -> its form in a file. The first end that fits counts."""
    layer_norms: str | None = None
    """Field of config.json for the epsilon of layer norms. None for RMS norms."""
    latent: bool = False
    """True for latent attention. The head width in the config is then that of the rotated part."""
    log_multiplier: bool = False
    """True if a file may state YaRN's mscale_all_dim, like those with latent attention."""
    mixed: bool = False
    """True if some layers lack attention or a feed-forward. Arrays of heads or widths then have 0 for these layers."""
    varied: tuple[str, ...] = ()
    """Keys whose numbers may differ between the layers. The field is that of the first layer; `convert` adds the
    others."""
    proportional: bool = False
    """True if the rotation's factors are 1 for the pairs of a head that rotate, and infinite for the others."""
    attends: bool = True
    """False if no layer has attention, and a file has no number of heads."""
    embeds: bool = True
    """False if a file may use the embedding of another model's file. It then states the number of tokens."""
    defaults: Fields = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    """Field of config.json -> tensor of the file whose presence it states."""
    keys: Mapping[str, Key] = field(default_factory=dict)
    """Field of config.json -> key with its value."""
    absent: tuple[str, ...] = ()
    """Fields that the Hub's config.json does not have."""
    window: Change = without_window
    """Adds the fields of sliding windows."""
    convert: Change = unchanged
    """Makes all other changes."""
