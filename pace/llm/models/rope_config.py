"""Reads the rotary embedding from a config.json, in the spelling of transformers 4 or 5.

transformers 4: `rope_theta` and `partial_rotary_factor` at the top, `rope_scaling = {"type" or "rope_type": ..., ...}`
or null. transformers 5: `rope_parameters = {"rope_type": ..., "rope_theta": ..., "partial_rotary_factor": ..., ...}`.
If both are given, `rope_scaling` overrides `rope_parameters`, and a value inside overrides one at the top, as in
transformers.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from pace.llm.layers.rotary import FREQUENCIES, RopeConfig
from pace.llm.models.layer_types import LAYER_TYPES
from pace.llm.models.model_config import MAX_POSITIONS, read_number
from pace.naming import shown

logger = logging.getLogger("pace")

ROPE_FIELDS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
"""Fields that `read_rope` reads from the top of a config.json."""

COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
USED = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "ntk_alpha": {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"},
    "proportional": {"factor"},
}
"""Fields of `rope_scaling` / `rope_parameters` that each kind uses in addition to the common ones."""
HARMLESS = {"finetuned", "max_position_embeddings", "original_max_position_embeddings", "factor"}
"""Fields in checkpoints that no formula here uses."""
REFUSED = {"mrope_section", "mrope_interleaved", "full_attention", "sliding_attention", "short_mscale", "long_mscale"}
"""Unsupported fields that would change the result."""

KIND_NAMES = {"su": "longrope"}
"""Old names of kinds."""


def read_rope(
    fields: dict[str, Any],
    head_dim: int,
    max_positions: int,
    kinds: tuple[str, ...] = tuple(FREQUENCIES),
    kind_names: dict[str, str] = KIND_NAMES,
    original_max_positions: int | None = None,
    partial: bool = False,
    default_partial: float = 1.0,
    default_theta: float = 10000.0,
    interleaved: bool = False,
) -> RopeConfig:
    """Returns the rotary embedding in `fields` (a config.json).

    `kinds` are those that the architecture supports, `kind_names` their old names. `original_max_positions` is the
    architecture's default for original_max_position_embeddings at the top, which overrides the one inside. Without
    `partial`, a partial_rotary_factor other than 1 is refused, because transformers ignores it for the architecture.
    The kind `proportional` always has one: it says how many pairs of the whole head turn. Raises a ValueError or
    NotImplementedError that names the field."""
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    reader = RopeReader(source, fields.get(source))
    theta = reader.number("rope_theta", first_given(fields.get("rope_theta"), default_theta), 1e-3, 1e30)
    top_factor = first_given(fields.get("partial_rotary_factor"), default_partial)
    factor = reader.number("partial_rotary_factor", top_factor, 0.0, 1.0)
    kind = reader.kind(kinds, kind_names)
    whole_head = kind == "proportional"
    if factor != 1.0 and not (partial or whole_head):
        raise NotImplementedError(
            f"config.json: partial_rotary_factor = {factor} is not implemented for this architecture"
        )
    dim = head_dim if whole_head else int(head_dim * factor)
    if dim < 2 or dim % 2 and dim + 1 > head_dim:
        raise ValueError(
            "config.json: head_dim * partial_rotary_factor must be at least 2, and even where it is all of the head; "
            f"got {head_dim} * {factor}"
        )

    reader.check_names(kind)
    original = max_positions
    if "original_max_position_embeddings" in USED[kind]:
        top = first_given(fields.get("original_max_position_embeddings"), original_max_positions)
        original = reader.length("original_max_position_embeddings", top, max_positions)
    common = {
        "kind": kind,
        "theta": theta,
        "dim": dim,
        "max_positions": max_positions,
        "original_max_positions": original,
        "rotated": int(head_dim * factor // 2) if whole_head else 0,
        "interleaved": interleaved,
    }
    return RopeConfig(**(common | SPECIFIC[kind](reader, common)))


def fields_of_layers(
    fields: dict[str, Any], kind: str, theta_name: str = "rope_theta", scaled: bool = True
) -> dict[str, Any]:
    """Selects the rope fields of layers of one kind of attention, for `read_rope`.

    In transformers 5, `rope_parameters` holds an object for each kind. In transformers 4 the base has a name for each
    kind, and `rope_scaling` applies only to the `scaled` kind. Raises ValueError for a value that is no object,
    NotImplementedError for an object that is not split by kind."""
    by_kind, scaling = fields.get("rope_parameters") or {}, scaled and fields.get("rope_scaling") or {}
    for name, value in (("rope_parameters", by_kind), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ValueError(f"config.json: {name} must be an object or null; got {shown(value)}")
    if other := sorted(str(name) for name in by_kind if name not in LAYER_TYPES):
        raise NotImplementedError(
            f"config.json: rope_parameters.{other[0]} is not implemented for this architecture, whose layers rotate in"
            f" several ways; implemented: {', '.join(LAYER_TYPES)}"
        )
    own = by_kind.get(kind) or {}
    if not isinstance(own, dict):
        raise ValueError(f"config.json: rope_parameters.{kind} must be an object or null; got {shown(own)}")
    source = "rope_scaling" if scaling else "rope_parameters"
    return {source: own | scaling, "rope_theta": fields.get(theta_name)}


def check_even(rope: RopeConfig, head_dim: int) -> RopeConfig:
    """Returns `rope`. Raises ValueError if it would rotate an odd number of elements of a head."""
    if rope.dim % 2:
        raise ValueError(
            f"config.json: head_dim * partial_rotary_factor must be even; got {head_dim} and {rope.dim} of it"
        )
    return rope


def first_long(rope: RopeConfig) -> int | None:
    """Length of the shortest sequence that uses the long factors; None without long factors."""
    return rope.original_max_positions + 1 if rope.kind == "longrope" else None


def longest_sequence(rope: RopeConfig) -> int:
    """Maximum sequence length of a scaling. In checkpoints, max_position_embeddings may count the stretched positions
    (llama3, longrope: always) or the positions before (dynamic: always). With dynamic, the length is unbounded."""
    trained = {"linear": rope.max_positions, "yarn": rope.original_max_positions}.get(rope.kind, 0)
    stretched = MAX_POSITIONS if rope.kind == "dynamic" else int(trained * rope.factor)
    return min(max(rope.max_positions, stretched), MAX_POSITIONS)


def first_given(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class RopeReader:
    """Reads the dictionary of a rope configuration field by field."""

    def __init__(self, source: str, values: Any):
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"config.json: {source} must be an object or null; got {shown(values)}")
        self.source = source
        self.values = values or {}

    def kind(self, kinds: tuple[str, ...], kind_names: dict[str, str]) -> str:
        given = self.values.get("rope_type", self.values.get("type", "default"))
        if not isinstance(given, str):
            raise ValueError(f"config.json: {self.source}.rope_type must be a string; got {shown(given)}")
        kind = kind_names.get(given, given)
        if kind == "dynamic" and "ntk_alpha" in kinds and self.values.get("alpha"):
            return "ntk_alpha"
        if kind not in kinds:
            raise NotImplementedError(
                f"config.json: {self.source}.rope_type = {given!r} is not implemented for this architecture;"
                f" implemented: {', '.join(kinds)}"
            )
        return kind

    def check_names(self, kind: str) -> None:
        unused = self.values.keys() - COMMON - USED[kind]
        if refused := sorted(name for name in unused if name in REFUSED and self.values[name] is not None):
            raise NotImplementedError(f"config.json: {self.source}.{refused[0]} is not implemented")
        if unknown := sorted(str(name) for name in unused - HARMLESS - REFUSED):
            logger.warning(
                "config.json: ignored fields of %s that %s does not use: %s", self.source, kind, ", ".join(unknown)
            )

    def number(self, name: str, default: float | None, low: float, high: float) -> float:
        """A finite number in `low..high`. The default replaces null and a missing field; None as a default means
        required."""
        value = first_given(self.values.get(name), default)
        if value is None:
            raise ValueError(f"config.json: {self.source}.{name} is missing")
        try:
            return read_number(value, low, high)
        except ValueError as error:
            where = f"{self.source}.{name}" if name in self.values else name
            raise ValueError(f"config.json: {where} must be {error}; got {shown(value)}") from None

    def length(self, name: str, top: Any, default: int) -> int:
        """A number of positions: the field at the top of config.json overrides the one inside."""
        value = first_given(top, self.values.get(name), default)
        if type(value) is not int or not 1 <= value <= MAX_POSITIONS:
            raise ValueError(f"config.json: {name} must be an integer in 1..{MAX_POSITIONS}; got {shown(value)}")
        return value

    def factors(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        values = self.values.get(name)
        if not isinstance(values, list) or len(values) != length:
            got = f"a list of {len(values)}" if isinstance(values, list) else shown(values)
            raise ValueError(f"config.json: {self.source}.{name} must be a list of {length} numbers; got {got}")
        try:
            return tuple(read_number(value, 1e-6, 1e9) for value in values)
        except ValueError as error:
            raise ValueError(f"config.json: {self.source}.{name}: each element must be {error}") from None


def _scaled(reader: RopeReader, common: dict[str, Any]) -> dict[str, Any]:
    return {"factor": reader.number("factor", None, 1e-3, 1e6)}


def _dynamic(reader: RopeReader, common: dict[str, Any]) -> dict[str, Any]:
    if common["dim"] <= 2:
        raise ValueError(
            f"config.json: {reader.source}.rope_type = 'dynamic' needs more than 2 rotated elements a head"
        )
    return {"factor": reader.number("factor", None, 1.0, 1e6)}


def _ntk_alpha(reader: RopeReader, common: dict[str, Any]) -> dict[str, Any]:
    """Hunyuan's form of dynamic: the base is stretched by a fixed factor, for any length."""
    dim = common["dim"]
    if dim <= 2:
        raise ValueError(f"config.json: {reader.source}.alpha needs more than 2 rotated elements a head")
    alpha = reader.number("alpha", None, 1e-6, 1e9)
    return {"kind": "default", "theta": common["theta"] * alpha ** (dim / (dim - 2))}


