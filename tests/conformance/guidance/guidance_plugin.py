"""Plugin for guidance's tests of models, on the bundled model instead of the Hub's models. PACE_GUIDANCE_ENGINE selects
the engine: "pace", or "transformers" for guidance's own engine with the same weights."""

from __future__ import annotations

import os

import guidance
import pytest
import transformers
from guidance.models import Transformers

from pace.assets import TINY

BATCH = 64
"""Tokens of a batch in llama.cpp's tests, so few that five batches fit in the bundled model's context."""


def model(*names: object, **options: object) -> guidance.models.Model:
    """The bundled model, for every requested name."""
    if os.environ.get("PACE_GUIDANCE_ENGINE", "pace") == "pace":
        from pace.integrations.guidance import Pace

        made = Pace(TINY, dtype="float32", **options)
    else:
        made = Transformers(str(TINY), torch_dtype="float32", **options)
    made.engine.model_obj.n_batch = BATCH
    made.engine.model_obj.metadata = {"tokenizer.chat_template": made.engine.tokenizer._orig_tokenizer.chat_template}
    return made


def pytest_configure() -> None:
    read = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda *names, **options: read(str(TINY))
    guidance.models.Transformers = model


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    if fixturedef.argname == "selected_model":
        fixturedef.func = lambda selected_model_name: model()
    if fixturedef.argname in ("llamacpp_model", "transformers_model"):
        fixturedef.func = lambda selected_model, selected_model_name: selected_model
