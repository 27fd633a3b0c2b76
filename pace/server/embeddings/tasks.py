"""What a model is served for: `find_task`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.find import find_checkpoint
from pace.llm.models.encoders.encoder_list import find_encoder
from pace.server.options import ServeOptions

HUB = ("revision", "token", "cache_dir", "local_files_only", "progress")


def find_task(options: ServeOptions, arguments: Mapping[str, Any]) -> str:
    """Returns the task of a model: that of the options, or by its config, which is downloaded if needed. `arguments`
    are those of LLMModel. A model that cannot be read is left to its load, which says why."""
    if options.task is not None:
        return options.task
    try:
        where = {name: arguments[name] for name in HUB if name in arguments}
        path = find_checkpoint(arguments["model_name_or_path"], **where, weights=False)
        is_encoder = find_encoder(Checkpoint(path).config) is not None
    except (OSError, NotImplementedError, TypeError, ValueError):
        return "generate"
    return "embed" if is_encoder else "generate"
