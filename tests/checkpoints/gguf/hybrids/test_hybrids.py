"""Files of models whose layers keep a state: against transformers, and against the checkpoint that each was made
from."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.architectures.changes import MAX_LISTED
from pace.checkpoints.gguf.architectures.forms import RATES
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.layers import Rates
from pace.llm.models.model_list import read_config
from tests.checkpoints.gguf.checks import IDS as IDS_OF_TOKENS
from tests.checkpoints.gguf.checks import check_blocks, check_config, check_logits
from tests.checkpoints.gguf.files import load
from tests.checkpoints.gguf.hybrids.hybrid_files import write_hybrid
from tests.editing import change_json, edit_tensors
from tests.llm.models.draft_heads import run, runners, save_mtp
from tests.llm.models.variants import IDS, VARIANTS, save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.support import prefill

MIXTURE = {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]}
LATENT = {"layers_block_type": ["linear_attention", "moe"], "moe_latent_size": 20, "n_group": 4, "topk_group": 2}
MLP = {"layers_block_type": ["mlp", "full_attention", "linear_attention"]}
HELD = {name: VARIANTS[IDS.index(name)] for name in (
    "lfm2-default", "lfm2-biases", "lfm2-indices", "lfm2-width-as-given", "lfm2_moe-default", "qwen3_next-default",
    "qwen3_5_text-default", "qwen3_5_text-tied", "qwen3_5_text-intervals", "qwen3_5_moe_text-default", "bamba-default",
    "bamba-auto-tied", "falcon_h1-default", "falcon_h1-gate-first", "mamba2-default", "mamba2-biases-tied",
    "granitemoehybrid-default", "granitemoehybrid-dense-rope", "granitemoehybrid-all-mamba",
)} | {
    f"nemotron_h-{name}": ("nemotron_h", name, fields)
    for name, fields in (("moe", MIXTURE), ("latent", LATENT), ("mlp", MLP))
} | {
    "kimi_linear-default": ("kimi_linear", "default", {"linear_num_heads": 4}),
    "kimi_linear-groups": ("kimi_linear", "groups", {"n_group": 4, "topk_group": 2, "linear_num_heads": 4}),
    "bailing_hybrid-default": ("bailing_hybrid", "default", {}),
    "bailing_hybrid-unbounded": ("bailing_hybrid", "unbounded", {"kda_safe_gate": False, "q_lora_rank": 24}),
}  # fmt: skip
"""The variants that a file can describe: no keys have limits of steps, or the activation."""
UNSTATED_OF = {
    "lfm2": "block_.*|full_attn_idxs",
    "lfm2_moe": "",
    "qwen3_next": "qkvz_by_head",
    "qwen3_5_text": "value_heads_tiled",
    "qwen3_5_moe_text": "value_heads_tiled|intermediate_size",
    "bailing_hybrid": "layer_group_size|num_nextn_predict_layers|rope_theta",
    "kimi_linear": "num_nextn_predict_layers|routed_scaling_factor",
    "falcon_h1": ".*_multipliers?|mamba_expand|mamba_norm_before_gate",
    "granitemoehybrid": "shared_split|num_key_value_heads",
    "nemotron_h": "intermediate_size|num_key_value_heads|moe_.*|num_experts_per_tok|routed_scaling_factor",
}
"""model_type -> pattern of fields that a file does not have or expresses differently."""
MARKS = "qwen35.attention.recurrent_layers"
OTHER_ORDER = ("qwen3_5", "falcon_h1")
"""Families whose files have value heads in another order, or factors in the weights. Their last bits differ."""


def written(tmp_path, name, **options):
    """Returns transformers' model, and writes it as a checkpoint and as a file."""
    model_type, _, fields = HELD[name]
    theirs = save_tiny(tmp_path / "hub", model_type, fields)
    write_hybrid(tmp_path / "hub", tmp_path / "model.gguf", **options)
    return theirs


@pytest.mark.parametrize("name", HELD)
def test_float32_logits_and_the_config(tmp_path, name):
    check_logits(tmp_path, written(tmp_path, name), same_bits=not name.startswith(OTHER_ORDER))
    check_config(tmp_path, UNSTATED_OF.get(HELD[name][0], ""))


def test_rates_of_decay_are_those_of_the_file():
    """A model makes the bits of a file again from what it reads in their place."""
    of_file = -torch.logspace(-6, 6, 2000)
    assert torch.equal(Rates({"A": 2000}).from_file(RATES.values(of_file.double())).float(), of_file)


WIDE = {"hidden_size": 64, "intermediate_size": 64}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_value_head_dim": 16}
KIMI = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32,
}  # fmt: skip
QUANTISED = {
    "bailing_hybrid": {**KIMI, "head_dim": 32},
    "kimi_linear": {**KIMI, "linear_head_dim": 32, "linear_num_heads": 4},
    "lfm2_moe": {"moe_intermediate_size": 32},
    "qwen3_next": EXPERTS,
    "qwen3_5_moe_text": EXPERTS,
    "granitemoehybrid": {"mamba_d_head": 16, "shared_intermediate_size": 32},
    "nemotron_h": {**MIXTURE, "head_dim": 16, "mamba_head_dim": 16, "moe_intermediate_size": 32}
    | {"moe_shared_expert_intermediate_size": 32},
}
"""model_type -> sizes for which rows are whole blocks."""


