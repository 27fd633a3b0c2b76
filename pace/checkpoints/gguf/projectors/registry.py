"""The projector types of mmproj files that can be read. `read_towers` converts a file."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.file import GgufFile, Metadata
from pace.checkpoints.gguf.projectors.gemma3 import GEMMA3
from pace.checkpoints.gguf.projectors.gemma4 import GEMMA4, GEMMA4_SOUND, GEMMA4_UNIFIED, GEMMA4_UNIFIED_SOUND
from pace.checkpoints.gguf.projectors.idefics3 import IDEFICS3
from pace.checkpoints.gguf.projectors.internvl import INTERNVL
from pace.checkpoints.gguf.projectors.lfm2 import LFM2
from pace.checkpoints.gguf.projectors.llava import LLAVA
from pace.checkpoints.gguf.projectors.paddleocr import PADDLEOCR
from pace.checkpoints.gguf.projectors.pixtral import PIXTRAL
from pace.checkpoints.gguf.projectors.projector import IMAGES, SOUND, Projector, TowerFile, Towers, TowerTensor, Whole
from pace.checkpoints.gguf.projectors.qwen_audio import QWEN3_AUDIO, QWEN3_OMNI
from pace.checkpoints.gguf.projectors.qwen_vision import QWEN2, QWEN2_5, QWEN3

ARCHITECTURE = "clip"
"""general.architecture of these files."""
PROJECTORS = {
    projector.name: projector
    for projector in (
        QWEN2, QWEN2_5, QWEN3, QWEN3_AUDIO, GEMMA3, GEMMA4, GEMMA4_SOUND, GEMMA4_UNIFIED, GEMMA4_UNIFIED_SOUND,
        IDEFICS3, INTERNVL, LFM2, LLAVA, PADDLEOCR, PIXTRAL,
    )
}  # fmt: skip
"""Value of clip.projector_type -> record."""
WITH_SOUND = {
    (QWEN3.name, QWEN3_AUDIO.name): {"qwen3vlmoe": QWEN3_OMNI},
    (GEMMA4.name, GEMMA4_SOUND.name): GEMMA4.models,
    (GEMMA4_UNIFIED.name, GEMMA4_UNIFIED_SOUND.name): GEMMA4_UNIFIED.models,
}
"""Projector types of images and sound in one file -> architecture of the text -> model."""
TEXT_ARCHITECTURES = frozenset(
    text for models in (*(one.models for one in PROJECTORS.values()), *WITH_SOUND.values()) for text in models
)
"""Architectures of text models that towers belong to."""
SECTIONS = {IMAGES: "image_processor", SOUND: "feature_extractor"}
"""Kind of tower -> section of processor_config.json."""
OF_THE_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of the text that config.json has at its top, too."""


def read_towers(file: GgufFile, text: Metadata, config: Fields) -> Towers:
    """Converts an open mmproj file for a text model, with the metadata of its GGUF file and its `config`.

    Raises ValueError for a file that is no mmproj file or that belongs to another model, and for damaged contents.
    Raises NotImplementedError for an unknown projector type."""
    architecture = file.metadata.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{file.path} is a model of the architecture {architecture!r}, and no mmproj file, whose architecture is "
            f"{ARCHITECTURE!r}"
        )
    projectors = {kind: found for kind in (IMAGES, SOUND) if (found := _projector(file.metadata, kind))}
    whole = _whole(file, text, projectors)
    towers = Towers(file.path)
    text_config, beside = dict(config), whole.fields
    unused: set[str] = set()
    for kind, projector in projectors.items():
        of_kind = TowerFile(file, kind, text, config)
        if projector.states_width and (width := of_kind.keys.integer("projection_dim")) is not None:
            of_kind.check_width(width, f"{of_kind.keys.prefix}projection_dim")
        tower = projector.read(of_kind)
        beside |= tower.config
        text_config |= tower.text
        towers.settings[SECTIONS[kind]] = tower.settings
        towers.tensors |= tower.tensors
        towers.renamed |= of_kind.renamed
        unused |= {*tower.unused}
    _check_deepstack(file, text, beside)
    towers.config = {name: config[name] for name in OF_THE_WHOLE if name in config}
    towers.config |= beside | {"text_config": text_config}
    # Tensors without a place are refused by the check that the model uses all.
    placed = unused.union(*(tensor.sources for tensor in towers.tensors.values()))
    towers.tensors = {name: one for name, one in towers.tensors.items() if not unused.intersection(one.sources)}
    towers.tensors |= {name: TowerTensor((name,)) for name in file.tensors.keys() - placed}
    return towers


def _projector(metadata: Metadata, kind: str) -> Projector | None:
    """Returns the record of the tower for images or sound; None if the file has no such tower."""
    if not metadata.flag(f"clip.has_{kind}_encoder", False):
        return None
    names = ("clip.projector_type", f"clip.{kind}.projector_type")
    found = next((name for name in map(metadata.text, names) if name), None)
    if found is None and metadata.flag("clip.has_llava_projector", False):  # the first files of LLaVA
        found = LLAVA.name
    if found is None:
        raise ValueError(f"{metadata.path} has no {names[0]} in its metadata")
    if found not in PROJECTORS:
        raise NotImplementedError(
            f"{metadata.path}: the projector type {found[:80]!r} is not implemented; implemented: "
            f"{', '.join(PROJECTORS)}"
        )
    return PROJECTORS[found]


def _whole(file: GgufFile, text: Metadata, projectors: dict[str, Projector]) -> Whole:
    """The model that the towers of a file and a text model make."""
    names = tuple(projector.name for projector in projectors.values())
    models = WITH_SOUND.get(names, {}) if len(names) > 1 else dict(*(one.models for one in projectors.values()))
    whole = models.get(text.text("general.architecture"))
    if whole is None:
        raise ValueError(
            f"{file.path} has {' and '.join(names) or 'no tower'}, and does not belong to {text.path}, whose "
            f"architecture is {text['general.architecture']!r}"
        )
    return whole


def _check_deepstack(file: GgufFile, text: Metadata, config: Fields) -> None:
    """Raises ValueError if a text model of Qwen3-VL or Qwen3-ASR expects outputs of another number of blocks. Files of
    mixtures state no such number, or 0."""
    stated = text.integer("qwen3vl.n_deepstack_layers")
    found = len(config.get("vision_config", {}).get("deepstack_visual_indexes", ()))
    if stated not in (None, found):
        raise ValueError(
            f"{file.path} does not belong to {text.path}: it has {found} layers of deepstack, and the model {stated}"
        )
