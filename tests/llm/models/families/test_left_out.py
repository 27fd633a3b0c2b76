"""Families that are not implemented are refused by name, with a reason."""

from __future__ import annotations

import re

import pytest

from pace.llm.models.left_out import LEFT_OUT
from pace.llm.models.model_list import MODEL_LIST, find_family


def test_every_causal_language_model_of_transformers_is_implemented_or_refused_with_a_reason() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    for model_type, name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            find_family({"architectures": [name], "model_type": model_type})
        except NotImplementedError as error:
            message = (
                f"{name!r} is not implemented: [a-z]|{name!r} makes vectors or scores of texts"
                f"|{name} drafts for another model"
            )
            assert re.search(message, str(error)), (model_type, str(error))
    refused = [name for names in LEFT_OUT.values() for name in names]
    assert len(set(refused)) == len(refused) and not set(refused) & MODEL_LIST.keys()


@pytest.mark.parametrize("name", ["Gemma3TextModel", "Qwen3VLTextModel", "Gemma4TextModel"])
def test_bare_text_models_are_those_of_their_families(name):
    """Their model_type is that of the class with a head."""
    import transformers

    model_type = getattr(transformers, name).config_class.model_type
    assert find_family({"architectures": [name]}, embeds=True) is find_family({"model_type": model_type}, embeds=True)
