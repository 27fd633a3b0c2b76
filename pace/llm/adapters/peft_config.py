"""`adapter_config.json` of PEFT: what an adapter's tensors mean. Every field is known here, or refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pace.checkpoints.files import asks_for_nothing, read_json_object
from pace.llm.adapters.patterns import Pattern
from pace.naming import shown

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 1 << 16
MAX_PATTERN = 1024
"""Maximum length of a key of `rank_pattern` and `alpha_pattern`."""

WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern "
    "layers_to_transform lora_dropout megatron_config megatron_core merge_weights peft_version qalora_group_size "
    "revision runtime_config target_modules target_parameters task_type".split()
)
"""Fields about training, about where modules were found, and about files. The tensors themselves say the rest."""
REFUSED = {
    "alora_invocation_tokens": "an adapter that begins at a token of the prompt (aLoRA)",
    "arrow_config": "routing between adapters (Arrow)",
    "corda_config": "weights of the base that were changed before training (CorDA)",
    "kasa_config": "singular values of the base (KaSA)",
    "layer_replication": "layers that are used several times",
    "loftq_config": "weights of the base that were changed before training (LoftQ)",
    "lora_ga_config": "weights of the base that were changed before training (LoRA-GA)",
    "monteclora_config": "random adapters (MonteCLoRA)",
    "trainable_token_indices": "embeddings of single tokens",
    "use_bdlora": "block-diagonal adapters (BD-LoRA)",
    "use_dora": "magnitudes of rows (DoRA); merge it with PEFT's merge_and_unload",
    "use_qalora": "pooled inputs (QA-LoRA)",
    "velora_config": "compressed training (VeLoRA)",
}
"""Fields of what is not implemented, by what they ask for."""
READ = frozenset(
    "alpha_pattern bias ensure_weight_tying init_lora_weights lora_alpha lora_bias modules_to_save peft_type r "
    "rank_pattern use_rslora".split()
)
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base as it is. Others change it, so that the adapter only fits the
changed base. PEFT writes true when it converts such an adapter on saving."""


