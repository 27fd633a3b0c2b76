"""Quantised checkpoints load, and generate like a model with the same weights in fp32."""

from __future__ import annotations

import itertools
import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from pace.llm.loading.repository import needed_files
from pace.ops.weight_layout import WeightLayout
from tests.checkpoints.quantized import packers
from tests.checkpoints.quantized.models import KINDS, save_quantized
from tests.editing import edit_tensors
from tests.plugins.tiers import sample

FIELDS = {
    "minimax_m2": {"num_local_experts": 4, "rotary_dim": 16},
    "qwen3_moe": {"num_experts": 4}, "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "deepseek_v3": {"num_key_value_heads": 2, "q_lora_rank": 64, "kv_lora_rank": 32,
      "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32},
}  # fmt: skip
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]


def load(folder, backend="torch", **more):
    return LLMModel(folder, dtype="float32", backend=backend, progress=False, **more)


def logits(model):
    with model.session() as session:
        return session.append(PROMPT, logits="all")


def matrices(folder):
    model = load_model(LoadOptions(folder, dtype="float32", backend="torch", progress=False))
    return {part: matrix for matrix in model.matrices() for part in matrix.parts}


FIRST_KINDS = {kind.split("-")[0]: kind for kind in reversed(KINDS)}.values()
"""One kind per method."""
ALWAYS = {"llama": KINDS, "phi3": KINDS, "qwen2": ["gptq"], "deepseek_v3": ["gptq", "fp8"], "minimax_m2": ["fp8"]}
"""model_type -> kinds that every commit runs. Other families run one kind per method."""
PAIRS = [
    *itertools.product(("llama", "qwen2", "qwen3_moe", "deepseek_v3"), KINDS),
    ("minimax_m2", "fp8"),
    *(("phi3", kind) for kind in ("gptq-act-order", "awq", "bnb-nf4")),
]


@pytest.mark.parametrize(
    "pair", sample(PAIRS, always=lambda pair: pair[1] in ALWAYS.get(pair[0], FIRST_KINDS)), ids="-".join
)
def test_logits_and_texts(pair, tmp_path):
    """torch multiplies with exactly these weights, so its logits are those of the weights in fp32.

    The kernels' error is relative to the norm of the logits. Integer products round inputs to steps of max|x| / 127.
    The largest input is at most 5 times their size here, so each product has an error of 5 / (127 sqrt(12)). Float
    products have scales of 11 bits: 2^-12. The errors of 8 products in sequence add up like a random walk, and the
    operations between them enlarge the sum up to 3 times."""
    model_type, kind = pair
    quantized = save_quantized(tmp_path, kind, model_type, **FIELDS.get(model_type, {}))
    config = SamplingConfig(max_new_tokens=8, do_sample=False, ignore_eos=True)
    with load(quantized) as model, load(tmp_path / "floats") as oracle:
        found, expected = logits(model), logits(oracle)
        # 14 products with up to 96 terms. Their weights differ in the last bits, and these errors add up like a random
        # walk.
        assert (found - expected).abs().max() <= 14 * 96**0.5 * 2**-24 * expected.abs().max()
        assert model.generate(PROMPT, config).generated_token_ids == oracle.generate(PROMPT, config).generated_token_ids
    if model_type in ("phi3", "deepseek_v3"):  # the bound is for the other families' products
        return
    noise = 2**-12 if "fp8" in kind else 5 / (127 * 12**0.5)
    with load(quantized, "native") as model, load(tmp_path / "floats", "native") as oracle:
        found, expected = logits(model), logits(oracle)
        assert (found - expected).norm() <= 3 * 8**0.5 * noise * expected.norm()
        assert len(model.generate(PROMPT, config).generated_token_ids[0]) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_stay_quantised_where_a_layout_has_their_groups(kind, tmp_path):
    found = matrices(save_quantized(tmp_path, kind))
    for name, matrix in found.items():
        kept = name.endswith("_proj") and kind not in ("gptq-groups-of-24", "gptq-act-order")
        if kind == "gptq-act-order":
            kept = name.endswith(("o_proj", "down_proj"))  # parts of fused products have different orders
        assert (name in matrix.plan.layouts) == kept, name
    assert kind != "gptq-act-order" or found["model.layers.0.mlp.down_proj"].plan.order is not None


