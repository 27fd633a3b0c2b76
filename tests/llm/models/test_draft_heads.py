"""The models of draft heads: the layer for multi-token prediction against transformers, EAGLE-3 against float64."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from pace.llm import DraftModelConfig, LLMModel, MtpConfig
from pace.llm.loading import load
from pace.llm.loading.load import open_model
from pace.llm.loading.options import LoadOptions
from pace.llm.models.model_list import read_config
from pace.media.media import MediaSpan
from pace.ops import reference
from tests.editing import change_json
from tests.llm.models.draft_heads import (
    MTP,
    add_mtp,
    given_for,
    mtp_logits,
    mtp_rows,
    run,
    runners,
    save_eagle3,
    save_mtp,
)
from tests.llm.models.towers import seeing
from tests.llm.models.variants import BASE, config_fields, load_oracle, save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error

pytest.importorskip("transformers")

IDS = torch.randint(3, 99, (37,), generator=torch.Generator().manual_seed(2))
BACKENDS = ("native", "native-eager", "torch")


@pytest.mark.parametrize("model_type", MTP)
def test_mtp_is_that_of_transformers(model_type, tmp_path) -> None:
    """Also for a second draft, which reads the row of the first."""
    oracle, mtp = save_mtp(tmp_path, model_type)
    with torch.no_grad():
        found = oracle(input_ids=IDS[None], output_hidden_states=True)
    rows = found.hidden_states[-1][0]
    expected, next_rows = mtp_rows(mtp, IDS[1:], rows[:-1])
    token = expected[-1:].argmax(1)
    further, _ = mtp_rows(mtp, torch.cat([IDS[1:], token]), torch.cat([rows[:-1], next_rows[-1:]]))
    for backend in BACKENDS if model_type == "qwen3_5_text" else ("native",):
        target, head = runners(tmp_path, "mtp", backend)
        logits, kept = run(target, IDS)
        assert relative_error(logits, found.logits[0]) < TOLERANCE
        kept = kept[:, -rows.shape[1] :]  # after the inputs, if the layer sees them
        assert relative_error(kept, rows) < TOLERANCE
        drafted, own = run(head, IDS[1:], given_for(head, IDS[1:], kept[:-1]))
        assert relative_error(drafted, expected) < TOLERANCE
        assert relative_error(own, next_rows) < TOLERANCE
        longer = torch.cat([IDS[1:], token])
        again, _ = run(head, longer, given_for(head, longer, torch.cat([kept[:-1], own[-1:]])))
        assert relative_error(again, further) < TOLERANCE


@pytest.mark.parametrize("step_tokens", [pytest.param(512, marks=pytest.mark.thorough), 16])
def test_mtp_sees_the_rows_of_images(step_tokens, tmp_path, monkeypatch) -> None:
    """In place of the embeddings of their placeholders, also if a step ends within an image. The texts are those
    without drafts."""
    seeing.save_seeing(
        tmp_path, "qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    )
    oracle, mtp = add_mtp(tmp_path, "qwen3_5")
    inputs = seeing.inputs_of([[(8, 8), (4, 6)]], seed=1)
    monkeypatch.setattr(load, "tokens_per_step", lambda model: step_tokens)
    options = {"dtype": "float32", "progress": False, "num_threads": 1, "kv_cache_bytes": "8MiB"}
    config = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 0}
    with LLMModel(tmp_path, **options) as plain:
        expected = plain.generate(**inputs, **config)
    with LLMModel(tmp_path, spec_config=MtpConfig(num_draft_tokens=2, adaptive=False), **options) as drafted:
        engine, found = drafted.generator.engine, []
        source = engine.drafter.source
        run_spans = source._run
        monkeypatch.setattr(source, "_run", lambda spans: found.append(run_spans(spans)) or found[-1])
        out = drafted.generate(**inputs, **config)
        assert seeing.results(out) == seeing.results(expected) and out.metrics.num_drafted_tokens > 10
        first = next(logits for logits in found if len(logits))[0]
        media = engine.model.towers[0].read_inputs({name: inputs[name] for name in engine.model.towers[0].input_names})
        spans = [MediaSpan(start, one) for start, one in zip((5, 22), media)]
        positions = torch.from_numpy(engine.model.angle_positions(spans, 0, inputs["input_ids"].shape[1] + 1))
    token = torch.tensor([out.generated_token_ids[0][:1]])
    with torch.no_grad():
        states = oracle(**inputs, output_hidden_states=True).hidden_states
        last = oracle.get_input_embeddings()(token)
        tokens = oracle.get_input_embeddings()(inputs["input_ids"])
    rows = states[-1][0]
    with_images, without = (
        mtp_logits(mtp, torch.cat([embeddings[0, 1:], last[0]]), rows, positions[:, 1:])[-1]
        for embeddings in (states[0], tokens)
    )
    assert relative_error(first, with_images) < TOLERANCE < 0.01 < relative_error(first, without)


def test_the_rows_change_no_bit_of_the_logits(tmp_path) -> None:
    save_mtp(tmp_path, "qwen3_5_text")
    with_rows, _ = runners(tmp_path, "mtp")
    options = LoadOptions(tmp_path, dtype="float32", progress=False, num_threads=1, kv_cache_bytes="4MiB")
    plain = open_model(options).engine.model
    assert plain.kept_width == 0 and plain.model.mtp is None
    assert torch.equal(run(with_rows, IDS)[0], run(plain, IDS)[0])


@pytest.mark.parametrize("model_type", BASE)
def test_every_family_has_it_or_refuses_it_by_name(model_type) -> None:
    model_class, config = read_config({"model_type": model_type, **config_fields(model_type, {})})
    model = model_class(config, torch.float32, reference)
    try:
        model.add_mtp()
    except NotImplementedError as error:
        assert 'spec_config="mtp" is not implemented for' in str(error)
    else:
        own = model.further_layer(0)
        assert {name for name in model.targets() if name.startswith(own)} > {f"{own}.eh_proj.weight"}


def test_a_checkpoint_without_the_layer(tmp_path) -> None:
    save_tiny(tmp_path, "qwen3_5_text", {})
    with pytest.raises(
        ValueError, match='spec_config="mtp" needs a checkpoint with a layer for multi-token prediction'
    ):
        runners(tmp_path, "mtp")


def test_a_tensor_of_the_layer_that_is_missing_or_not_known(tmp_path) -> None:
    save_mtp(tmp_path, "qwen3_5_text")
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    for name in ("mtp.layers.0.self_attn.further.weight", "mtp.embed_tokens.weight"):
        save_file(state | {name: torch.ones(2, 2)}, path)
        with pytest.raises(ValueError, match=rf"unexpected \(1\): {name}"):
            runners(tmp_path, "mtp")
    save_file({name: tensor for name, tensor in state.items() if name != "mtp.layers.0.mlp.up_proj.weight"}, path)
    with pytest.raises(ValueError, match=r"missing \(1\): model.layers.2.mlp.up_proj.weight"):
        runners(tmp_path, "mtp")


# -- EAGLE-3


def eagle(state: dict, config: dict, ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """EAGLE-3 in float64: logits of the drafts and rows, for tokens `ids [T]` and their given rows `[T, hidden]`."""
    weights = {name: tensor.double() for name, tensor in state.items()}

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"])

    def heads(x, count):
        return x.view(len(ids), count, -1).transpose(0, 1)

    dim = config["head_dim"]
    angles = torch.outer(torch.arange(len(ids)).double(), 10000.0 ** -(torch.arange(0, dim, 2).double() / dim))

    def rotated(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    normed = norm(rows, "midlayer.hidden_norm")
    x = torch.cat([norm(weights["embed_tokens.weight"][ids], "midlayer.input_layernorm"), normed], -1)
    q, k, v = (linear(x, f"midlayer.self_attn.{part}_proj") for part in "qkv")
    q, k, v = heads(q, 4), heads(k, 2).repeat_interleave(2, 0), heads(v, 2).repeat_interleave(2, 0)
    y = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    y = y.transpose(0, 1).reshape(len(ids), -1)
    x = (normed if config.get("norm_before_residual") else rows) + linear(y, "midlayer.self_attn.o_proj")
    y = norm(x, "midlayer.post_attention_layernorm")
    y = functional.silu(linear(y, "midlayer.mlp.gate_proj")) * linear(y, "midlayer.mlp.up_proj")
    x = x + linear(y, "midlayer.mlp.down_proj")
    return linear(norm(x, "norm"), "lm_head"), x


FORMS = {
    "default": {},
    "norms": {"norm_before_residual": True, "norm_before_fc": True},
    "whole vocabulary": {"draft_vocab_size": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_eagle3_is_its_definition(form, tmp_path) -> None:
    """In float64, from the rows of transformers: its hidden states are the inputs of layers."""
    save_tiny(tmp_path / "target", "llama", {})
    state = save_eagle3(tmp_path / "draft", **FORMS[form])
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    oracle = load_oracle(tmp_path / "target", torch.float32)
    states: list[torch.Tensor] = []
    oracle.model.norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    with torch.no_grad():
        states = [*oracle(input_ids=IDS[None], output_hidden_states=True).hidden_states[:2], *states]
    taps = torch.cat([states[0][0], states[1][0], states[2]], -1)
    for backend in BACKENDS if form == "default" else ("native",):
        target, head = runners(tmp_path / "target", DraftModelConfig(tmp_path / "draft"), backend)
        kept = run(target, IDS)[1]
        assert relative_error(kept, taps) < TOLERANCE
        rows = kept[:-1].double()
        if "input_norm.weight" in state:
            rows = functional.rms_norm(rows, rows.shape[-1:], state["input_norm.weight"].double(), 1e-5)
        rows = functional.linear(rows, state["fc.weight"].double())
        encoded = head.model.encode(head.run_slice, kept[:-1])
        assert relative_error(encoded, rows) < TOLERANCE
        expected, own = eagle(state, config, IDS[1:], rows)
        logits, kept_rows = run(head, IDS[1:], encoded)
        assert relative_error(logits, expected) < TOLERANCE and relative_error(kept_rows, own) < TOLERANCE
        whole = head.model.to_target(logits)
        ids = torch.arange(expected.shape[1]) + state.get("d2t", 0)
        assert whole.shape[1] == 99 and torch.equal(whole[:, ids], logits)
        assert (whole > -torch.inf).sum() == logits.numel()


def test_what_eagle3_shares_with_its_target(tmp_path) -> None:
    """A drafter without embedding and head has the target's. Names may be those of speculators."""
    save_tiny(tmp_path / "target", "llama", {})
    state = save_eagle3(tmp_path / "draft", hidden_size=32, head_dim=8, draft_vocab_size=None)
    oracle = load_oracle(tmp_path / "target", torch.float32)
    rows = torch.randn(len(IDS), 32, generator=torch.Generator().manual_seed(0))
    shared = {"embed_tokens.weight": oracle.model.embed_tokens.weight, "lm_head.weight": oracle.lm_head.weight}
    own = {name: tensor for name, tensor in state.items() if name not in shared}
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in own.items()}
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    for names in (own, renamed):
        save_file(names, tmp_path / "draft" / "model.safetensors")
        target, head = runners(tmp_path / "target", DraftModelConfig(tmp_path / "draft"))
        expected, _ = eagle(own | {name: each.detach() for name, each in shared.items()}, config, IDS, rows.double())
        assert relative_error(run(head, IDS, rows)[0], expected) < TOLERANCE
        assert head.model.embedding is target.model.embedding


