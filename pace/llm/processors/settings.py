"""A strict reader of the settings of processors: preprocessor_config.json and processor_config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pace.checkpoints.files import read_json_object
from pace.llm.models.model_config import same
from pace.naming import shown

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
FILES = (PREPROCESSOR, PROCESSOR)
"""Files of a checkpoint with settings of processors."""


def read_section(directory: Path, section: str) -> tuple[dict[str, Any], str]:
    """Settings of a processor, and the name of their file.

    transformers 5 writes them as the object `section` in processor_config.json, which counts if there is one. Older
    versions write them flat in preprocessor_config.json, which images and sound share. Raises FileNotFoundError if
    neither file has them, and the errors of `read_json_object`."""
    if (directory / PROCESSOR).exists():
        nested = read_json_object(directory / PROCESSOR).get(section)
        if isinstance(nested, dict):
            return nested, f"{PROCESSOR}: {section}"
        if nested is not None:
            raise ValueError(f"{PROCESSOR}: {section} must be an object; got {shown(nested)}")
    if not (directory / PREPROCESSOR).exists():
        raise FileNotFoundError(
            f"{directory} has no {PREPROCESSOR}, and no {PROCESSOR} with {section}; a model that takes media needs one"
        )
    return read_json_object(directory / PREPROCESSOR), PREPROCESSOR


def read_whole_processor(directory: Path) -> dict[str, Any]:
    """Settings of the whole processor, of texts and media; none if there is no processor_config.json. Raises the errors
    of `read_json_object`."""
    return read_json_object(directory / PROCESSOR) if (directory / PROCESSOR).exists() else {}


def read_token(whole: Mapping[str, Any], name: str, default: str) -> str:
    """The text of a special token in the settings of a whole processor. Raises ValueError if it is none."""
    token = default if whole.get(name) is None else whole[name]
    if not isinstance(token, str) or not token:
        raise ValueError(f"{PROCESSOR}: {name} must be the text of a token; got {shown(token)}")
    return token


def read_settings(
    cls: type, raw: Mapping[str, Any], file: str, only: Mapping[str, tuple], without_effect: Collection[str]
) -> dict[str, Any]:
    """Checks and returns the fields of dataclass `cls` that `raw` sets. A null counts as missing, as in transformers.

    Raises ValueError for a wrong value. Raises NotImplementedError for a field in `only` with a value that is not
    listed there, and for an unknown field."""
    fields = {field.name: field.metadata["read"] for field in dataclasses.fields(cls) if "read" in field.metadata}
    values = {}
    for name, value in raw.items():
        if value is None:
            continue
        if name in fields:
            try:
                values[name] = fields[name](value)
            except ValueError as error:
                raise ValueError(f"{file}: {name} must be {error}; got {shown(value)}") from None
        elif name in without_effect:
            continue
        elif name not in only:
            raise NotImplementedError(f"{file}: the field {shown(name)} is not implemented")
        elif not any(same(value, allowed) for allowed in only[name]):
            allowed = ", ".join(map(shown, only[name]))
            raise NotImplementedError(f"{file}: {name} = {shown(value)} is not implemented; implemented: {allowed}")
    return values


def check_same(field: str, given: Any, own: Any) -> None:
    """Raises ValueError if a field of config.json contradicts the processor's settings, which have `own`."""
    if given != own:
        raise ValueError(
            f"config.json: {field} = {shown(given)} contradicts the processor's settings, which have {own}"
        )