@dataclass(frozen=True)
class PeftConfig:
    """The fields that say how an adapter's matrices are scaled. The rank of a module is that of its matrices."""

    path: Path
    alpha: float
    alphas: Sequence[tuple[Pattern, float]]
    """Patterns of module paths, and alpha for each."""
    is_rank_stabilised: bool
    """True to divide alpha by the root of the rank."""
    has_bias: bool
    """True if the adapter may have biases inside of the scale."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of the paths of modules that were trained in full."""
    ensures_tying: bool = False
    """True if the adapter of an embedding is also that of a tied head."""

    @classmethod
    def read(cls, directory: Path) -> PeftConfig:
        """Reads a directory's adapter_config.json.

        Raises FileNotFoundError without one, and ValueError for invalid and unknown fields. Raises NotImplementedError
        for another method than LoRA, and for fields of what is not implemented. The message names file and field."""
        path = directory / CONFIG_NAME
        if not path.exists():
            raise FileNotFoundError(
                f"{directory} has no {CONFIG_NAME}: give the directory of a LoRA adapter that PEFT has saved, or the "
                "GGUF file of one"
            )
        fields = read_json_object(path)
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise NotImplementedError(f'{path}: peft_type must be "LORA"; got {shown(kind)}')
        for name, value in fields.items():
            if name in REFUSED and not asks_for_nothing(value):
                raise NotImplementedError(f"{path}: {name} is not implemented: {REFUSED[name]}")
            if name not in READ | REFUSED.keys() | WITHOUT_EFFECT and not asks_for_nothing(value):
                raise ValueError(f"{path} has the unknown field {shown(name)} with the value {shown(value)}")
        if (bias := fields.get("bias", "none")) not in ("none", None):
            raise NotImplementedError(
                f'{path}: bias={shown(bias)} means trained biases of the base, which are not implemented; only "none" '
                "is"
            )
        initialisation = fields.get("init_lora_weights", True)
        if not any(initialisation is known or initialisation == known for known in INITIALISATIONS):
            raise NotImplementedError(
                f"{path}: init_lora_weights={shown(initialisation)} changes the base before training; save the adapter "
                "with PEFT's path_initial_model_for_weight_conversion, which converts it"
            )
        _read_number(path, "r", fields.get("r", 8), whole=True)
        for pattern, rank in _read_patterns(path, "rank_pattern", fields).items():
            _read_number(path, f"rank_pattern[{shown(pattern)}]", rank, whole=True)
        alphas = [
            (_pattern(path, key), _read_number(path, f"alpha_pattern[{shown(key)}]", alpha))
            for key, alpha in _read_patterns(path, "alpha_pattern", fields).items()
        ]
        return cls(
            path,
            _read_number(path, "lora_alpha", fields.get("lora_alpha", 8)),
            alphas,
            _read_flag(path, "use_rslora", fields),
            _read_flag(path, "lora_bias", fields),
            _read_modules_to_save(path, fields),
            _read_flag(path, "ensure_weight_tying", fields),
        )

    def was_trained_in_full(self, tensor: str) -> bool:
        """True if `modules_to_save` names a module with this tensor, or one whose matrix is also that of the head."""
        is_tied = self.ensures_tying and tensor == "lm_head.weight" and len(self.modules_to_save) > 0
        return is_tied or any(_is_within(tensor, module) for module in self.modules_to_save)

    def check_saved(self, path: Path, tensors: Collection[str]) -> None:
        """Raises ValueError if `modules_to_save` names a module that has none of these tensors of a file."""
        for module in self.modules_to_save:
            if not any(_is_within(tensor, module) for tensor in tensors):
                raise ValueError(f"{self.path}: modules_to_save names {shown(module)}, and {path.name} has none")

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of a module's product, by the module's own alpha and rank. Raises ValueError if patterns
        with different values match the module: PEFT would take the first, in an order that its own files lose."""
        try:
            found = {pattern.key: alpha for pattern, alpha in self.alphas if pattern.matches(module)}
        except ValueError as error:
            raise ValueError(f"{self.path}: alpha_pattern: {error}") from None
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{shown(pattern)}: {alpha:g}" for pattern, alpha in found.items())
            raise ValueError(
                f"{self.path}: several keys of alpha_pattern match {module}, with different values ({listed}); leave "
                "one of them"
            )
        alpha = next(iter(found.values()), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _is_within(tensor: str, module: str) -> bool:
    """True if a tensor belongs to a module, or to one inside of it, whose path has this end."""
    parts = tensor.split(".")[:-1]
    return any(".".join(parts[:count]).endswith(module) for count in range(1, len(parts) + 1))


def _read_modules_to_save(path: Path, fields: Mapping[str, Any]) -> tuple[str, ...]:
    found = fields.get("modules_to_save") or []
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise ValueError(f"{path}: modules_to_save must be a list of names; got {shown(found)}")
    return tuple(found)


def _read_patterns(path: Path, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a field that maps regular expressions of module paths to numbers; {} if it is not given."""
    found = fields.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {name} must be an object of patterns and numbers; got {shown(found)}")
    if any(len(key) > MAX_PATTERN for key in found):
        raise ValueError(f"{path}: {name} has a key of more than {MAX_PATTERN} characters")
    return found


def _pattern(path: Path, key: str) -> Pattern:
    try:
        return Pattern(key)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{path}: alpha_pattern: {error}") from None


def _read_number(path: Path, name: str, value: Any, whole: bool = False) -> float:
    """Returns a finite number, or with `whole` a positive rank."""
    kinds = int if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (whole and not 1 <= value <= MAX_RANK):
        allowed = f"a whole number from 1 to {MAX_RANK}" if whole else "a finite number"
        raise ValueError(f"{path}: {name} must be {allowed}; got {shown(value)}")
    return float(value)


def _read_flag(path: Path, name: str, fields: Mapping[str, Any]) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{path}: {name} must be true or false; got {shown(value)}")
    return bool(value)