WRONG = {
    "hidden_size 64, and LlamaForCausalLM has 32": {"target_hidden_size": 64},
    "vocab_size 98, and LlamaForCausalLM has 99": {"vocab_size": 98},
    r"layers \[0, 1, 3\], and the model has 2 layers": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
    "must be a list of 3 layers": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    "num_hidden_layers must be": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_eagle3_of_another_model(message, tmp_path) -> None:
    save_tiny(tmp_path / "target", "llama", {})
    save_eagle3(tmp_path / "draft")
    change_json(tmp_path / "draft" / "config.json", **WRONG[message])
    with pytest.raises(ValueError, match=message):
        runners(tmp_path / "target", DraftModelConfig(tmp_path / "draft"))


@pytest.mark.parametrize("broken", ["absent", "beyond", "twice", "short"])
def test_tokens_of_drafts_that_are_wrong(broken, tmp_path) -> None:
    save_tiny(tmp_path / "target", "llama", {})
    state = save_eagle3(tmp_path / "draft")
    changes = {
        "absent": {},
        "beyond": {"d2t": state["d2t"] + 60},
        "twice": {"d2t": state["d2t"] - torch.tensor([*[0] * 39, int(state["d2t"][39]) - int(state["d2t"][38]) + 1])},
        "short": {"d2t": state["d2t"][:-1].clone()},
    }
    rest = {name: tensor for name, tensor in state.items() if name != "d2t"}
    save_file(rest | changes[broken], tmp_path / "draft" / "model.safetensors")
    with pytest.raises(ValueError, match="d2t"):
        runners(tmp_path / "target", DraftModelConfig(tmp_path / "draft"))
