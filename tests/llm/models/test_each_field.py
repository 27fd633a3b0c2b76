"""Fields that transformers reads, each changed alone: logits are those of transformers, or the config is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pace.llm.models.model_list import read_config
from tests.llm.models.families.latent_variants import LATENT_BASE
from tests.llm.models.field_changes import Change, changes
from tests.llm.models.variants import save_tiny
from tests.llm.models.visit import TOLERANCE, oracle, relative_error
from tests.plugins.tiers import quarter, quarter_of
from tests.support import TensorDict, backend, backends, prefill

pytest.importorskip("transformers")

TOKENS = torch.randint(2, 99, (45,), generator=torch.Generator().manual_seed(3))

OTHERWISE = dict.fromkeys((*LATENT_BASE, "bailing_hybrid", "kimi_linear", "youtu"), ("head_dim",)) | {
    "axk1": ("head_dim", "moe_layer_freq"),
    "cohere2_moe": ("rope_scaling",),
    "hy_v3": ("num_shared_experts",),  # without any, transformers saves empty tensors
    "nemotron_h": ("time_step_min", "mamba_dt_min", "time_step_limit", "mamba_dt_limit"),
}
"""Fields that pace follows and transformers does not, or the reverse, by family (docs/models.md). With latent attention
other fields determine the width of a head."""
ODD_SIZES = 10
"""Some changes magnify rounding, such as those to a norm of a single element. A field that is not followed has errors
of a hundredth and more."""


def outcome(change: Change, folder: Path) -> str:
    """Returns "same", "refused", or "no model" if transformers does not run it; otherwise what is wrong."""
    try:
        expected = oracle(save_tiny(folder, change.model_type, change.fields), TOKENS)
        state = load_file(folder / "model.safetensors")
    except Exception:  # the fields do not fit together
        return "no model"
    if not expected.isfinite().all():
        return "no model"
    found = set()
    for config_json in (json.loads((folder / "config.json").read_text()), as_given(change)):
        try:
            model_class, config = read_config(config_json)
        except (ValueError, NotImplementedError) as error:
            found.add("refused" if "config.json" in str(error) else f"refused without a name: {error}")
            continue
        try:
            model = model_class(config, torch.float32, backend(backends()[-1]))
            model.load_weights(TensorDict(state))
            error = relative_error(prefill(model, TOKENS), expected)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        found.add("same" if error < ODD_SIZES * TOLERANCE else f"the logits differ by {error:.1e} of the largest")
    return next((text for text in sorted(found) if text not in ("same", "refused")), min(found))


def as_given(change: Change) -> dict:
    """The config.json with no other fields than those of the change."""
    return {"model_type": change.model_type, **json.loads(json.dumps(change.fields))}


FAMILIES = """
afmoe apertus arcee axk1 bailing_hybrid bamba bitnet bloom codegen cohere2_moe cwm deepseek_v3 dots1 exaone4
exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma4_text gemma4_unified_text gpt_bigcode granite_swa
granitemoe_swa granitemoehybrid helium hy_v3 hyperclovax jais2 kimi_linear kolibri1 laguna lara_mini lfm2
lfm2_moe lfm3 mamba2 mellum minimax_m2 ministral ministral3 mistral4 nanochat nemotron nemotron_h olmo
olmo_hybrid persimmon qwen3_5_moe_text qwen3_5_text qwen3_next seed_oss solar_open vaultgemma youtu
""".split()
"""Families with states, Gemma 4, and others that came with them."""


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_changed_field_gives_the_logits_of_transformers_or_is_refused(model_type, tmp_path):
    """A quarter of the changes, which differs by commit."""
    found = {}
    for change in changes(model_type):
        follows = change.name.rpartition(".")[2] not in OTHERWISE.get(model_type, ())
        if follows and quarter_of(str(change)) == quarter():
            found[str(change)] = outcome(change, tmp_path)
    wrong = [f"{change}: {text}" for change, text in found.items() if text not in ("same", "refused", "no model")]
    assert not wrong, "\n".join(wrong)
    assert "same" in found.values()
