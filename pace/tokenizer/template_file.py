"""Reads the chat template in a `chat_template.json`, which transformers does not read for tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pace.checkpoints.files import MAX_CONFIG_BYTES, read_json_object
from pace.naming import shown

FILE = "chat_template.json"


def read_template_file(directory: Path) -> str | dict[str, str] | None:
    """Returns the template in a directory's `chat_template.json`, or several by name. None if there is no such file.

    The file is `{"chat_template": ...}` with a text, texts by name, or a list of `{"name": ..., "template": ...}`.
    Raises ValueError for anything else, and what `read_json_object` raises."""
    path = directory / FILE
    if not path.exists():
        return None
    template = read_json_object(path, MAX_CONFIG_BYTES).get("chat_template")
    if isinstance(template, list) and all(isinstance(one, dict) for one in template):
        template = {one.get("name"): one.get("template") for one in template}
    if isinstance(template, str) or (template and _is_named(template)):
        return template
    raise ValueError(f"{path}: chat_template must be a text, or texts by name; got {shown(template)}")


def _is_named(template: Any) -> bool:
    return isinstance(template, dict) and all(isinstance(word, str) for pair in template.items() for word in pair)