@pytest.mark.parametrize("model_type", QUANTISED)
def test_blocks_have_the_weights_of_the_file(tmp_path, model_type):
    """Routers are floats. The rows that make steps are in blocks, as llama.cpp quantises them, too."""
    default = VARIANTS[IDS.index(f"{model_type}-default")][2]
    save_tiny(tmp_path / "hub", model_type, default | WIDE | QUANTISED[model_type])
    for kind in ("Q8_0", "Q4_0"):
        check_blocks(tmp_path, write_hybrid, kind)


def test_a_layer_that_predicts_further_tokens_is_left_out(tmp_path):
    """It is counted as a layer, and arrays have an entry for it."""
    written(tmp_path, "qwen3_5_text-default")
    expected = prefill(load(tmp_path / "model.gguf"), IDS_OF_TOKENS)
    hub = tmp_path / "hub"
    config = change_json(hub / "config.json", mtp_num_hidden_layers=1)
    width = config["hidden_size"]
    with edit_tensors(hub) as state:
        state |= {"mtp.fc.weight": torch.ones(width, 2 * width), "mtp.norm.weight": torch.ones(width)}
    write_hybrid(hub, tmp_path / "longer.gguf")
    with GgufCheckpoint(tmp_path / "longer.gguf") as reader:
        assert reader.metadata["qwen35.block_count"] == config["num_hidden_layers"] + 1
    assert torch.equal(prefill(load(tmp_path / "longer.gguf"), IDS_OF_TOKENS), expected)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_drafts_of_the_layer_for_multi_token_prediction(model_type, tmp_path):
    """It is the same layer as on the Hub."""
    hub = tmp_path / "hub"
    save_mtp(hub, model_type)
    change_json(hub / "config.json", mtp_num_hidden_layers=1)
    write_hybrid(hub, tmp_path / "model.gguf")
    of_hub, of_file = (runners(path, "mtp") for path in (hub, tmp_path / "model.gguf"))
    rows, ours = (run(target, IDS_OF_TOKENS)[1] for target, _ in (of_hub, of_file))
    assert relative_error(ours, rows) < TOLERANCE
    drafts, our_drafts = (run(head, IDS_OF_TOKENS[1:], rows[:-1])[0] for _, head in (of_hub, of_file))
    assert relative_error(our_drafts, drafts) < TOLERANCE


def test_layers_that_attend_if_a_file_does_not_mark_them(tmp_path):
    """Every fourth, as in files from before they were marked, or as often as the file says."""

    def change(interval):
        def drop(writer):
            del writer.kv_data[0][MARKS], writer.kv_data[0]["qwen35.full_attention_interval"]
            if interval is not None:
                writer.add_full_attention_interval(interval)

        return drop

    for interval, kinds in ((None, "LLLF"), (2, "LFLF"), (1, "FFFF")):
        written(tmp_path, "qwen3_5_text-intervals", add=change(interval))
        with GgufCheckpoint(tmp_path / "model.gguf") as reader:
            assert "".join(kind[0].upper() for kind in reader.config["layer_types"]) == kinds


def test_lists_of_layers_stay_short(tmp_path):
    """A damaged file may state any number of layers. It is refused with the config, before anything is as long."""

    def change(writer):
        del writer.kv_data[0][MARKS], writer.kv_data[0]["qwen35.block_count"]
        writer.add_block_count(2**20)

    written(tmp_path, "qwen3_5_text-default", add=change)
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        assert len(reader.config["layer_types"]) == MAX_LISTED
        with pytest.raises(ValueError, match=r"num_hidden_layers must be an integer in 1\.\.4096; got 1048576"):
            read_config(reader.config)


def test_feed_forwards_whose_width_is_not_stated(tmp_path):
    """The converter does not know the name "mlp" of transformers' config.json."""

    def change(writer):
        del writer.kv_data[0]["nemotron_h.feed_forward_length"]
        writer.add_feed_forward_length([0, 0, 0])

    written(tmp_path, "nemotron_h-mlp", add=change)
    assert torch.equal(*(prefill(load(tmp_path / path), IDS_OF_TOKENS) for path in ("model.gguf", "hub")))


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "message"),
    [
        ("lfm2-default", "attention.head_count_kv", [0], ValueError, r"an integer for each of 2 layers; got 1 of"),
        ("lfm2-default", "attention.head_count_kv", [0.5, 1.5], NotImplementedError, "head_count_kv differs"),
        ("nemotron_h-mlp", "feed_forward_length", [8, 4, 0], NotImplementedError, "feed_forward_length differs"),
        ("qwen3_5_text-default", "attention.recurrent_layers", [True], ValueError, "an integer for each of 2 layers"),
        ("qwen3_5_text-default", "full_attention_interval", 0, ValueError, "interval must be positive; got 0"),
        ("mamba2-default", "ssm.inner_size", 65, ValueError, "a multiple of ssm.time_step_rank; got 65 and 8"),
        ("lfm2-default", "attention.sliding_window", 16, NotImplementedError, "attention.sliding_window = 16 is not"),
        ("lfm2_moe-default", "expert_gating_func", 1, NotImplementedError, "other than sigmoid is not implemented"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, name, key, value, error, message):
    def change(writer):
        whole = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(whole, None)
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(whole, value)

    # Without layers of the interval's own array, the interval is read.
    written(
        tmp_path, name, add=lambda writer: (writer.kv_data[0].pop(MARKS, 0) if "interval" in key else 0, change(writer))
    )
    with pytest.raises(error, match=message) as raised:
        GgufCheckpoint(tmp_path / "model.gguf")
    assert "model.gguf" in str(raised.value)
