#!/usr/bin/env python3
"""Replaces the `llama-server` that llama.cpp's tests start by `pace serve`, with translated options.

Options that only tune llama.cpp (batches, slots, caches) have no counterpart, and do not change answers there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from encoding_models import model_of_vectors

from pace.assets import TINY


def main() -> None:
    options = _options()
    if options.reranking:
        model = Path(os.environ["PACE_RANKER"])
    else:
        model = model_of_vectors(options.pooling) if options.embedding else _model(options)
    command = [sys.executable, "-m", "pace", "serve", str(model), "--any-model-name"]
    command += ["--host", options.host, "--port", options.port]
    for name in (options.alias or "tiny").split(","):
        command += ["--served-model-name", name]
    if options.ctx_size:  # llama.cpp divides it among its slots, and may exceed the model's trained context
        wanted = int(options.ctx_size) // int(options.parallel or 1)
        command += ["--max-seq-len", str(min(wanted, _config(model)["max_position_embeddings"]))]
    if options.cors_origins:
        command += ["--cors-origin", options.cors_origins]
    if options.api_key:
        os.environ["PACE_API_KEY"] = options.api_key
    os.execv(sys.executable, command)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("host", "port", "temp", "alias", "ctx-size", "parallel", "api-key", "cors-origins"):
        parser.add_argument(f"--{name}")
    for name in ("chat-template-file", "pooling"):
        parser.add_argument(f"--{name}")
    for name in ("embedding", "reranking"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_known_args()[0]


def _model(options: argparse.Namespace) -> Path:
    """The bundled model, with another default temperature or another template if requested."""
    home = Path(tempfile.mkdtemp(prefix="pace-llama-"))
    for file in TINY.iterdir():
        if file.is_file():
            (home / file.name).symlink_to(file)
    generation = json.loads((TINY / "generation_config.json").read_text())
    temperature = float(options.temp or 0.8)
    generation |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    _replace(home / "generation_config.json", json.dumps(generation))
    if options.chat_template_file:
        _replace(home / "chat_template.jinja", Path(options.chat_template_file).read_text())
    return home


def _config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def _replace(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    file.write_text(text)


if __name__ == "__main__":
    main()
