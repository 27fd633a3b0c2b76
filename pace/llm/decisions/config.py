"""`decision.json` and `decision_template.jinja`: how a model is asked for decisions, as transformers writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pace.checkpoints.files import asks_for_nothing, read_json_object, read_whole
from pace.naming import shown

CONFIG_NAME, TEMPLATE_NAME = "decision.json", "decision_template.jinja"
DECISION_FILES = (CONFIG_NAME, TEMPLATE_NAME)
MAX_TEMPLATE_BYTES = 1 << 20
KINDS = ("noul", "choice", "score")
"""Kinds of questions: true or false, one of several options, and one of several levels."""
PASSED_OVER = frozenset({"sort_choices"})
"""Fields of older files, which transformers passes over too."""


@dataclass(frozen=True)
class DecisionConfig:
    """Settings of decisions. Without files, any chat model is asked in its own chat template.

    Raises TypeError or ValueError that names the field."""

    labels: Mapping[str, list[str]] = field(default_factory=dict)
    """Kind of question -> the labels of its options, each one token. The default is Yes and No for "noul", and A, B,
    C ... for the others."""
    temperature: Mapping[str, float] = field(default_factory=dict)
    """Kind of question -> the divisor of its logits; 1 by default."""
    chat_template: str | None = None
    """Template that renders `state` with `question`, or with all `questions` in one prompt."""
    noul_options: tuple[str, ...] = ("true", "false")
    """Order of the options of a "noul" question."""
    sanitize_control_tokens: bool = True
    """True to encode the names of control tokens in a request as text."""

    def __post_init__(self) -> None:
        if not isinstance(self.labels, Mapping):
            raise TypeError(f"labels must map kinds of questions to lists of labels; got {shown(self.labels)}")
        for kind, labels in self.labels.items():
            if not isinstance(labels, list) or not all(isinstance(label, str) and label for label in labels):
                raise TypeError(f"labels[{shown(kind)}] must be a list of texts; got {shown(labels)}")
        if not isinstance(self.temperature, Mapping):
            raise TypeError(f"temperature must map kinds of questions to numbers; got {shown(self.temperature)}")
        for kind, value in self.temperature.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise ValueError(f"temperature[{shown(kind)}] must be a number above 0; got {shown(value)}")
        for name, given in (("labels", self.labels), ("temperature", self.temperature)):
            if unknown := [kind for kind in given if kind not in KINDS]:
                raise ValueError(f"{name} has the kind {shown(unknown[0])}; the kinds are {', '.join(KINDS)}")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise TypeError(f"chat_template must be a Jinja template; got {shown(self.chat_template)}")
        options = self.noul_options
        if not isinstance(options, (list, tuple)) or sorted(map(str, options)) != ["false", "true"]:
            raise ValueError(f'noul_options must be "true" and "false" in some order; got {shown(options)}')
        if not isinstance(self.sanitize_control_tokens, bool):
            raise TypeError(f"sanitize_control_tokens must be true or false; got {shown(self.sanitize_control_tokens)}")

    @classmethod
    def read(cls, path: str | Path) -> DecisionConfig:
        """Reads a decision.json, or the directory with one: both of its files are optional there.

        Raises FileNotFoundError for a path that does not exist, NotImplementedError for an adapter, and ValueError that
        names the file for anything invalid or unknown."""
        path = Path(path).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; give a {CONFIG_NAME}, or the directory with one")
        if path.is_file():
            return cls._of(path, read_json_object(path))
        file, template = path / CONFIG_NAME, path / TEMPLATE_NAME
        fields = read_json_object(file) if file.exists() else {}
        if template.exists():
            try:
                fields["chat_template"] = read_whole(template, MAX_TEMPLATE_BYTES).decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{template} is not UTF-8: {error}") from None
        return cls._of(file, fields)

    @classmethod
    def _of(cls, path: Path, fields: dict[str, Any]) -> DecisionConfig:
        """Returns the config of a file's fields."""
        if fields.pop("adapter", None):
            raise NotImplementedError(
                f"{path}: adapter is not implemented; load it with load_adapter, and name it in adapter="
            )
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        for name, value in fields.items():
            if name not in known and name not in PASSED_OVER and not asks_for_nothing(value):
                raise ValueError(f"{path} has the unknown field {shown(name)} with the value {shown(value)}")
        try:
            return cls(**known)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