def test_parts_with_the_same_order_stay_quantised(tmp_path):
    """GPTQ sorts the columns of q, k and v in the same way, because their inputs are the same."""

    def change(state, config):
        for name in list(state):
            if name.endswith((".k_proj.g_idx", ".v_proj.g_idx")):
                state[name] = state[name.replace(".k_proj", ".q_proj").replace(".v_proj", ".q_proj")].clone()

    found = matrices(save_quantized(tmp_path, "gptq-act-order", change=change))
    assert set(found["model.layers.1.self_attn.k_proj"].plan.layouts.values()) == {WeightLayout("int4", 32)}


def test_different_orders_are_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        matrices(save_quantized(tmp_path, "gptq-act-order"))
    assert "q_proj" in caplog.text and "floats" in caplog.text


def test_modules_that_are_not_quantised_stay_floats(tmp_path):
    """One part of a fused product may be quantised while another is not."""

    def change(state, config):
        expected = load_file(tmp_path / "floats" / "model.safetensors")
        for name in list(state):
            if "layers.0.self_attn.k_proj." in name:
                del state[name]
        state["model.layers.0.self_attn.k_proj.weight"] = expected["model.layers.0.self_attn.k_proj.weight"]
        config["quantization_config"]["dynamic"] = {r"-:model\.layers\.0\.self_attn\.k_proj": {}}

    folder = save_quantized(tmp_path, "gptq", change=change)
    name = "model.layers.0.self_attn.k_proj.weight"
    with edit_tensors(tmp_path / "floats") as floats:
        floats[name] = load_file(folder / "model.safetensors")[name]
    with load(folder) as model, load(tmp_path / "floats") as oracle:
        assert torch.allclose(logits(model), logits(oracle), rtol=1e-4, atol=1e-4)
    assert matrices(folder)["model.layers.0.self_attn.q_proj"].plan.layouts.keys() == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
    }


def test_a_quantised_head_and_modules_of_other_bits(tmp_path):
    """GPTQModel's `lm_head` and `dynamic`: the shapes determine each module's format."""
    packed, weight = packers.gptq(96, 64, 8, 32)

    def change(state, config):
        del state["lm_head.weight"]
        state |= {part.replace("m.", "lm_head.", 1): value for part, value in packed.items()}
        config["quantization_config"] |= {"lm_head": True, "dynamic": {"+:lm_head": {"bits": 8, "group_size": 32}}}

    folder = save_quantized(tmp_path, "gptq", change=change)
    found = matrices(folder)
    assert found["lm_head"].plan.layouts == {"lm_head": WeightLayout("int8", 32)}
    assert packers.relative_error(found["lm_head"].weight.matrix, weight) < 2**-20


