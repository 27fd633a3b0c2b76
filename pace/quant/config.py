"""Assigns a format to each matrix of a model: the `quantization` argument of `LLMModel`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pace.ops.weight_layout import SMALL_CODES
from pace.quant.format import Format
from pace.quant.registry import FORMATS, read_format

AUTO = "auto"
FLOAT = "float"
"""The name of no format: floats in the model's dtype."""


class QuantizationConfig:
    """The default format of a model's matrices, and the exceptions from it.

        QuantizationConfig("int4", group=32, symmetric=False)
        QuantizationConfig("int4", lm_head=None, overrides={"*.down_proj": "int8", "model.layers.0.*": None})
        QuantizationConfig("float", towers="q8_0")

    `format`: a name in `pace.quant.FORMATS`, optionally with that format's options as further arguments, or a `Format`.
    "float" keeps floats in every matrix but the exceptions.
    `embedding`, `lm_head`: the formats of these two. Options are given as a dict {"format": "int4", "group": 32}; None
    or "float" keeps floats. "auto" is q6_k if `format` is a smaller K type or has 1 or 2 bits. It is int8 if `format`
    is another one of less than 8 bits, else `format`. If a model shares one matrix between both, a setting for one
    applies to both. Two different settings make two matrices, which together take more memory.
    `towers`: the format of the blocks of towers for images and sound. Patches, positions, convolutions and mergers stay
    floats. "auto" is int8 if `format` has less than 8 bits, else `format`.
    `overrides`: formats by pattern (`*`, `?`, `[...]`) of module names: the checkpoint's tensor names without
    `.weight`. If several patterns match a module, the last one wins.

    Raises ValueError or TypeError for unknown formats and options."""

    def __init__(
        self,
        format: str | Format = "int4",
        *,
        embedding: Any = AUTO,
        lm_head: Any = AUTO,
        towers: Any = AUTO,
        overrides: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.format = (
            _read_choice("format", format) if format == FLOAT and not options else read_format(format, **options)
        )
        self.embedding = embedding if embedding == AUTO else _read_choice("embedding", embedding)
        self.lm_head = lm_head if lm_head == AUTO else _read_choice("lm_head", lm_head)
        self.towers = towers if towers == AUTO else _read_choice("towers", towers)
        if overrides is not None and not (
            isinstance(overrides, Mapping) and all(isinstance(pattern, str) for pattern in overrides)
        ):
            raise TypeError(
                'overrides must be a dict of module patterns and formats, for example {"*.down_proj": "int8"}; '
                f"got {overrides!r:.200}"
            )
        self.overrides = {
            pattern: _read_choice(f"overrides[{pattern!r}]", value) for pattern, value in (overrides or {}).items()
        }

    def for_modules(self, modules: Mapping[str, str], tied: bool) -> dict[str, Format | None]:
        """Returns the format of each module, None for floats.

        `modules`: module name -> "embedding", "lm_head", "towers", or "format" for all others.
        `tied`: True if the embedding and the LM head are one matrix. Overrides may then use either name.

        Raises ValueError for a pattern that matches no module, and if one matrix has different settings (`splits`).
        The same for `towers` of a model without one."""
        if self.towers != AUTO and "towers" not in modules.values():
            raise ValueError(
                f"towers={str(self.towers or FLOAT)!r}: this model has no tower for images or sound, or is loaded "
                "without it (media=False); leave towers out"
            )
        known = dict.fromkeys([*modules, "lm_head"])
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(f"overrides: no module matches {pattern!r}; {_near(pattern, known)}")
        return {
            name: self._tied(name) if tied and kind == "embedding" else self._of(name, kind)
            for name, kind in modules.items()
        }

    def _of(self, name: str, kind: str) -> Format | None:
        setting = self._setting_of(name, kind)
        if setting != AUTO:
            return setting
        if self.format is None:
            return None
        layout = self.format.layout
        if layout.code not in SMALL_CODES or (layout.code == "int6" and kind != "towers"):
            return self.format
        if kind == "towers":
            return read_format("int8")
        return read_format("q6_k" if layout.in_super_blocks or layout.code in ("int1", "int2") else "int8")

    def _setting_of(self, name: str, kind: str) -> Format | str | None:
        matching = [pattern for pattern in self.overrides if fnmatchcase(name, pattern)]
        return self.overrides[matching[-1]] if matching else getattr(self, kind)

    def splits(self, embedding: str) -> bool:
        """True if a shared matrix must be held twice: there are two different settings, for the module `embedding` and
        for the LM head."""
        return len(set(self._settings_of_tied(embedding).values())) > 1

    def _settings_of_tied(self, embedding: str) -> dict[str, Format | None]:
        settings = {
            name: self._setting_of(name, kind) for name, kind in ((embedding, "embedding"), ("lm_head", "lm_head"))
        }
        return {name: format for name, format in settings.items() if format != AUTO}

    def _tied(self, embedding: str) -> Format | None:
        """The format of tied weights: settings for `embedding` and `lm_head` must agree."""
        formats = self._settings_of_tied(embedding)
        if self.splits(embedding):
            choices = " and ".join(f"{format or 'floats'} for {name}" for name, format in formats.items())
            raise ValueError(
                f"this model's embedding and LM head are one matrix, which cannot have {choices}; give both the "
                "same format, or set only one"
            )
        return next(iter(formats.values())) if formats else self._of(embedding, "embedding")

    def without_overrides(self) -> QuantizationConfig:
        """Returns a copy without overrides and `towers`, for a model with other modules."""
        return QuantizationConfig(self.format or FLOAT, embedding=self.embedding, lm_head=self.lm_head)

    def to_dict(self) -> dict[str, Any]:
        """A dict that `read_quantization` accepts and turns into an equal config."""
        choices = {name: _as_dict(getattr(self, name)) for name in ("embedding", "lm_head", "towers")}
        return {
            **(self.format.to_dict() if self.format else {"format": FLOAT}),
            **choices,
            "overrides": {pattern: _as_dict(format) for pattern, format in self.overrides.items()},
        }

    def __repr__(self) -> str:
        return f"QuantizationConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizationConfig) and self.to_dict() == other.to_dict()

    __hash__ = None


def read_quantization(
    quantization: Any, load_in_4bit: bool = False, load_in_8bit: bool = False
) -> QuantizationConfig | None:
    """Returns the config that `LLMModel`'s arguments of the same names ask for, or None for no quantisation.

    `quantization`: a QuantizationConfig, the name of a format, a dict of QuantizationConfig's arguments, or
    transformers' BitsAndBytesConfig, also as a dict.

    Raises ValueError or TypeError for anything else, and for contradictory arguments."""
    for name, flag in (("load_in_4bit", load_in_4bit), ("load_in_8bit", load_in_8bit)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    given = (
        [f"quantization={quantization!r:.60}"] * (quantization is not None)
        + ["load_in_4bit"] * load_in_4bit
        + ["load_in_8bit"] * load_in_8bit
    )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both set the quantisation; give one of them")
    if load_in_4bit or load_in_8bit:
        return QuantizationConfig("nf4" if load_in_4bit else "int8")
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    if isinstance(quantization, (str, Format)):
        return QuantizationConfig(quantization)
    if hasattr(quantization, "load_in_4bit") and hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    if isinstance(quantization, Mapping):
        if "load_in_4bit" in quantization or "load_in_8bit" in quantization:
            return _read_bitsandbytes(quantization)
        return QuantizationConfig(**quantization)
    raise TypeError(
        f"quantization must be the name of a format ({', '.join(FORMATS)}), a QuantizationConfig or a dict of its "
        f"arguments, or a BitsAndBytesConfig; got {quantization!r:.200}"
    )


UNUSED_BITSANDBYTES_FIELDS = (
    "quant_method",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload",
    "_load_in_4bit",
    "_load_in_8bit",
)
"""Fields that set where and how bitsandbytes computes. They do not change the weights."""


def _read_bitsandbytes(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the fields of transformers' BitsAndBytesConfig. Embedding and LM head get the same defaults as with any
    other config. Modules whose names contain an entry of `llm_int8_skip_modules` stay floats."""
    fields = {name: value for name, value in fields.items() if name not in UNUSED_BITSANDBYTES_FIELDS}
    in_4bit, in_8bit = fields.pop("load_in_4bit", False), fields.pop("load_in_8bit", False)
    if bool(in_4bit) == bool(in_8bit):
        raise ValueError(
            "a BitsAndBytesConfig must set one of load_in_4bit and load_in_8bit to True; this one sets "
            f"{'both' if in_4bit else 'neither'}"
        )
    kind, nested = fields.pop("bnb_4bit_quant_type", "fp4"), fields.pop("bnb_4bit_use_double_quant", False)
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"bnb_4bit_quant_type must be 'nf4' or 'fp4'; got {kind!r}")
    skipped = fields.pop("llm_int8_skip_modules", None) or []
    if fields.pop("llm_int8_has_fp16_weight", False):
        raise ValueError(
            "llm_int8_has_fp16_weight=True keeps the weights in float16; load with dtype='float16' and no quantization"
        )
    if fields:
        raise ValueError(f"a BitsAndBytesConfig has no field {next(iter(fields))!r}")
    overrides = {f"*{module}*": None for module in skipped}
    return (
        QuantizationConfig("int8", overrides=overrides)
        if in_8bit
        else QuantizationConfig(kind, double_quantization=nested, overrides=overrides)
    )


def _read_choice(name: str, value: Any) -> Format | None:
    """Reads a Format, a name, a dict or None. Errors begin with `name`."""
    try:
        if value is None or value == FLOAT or value == {"format": FLOAT}:
            return None
        return read_format(**value) if isinstance(value, Mapping) else read_format(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _as_dict(choice: Format | str | None) -> dict[str, Any] | str | None:
    return choice.to_dict() if isinstance(choice, Format) else choice


def _near(pattern: str, names: Iterable[str]) -> str:
    """A hint for the error: modules whose last name parts resemble the pattern's, or else some examples."""
    last_parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    close = difflib.get_close_matches(pattern.rpartition(".")[2], last_parts, n=2, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr('*.' + part if part != 'lm_head' else part) for part in close)}?"
    return f"there are {', '.join(list(names)[:3])}, ... and the last parts {', '.join(last_parts)}"
