"""Changes of single fields of a tiny config, for all fields that transformers reads. The values follow from the types
that it declares, and from the strings in the lines of its source that name the field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.llm.models.variants import LLAMA3, VISION, YARN, config_fields, longrope

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")
KWARGS = re.compile(r"""kwargs\.(?:pop|get|setdefault)\(\s*["'](\w+)["']""")
GETATTR = re.compile(r"""getattr\(\s*(?:self\.)?(?:text_)?config,\s*["'](\w+)["']""")
LITERAL = re.compile(r"""["']([A-Za-z][A-Za-z0-9_-]*)["']""")

NOT_OF_THE_MODEL = re.compile(
    r"""dtype|torch_dtype|architectures|return_dict|output_(hidden_states|attentions)|chunk_size_feed_forward|id2label
    |label2id|problem_type|use_cache|is_encoder_decoder|.*_token_id|initializer_range|auto_map|transformers_version
    |_.*|allow_global_per_layer_attribute_access|.*dropout.*|.*pdrop|name_or_path|attn_implementation|model_type|base_model_.*|experts_implementation
    |quantization_config|vision_config|audio_config|text_config|num_labels|num_logits_to_keep|use_mamba_kernels
    |(image|video|pixel|audio|vision|speech|boi|eoi|boa|eoa|im)_.*|.*_(grid_thw|mask|kernels|aux_loss_coef)""",
    re.VERBOSE,
)
"""Fields of every config that no forward pass of text reads."""


NESTED = ("attn_config", "ffn_config")
"""Configs inside a config."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A config with one field changed."""

    model_type: str
    name: str
    value: Any
    fields: dict[str, Any]
    """The text fields of the config.json."""

    def __str__(self) -> str:
        return f"{self.model_type}: {self.name} = {self.value!r}"


def changes(model_type: str, special: dict[str, Any] | None = None) -> Iterator[Change]:
    """Yields the changes of the tiny config of a family, or of its variant with these `special` fields."""
    fields = config_fields(model_type, special or {})
    config = text_config(model_type, fields)
    for name, kinds in field_kinds(config).items():
        current = value_of(config, name)
        if name in NESTED and current is not None:
            yield from nested_changes(model_type, name, current, fields)
            continue
        for value in distinct(values(config, name, kinds, current)):
            if not same(value, current):
                others = {other: given for other, given in fields.items() if other != config.attribute_map.get(name)}
                yield Change(model_type, name, value, others | {name: value})


def nested_changes(model_type: str, part: str, config: Any, fields: dict[str, Any]) -> Iterator[Change]:
    """Changes of the fields of a config inside another."""
    for name, kinds in field_kinds(config).items():
        current = value_of(config, name)
        for value in distinct(values(config, name, kinds, current)):
            if not same(value, current):
                yield Change(model_type, f"{part}.{name}", value, fields | {part: fields.get(part, {}) | {name: value}})


def text_config(model_type: str, fields: dict[str, Any]) -> Any:
    """The config of transformers."""
    from transformers import AutoConfig

    if model_type in VISION:
        config = AutoConfig.for_model(model_type, text_config=fields, vision_config=VISION[model_type])
    else:
        config = AutoConfig.for_model(model_type, **fields)
    return config.get_text_config()


def field_kinds(config: Any) -> dict[str, frozenset[Any]]:
    """The types of each field that the config declares, or that its class or its model reads in another way. The latter
    have no type here."""
    declared = {field.name: kinds_of(field.type) for field in dataclasses.fields(config)}
    names = {*config.attribute_map}
    for kind, pattern in (("configuration", KWARGS), ("modeling", GETATTR)):
        names.update(*(pattern.findall(source) for source in sources(config, kind)))
    found = declared | {name: frozenset() for name in sorted(names - declared.keys())}
    return {name: kinds for name, kinds in found.items() if not NOT_OF_THE_MODEL.fullmatch(name)}


def value_of(config: Any, name: str) -> Any:
    """The value of a field; None if a config has none. If layers differ in it, that of the others."""
    config.allow_global_per_layer_attribute_access = True
    return getattr(config, name, None)


def kinds_of(hint: Any) -> frozenset[Any]:
    """The types in a hint, without their arguments; items of lists as `list[item]`."""
    if isinstance(hint, str):
        return frozenset()
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        items = [item for item in typing.get_args(hint) if item is not ...]
        return frozenset({(list, items[0] if items else None)})
    if origin is dict or hint is dict:
        return frozenset({dict})
    if origin is None:
        return frozenset({hint})
    return frozenset().union(*(kinds_of(item) for item in typing.get_args(hint)))


@functools.cache
def read(path: Path) -> str:
    return path.read_text()


def sources(config: Any, *kinds: str) -> list[str]:
    """The sources of transformers in the folder of a config, of these kinds: "configuration", "modeling"."""
    folder = Path(inspect.getfile(type(config))).parent
    return [read(path) for kind in kinds for path in sorted(folder.glob(f"{kind}_*.py"))]


def literals(config: Any, name: str) -> list[str]:
    """The strings in lines of the source that name a field."""
    lines = [line for source in sources(config, "configuration", "modeling") for line in source.splitlines()]
    found = {text for line in lines if re.search(rf"\b{name}\b", line) for text in LITERAL.findall(line)}
    return sorted(found - {name})[:8]


def values(config: Any, name: str, kinds: frozenset[Any], current: Any) -> Iterator[Any]:
    """Yields values of a field that has the value `current`."""
    unknown = not kinds
    if name in ("rope_parameters", "rope_scaling"):
        yield from rotations(config, current)
        return
    if type(None) in kinds or unknown:
        yield None
    if bool in kinds or unknown or isinstance(current, bool):
        yield from (True, False)
    if int in kinds or unknown:
        known = current if type(current) is int else None
        yield from (1, 2, 4) if known is None else (0, 1, known // 2, known - 1, known + 1, 2 * known)
    if float in kinds or unknown:
        known = current if isinstance(current, (int, float)) and math.isfinite(current) else 0.0
        yield from (0.5,) if unknown else (0.0, 0.5, 0.05 if abs(known) < 0.01 else 1.5 * known)
    if str in kinds or unknown:
        yield from literals(config, name)
        if "act" in name:
            yield from ACTIVATIONS
    if isinstance(current, (list, tuple)):
        yield from reordered(list(current))
    if any(isinstance(kind, tuple) for kind in kinds) or unknown:
        yield from lists(config, name)


def reordered(items: list[Any]) -> Iterator[list[Any]]:
    yield items[::-1]
    yield items[1:] + items[:1]
    for item in dict.fromkeys(map(str, items)):
        yield [next(other for other in items if str(other) == item)] * len(items)
    if all(type(item) in (int, float) for item in items):
        yield [1.5 * item for item in items]
        yield [item + 1 for item in items]
        yield []


def lists(config: Any, name: str) -> Iterator[list[Any]]:
    """Lists of the numbers of layers, and of kinds of layers."""
    count = value_of(config, "num_hidden_layers") or 2
    yield from ([0], [count - 1], [1] * count)
    kinds = [text for text in literals(config, name) if "_" in text or text in ("conv", "dense", "sparse", "moe")]
    for kind in kinds:
        yield [kind] * count
        yield [kind, *[kinds[0]] * (count - 1)]


def rotations(config: Any, current: Any) -> Iterator[Any]:
    """Rotations of each kind. If the layers rotate in several ways, those of one kind of layer change."""
    yield None
    current = current or {}
    by_layer = {kind: value for kind, value in current.items() if isinstance(value, dict)}
    for kind, own in by_layer.items():
        for value in rotations_of(config, own):  # transformers does not see `truncate` there
            yield current | {kind: {name: item for name, item in value.items() if name != "truncate"}}
    if not by_layer:
        yield from rotations_of(config, current)


def rotations_of(config: Any, own: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kept = ("partial_rotary_factor", "mrope_section")
    base = {"rope_theta": 10000.0} | {name: own[name] for name in kept if name in own}
    head_dim = value_of(config, "head_dim") or config.hidden_size // config.num_attention_heads
    pairs = int(head_dim * own.get("partial_rotary_factor", 1.0)) // 2
    yield base | {"rope_type": "default", "rope_theta": 500.0}
    yield base | {"rope_type": "default", "partial_rotary_factor": 0.5}
    yield base | {"rope_type": "default", "partial_rotary_factor": 1.0}
    yield base | {"rope_type": "linear", "factor": 3.0}
    yield base | {"rope_type": "dynamic", "factor": 2.0}
    yield base | LLAMA3
    yield base | YARN
    yield base | {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
    yield base | {**YARN, "attention_factor": 0.8, "beta_fast": 8.0, "beta_slow": 4.0, "truncate": False}
    yield base | longrope(max(pairs, 1), original_max_position_embeddings=16, factor=4.0)
    yield base | {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}


def distinct(items: Iterator[Any]) -> list[Any]:
    return list({repr(item): item for item in items}.values())


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)