def as_early_writers(folder, beside, fields, weights="model.safetensors"):
    """Moves the quantisation config from config.json into a separate file, and renames the weights."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / beside).write_text(json.dumps(fields))
    (folder / "model.safetensors").rename(folder / weights)


def test_early_checkpoints_say_in_a_file_of_their_own_how_they_are_quantised(tmp_path):
    gptq = {
        "bits": 4, "group_size": 32, "desc_act": True, "sym": True, "true_sequential": True, "model_name_or_path": None,
        "model_file_base_name": "gptq_model-4bit-32g",
    }  # fmt: skip
    awq = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    for kind, arguments in (
        ("gptq-act-order", ("quantize_config.json", gptq, "gptq_model-4bit-32g.safetensors")),
        ("awq", ("quant_config.json", awq)),
        ("awq", ("quantize_config.json", awq | {"quant_method": "awq"})),
        ("modelopt-nvfp4", ("hf_quant_config.json", modelopt)),
    ):
        folder = save_quantized(tmp_path / arguments[0] / kind, kind)
        as_early_writers(folder, *arguments)
        assert set(needed_files([path.name for path in folder.iterdir()], None)) == {
            path.name for path in folder.iterdir()
        }
        with load(folder) as model, load(folder.parent / "floats") as oracle:
            assert torch.allclose(logits(model), logits(oracle), rtol=1e-4, atol=1e-4)
    folder = save_quantized(tmp_path / "said", "gptq")
    (folder / "quantize_config.json").write_text("{}")  # config.json has the settings
    load(folder).close()


def test_static_scales_and_biases_of_zeros_are_left_over(tmp_path):
    def change(state, config):
        for name in [name for name in state if name.endswith("_proj.qweight")]:
            state[name.replace("qweight", "bias")] = torch.zeros(state[name].shape[1], dtype=torch.float16)

    matrices(save_quantized(tmp_path / "zeros", "gptq", change=change))

    def spoil(state, config):
        change(state, config)
        state["model.layers.0.mlp.up_proj.bias"][7] = 0.5

    with pytest.raises(ValueError, match=r"unexpected \(1\): model.layers.0.mlp.up_proj.bias"):
        matrices(save_quantized(tmp_path / "bias", "gptq", change=spoil))

    def add_scales(state, config):
        for name in [name for name in state if name.endswith("_proj.weight")]:
            state[name.replace("weight", "input_scale")] = torch.ones(1)
        state["model.layers.0.self_attn.k_proj.output_scale"] = torch.ones(1)
        state["model.layers.0.self_attn.v_scale"] = torch.ones(1)
        state["model.layers.1.self_attn.kv_scale"] = torch.ones(1)

    for kind in ("compressed-fp8", "fp8"):
        matrices(save_quantized(tmp_path / kind, kind, change=add_scales))


@pytest.mark.parametrize("kind", ["gptq", "awq", "bnb-nf4", "compressed-int4", "fp8", "mxfp4", "modelopt-nvfp4"])
def test_pieces_and_threads_do_not_matter(kind, tmp_path, monkeypatch):
    """Rows come in pieces of 16, on two threads, and from files of the older kind."""
    from pace.checkpoints.quantized import reader as quantized_checkpoint
    from pace.checkpoints.reader import row_ranges

    folder = save_quantized(tmp_path, kind)
    whole = {name: matrix.weight.matrix for name, matrix in matrices(folder).items()}
    monkeypatch.setattr(
        quantized_checkpoint, "row_ranges", lambda rows, row_bytes: row_ranges(rows, row_bytes, piece_bytes=1)
    )
    monkeypatch.setattr("pace.checkpoints.quantized.stored.PIECE_BYTES", 512)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    for name, matrix in matrices(folder).items():
        assert torch.equal(matrix.weight.matrix, whole[name]), name


def test_what_a_progress_bar_is_told_adds_up(tmp_path):
    from pace.checkpoints.quantized import read_quant_method
    from pace.checkpoints.quantized.reader import QuantizedCheckpoint
    from pace.checkpoints.reader import CheckpointReader

    for kind in ("gptq-act-order", "awq", "bnb-int8", "gptq-groups-of-24"):
        folder = save_quantized(tmp_path / kind, kind)
        method = read_quant_method(json.loads((folder / "config.json").read_text())["quantization_config"])
        with CheckpointReader(folder) as files:
            reader = QuantizedCheckpoint(files, method)
            read = sum(reader.read(name, *rows).nbytes for name in reader.tensors for rows in reader.row_ranges(name))
            assert read == reader.total_bytes


def test_what_is_quantised_stays_and_the_rest_may_be(tmp_path):
    model = load_model(
        LoadOptions(
            save_quantized(tmp_path, "gptq"), dtype="float32", backend="torch", progress=False, quantization="int8"
        )
    )
    found = {part: matrix.plan.layouts[part] for matrix in model.matrices() for part in matrix.parts}
    assert found["lm_head"] == WeightLayout("int8", None) and found["model.layers.0.mlp.down_proj"] == WeightLayout(
        "int4", 32
    )