def _llama3(reader: RopeReader, common: dict[str, Any]) -> dict[str, Any]:
    low = reader.number("low_freq_factor", None, 1e-6, 1e6)
    high = reader.number("high_freq_factor", None, 1e-6, 1e6)
    if high < low:
        raise ValueError(
            f"config.json: {reader.source}.high_freq_factor must not be below low_freq_factor; got {high} and {low}"
        )
    return {**_scaled(reader, common), "low_freq_factor": low, "high_freq_factor": high}


def _yarn(reader: RopeReader, common: dict[str, Any]) -> dict[str, Any]:
    if common["theta"] <= 1.0:
        raise ValueError(f"config.json: {reader.source}.rope_theta must be above 1 for yarn; got {common['theta']}")
    factor = reader.number("factor", common["max_positions"] / common["original_max_positions"], 1e-3, 1e6)
    truncate = reader.values.get("truncate", True)
    if type(truncate) is not bool:
        raise ValueError(f"config.json: {reader.source}.truncate must be true or false; got {shown(truncate)}")
    mscale = reader.number("mscale", 0.0, 0.0, 1e3)
    mscale_all_dim = reader.number("mscale_all_dim", 0.0, 0.0, 1e3)
    attention_factor = yarn_magnitude(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return {
        "factor": factor,
        "attention_factor": reader.number("attention_factor", attention_factor, 0.0, 1e3),
        # transformers reads 0 as "not given"
        "beta_fast": reader.number("beta_fast", 32.0, 0.0, 1e6) or 32.0,
        "beta_slow": reader.number("beta_slow", 1.0, 0.0, 1e6) or 1.0,
        "truncate": truncate,
        "mscale_all_dim": mscale_all_dim,
    }


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Returns `0.1 * mscale * ln(factor) + 1`, or 1 for a factor of at most 1. With an mscale of 1 it is YaRN's factor
    of cosines and sines."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(reader: RopeReader, common: dict[str, Any]) -> dict[str, Any]:
    original, pairs = common["original_max_positions"], -(-common["dim"] // 2)
    factor = reader.number("factor", common["max_positions"] / original, 1e-6, 1e6)
    attention_factor = 1.0
    if factor > 1.0:
        if original < 2:
            raise ValueError(
                f"config.json: original_max_position_embeddings must be at least 2 for longrope; got {original}"
            )
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factor": factor,
        "attention_factor": reader.number("attention_factor", attention_factor, 0.0, 1e3),
        "short_factor": reader.factors("short_factor", pairs),
        "long_factor": reader.factors("long_factor", pairs),
    }


SPECIFIC = {
    "default": lambda reader, common: {},
    "linear": _scaled,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": lambda reader, common: {"factor": reader.number("factor", 1.0, 1e-3, 1e6)},
}
