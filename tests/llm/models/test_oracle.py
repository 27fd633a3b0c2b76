"""Compares every architecture and variant without experts with transformers and with itself: cached, ragged, chunked
and recorded. test_oracle_of_experts.py tests those with experts."""

from __future__ import annotations

import dataclasses

import pytest

from pace.llm.models.model_list import read_config
from tests.llm.models.families.dense_variants import DENSE_BASE
from tests.llm.models.parts import FIRST_OF_EACH
from tests.llm.models.states.hybrid_variants import HYBRID_BASE
from tests.llm.models.states.mamba_variants import MAMBA_BASE
from tests.llm.models.variants import IDS, IN_TRANSFORMERS, ROUTED, VARIANTS, VISION
from tests.llm.models.visit import Visit
from tests.plugins.tiers import sample

pytest.importorskip("transformers")


NAMES = [name for name, variant in zip(IDS, VARIANTS) if variant[0] not in ROUTED]


def is_always_run(name: str) -> bool:
    """False for further variants of families that are close to others."""
    return name.split("-")[0] not in DENSE_BASE or name in FIRST_OF_EACH


@pytest.mark.parametrize("name", sample(NAMES, is_always_run))
def test_variant(name, tmp_path, subtests, pytestconfig, restore_isa_and_threads):
    Visit(name, tmp_path, in_full=pytestconfig.getoption("tier") == "all").check_all(subtests)


NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv"] * 32},
    "mistral3": {"text_config": {"model_type": "mistral"}},
}
"""Fields without which the defaults of transformers do not run."""


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(model_type):
    from transformers import AutoConfig

    needed = NEEDED.get(model_type, {})
    whole = AutoConfig.for_model(model_type, **needed).to_dict()
    least = {"model_type": model_type, **needed} | ({"text_config": {}} if model_type in VISION else {})
    ours, theirs = read_config(least)[1], read_config(whole)[1]
    if model_type in HYBRID_BASE | MAMBA_BASE:
        assert getattr(ours, "layer_types", None) == getattr(theirs, "layer_types", None)
    if hasattr(ours, "layer_types"):  # the same may be in other fields
        layers = range(ours.num_hidden_layers)
        assert [ours.window(layer) for layer in layers] == [theirs.window(layer) for layer in layers]
        windows = {name: getattr(theirs, name) for name in ("layer_types", "sliding_window") if hasattr(theirs, name)}
        ours = dataclasses.replace(ours, **windows)
    assert ours == theirs
