"""Random contents of config.json give a model or a documented error."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.llm.models.model_list import MODEL_LIST, read_config
from pace.llm.models.rope_config import USED
from pace.ops import reference

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE_NAMES = sorted(set().union(*USED.values()))


@pytest.mark.parametrize("max_examples", [12, pytest.param(150, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("architecture", MODEL_LIST)
def test_any_json_gives_a_model_without_memory_or_a_documented_error(architecture, max_examples):
    config_class = MODEL_LIST[architecture].Config
    names = [field.name for field in dataclasses.fields(config_class)] + ["rope_theta", "partial_rotary_factor"]

    @settings(max_examples=max_examples, deadline=None)
    @given(data=st.data())
    def check(data):
        raw = {"architectures": [architecture], "num_hidden_layers": 2, "n_layer": 2}
        raw.update(data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=3)))
        kinds = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"]) | JSON
        if data.draw(st.booleans()):
            rope = data.draw(st.dictionaries(st.sampled_from(ROPE_NAMES), JSON | st.floats(0.5, 64.0), max_size=5))
            raw["rope_scaling"] = {"rope_type": data.draw(kinds), **rope}
        try:
            model_class, config = read_config(raw)
        except (ValueError, NotImplementedError) as error:
            assert "config.json" in str(error)
            return
        model = model_class(config, torch.float32, reference)
        assert model.nbytes == 0 and model.targets()

    check()
