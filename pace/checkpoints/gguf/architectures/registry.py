"""The architectures of GGUF files that can be read."""

from __future__ import annotations

from collections.abc import Collection

from pace.checkpoints.gguf.architectures.architecture import Architecture
from pace.checkpoints.gguf.architectures.biased_mixtures import BIASED_MIXTURES
from pace.checkpoints.gguf.architectures.dense import DENSE
from pace.checkpoints.gguf.architectures.drafters import DRAFTERS
from pace.checkpoints.gguf.architectures.encoders import ENCODERS
from pace.checkpoints.gguf.architectures.gemma4 import GEMMA_4, GEMMA_4_ASSISTANT
from pace.checkpoints.gguf.architectures.hybrids import HYBRIDS
from pace.checkpoints.gguf.architectures.mixtures import MIXTURES
from pace.checkpoints.gguf.architectures.older import OLDER

ARCHITECTURES: tuple[Architecture, ...] = (
    *DENSE,
    GEMMA_4,
    GEMMA_4_ASSISTANT,
    *OLDER,
    *MIXTURES,
    *BIASED_MIXTURES,
    *HYBRIDS,
    *DRAFTERS,
    *ENCODERS,
)


def find_architecture(name: str, sources: Collection[str]) -> Architecture | None:
    """Returns the record of general.architecture, given the names of the file's tensors and keys, or None."""
    found = (each for each in ARCHITECTURES if each.name == name and (not each.marker or each.marker in sources))
    return next(found, None)
