"""Tiny checkpoints with a layer for multi-token prediction, made by transformers, and of EAGLE-3 drafters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pace.batch import ForwardBatch
from pace.llm.cache.manager import CacheManager
from pace.llm.loading.load import open_model
from pace.llm.loading.options import LoadOptions
from pace.llm.runners import ModelRunner
from pace.llm.runners.batch_builder import BatchBuilder
from pace.llm.sequence import Sequence, Span
from tests.editing import change_json
from tests.llm.models.variants import load_oracle, randomise, save_tiny

MTP: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0, "use_qk_norm": True},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5": {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {},
}
"""Config fields by model_type. transformers makes the layer like layer 0 of the config."""

QWEN = {
    "mtp_block": "mtp.layers.0",
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
}


def save_mtp(folder: Path, model_type: str, agrees: bool = False) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Saves a tiny model with a layer for multi-token prediction. Returns transformers' model and its `MtpModel`.

    With `agrees`, most drafts are right: the next token depends above all on the last one, in both."""
    save_tiny(folder, model_type, MTP[model_type])
    return add_mtp(folder, model_type, agrees)


def add_mtp(folder: Path, model_type: str, agrees: bool = False) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Adds the layer to a saved model, as `save_mtp`."""
    from transformers.modeling_layers import MtpModel

    model = load_oracle(folder, torch.float32)
    config = model.config.get_text_config()
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None):
        config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mtp_mlp_layer_types = ["sparse"]
    torch.manual_seed(1)
    mtp = MtpModel(model, 1).eval()
    own = mtp.layers
    randomise(own, model_type)
    if agrees:
        make_agree(own[0], model)
    state = load_file(folder / "model.safetensors")
    last = f"model.layers.{config.num_hidden_layers}"
    for name, tensor in own.state_dict().items():
        part, rest = re.fullmatch(r"0\.(\w+)\.(.*)", name).groups()
        if "qwen" in model_type:
            prefix = QWEN[part]
        else:
            prefix = {"mtp_block": last, "post_norm": f"{last}.shared_head.norm"}.get(part, f"{last}.{part}")
        state |= dict(as_published(f"{prefix}.{rest}", tensor))
    if agrees:
        state = {name: 0.01 * tensor if is_output(name) else tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if "qwen" not in model_type:
        change_json(folder / "config.json", num_nextn_predict_layers=1)
    return model, mtp


def as_published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a checkpoint for one of transformers: each expert has its own."""
    prefix, _, part = name.rpartition(".")
    if part not in ("gate_up_proj", "down_proj"):
        yield name, tensor.clone()
        return
    for number, expert in enumerate(tensor):
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for own, piece in zip(names, expert.chunk(len(names))):
            yield f"{prefix}.{number}.{own}.weight", piece.clone()


@torch.no_grad()
def make_agree(layer: torch.nn.Module, model: torch.nn.Module) -> None:
    """Lets a layer pass the embedding on, and gives it the final norm of the model."""
    width = layer.eh_proj.out_features
    layer.eh_proj.weight.copy_(torch.eye(width, 2 * width))
    probe = torch.randn(1, width)
    layer.enorm.weight.fill_(0.0)
    if not layer.enorm(probe).any():  # Qwen adds 1
        layer.enorm.weight.fill_(1.0)
    layer.post_norm.weight.copy_(model.get_decoder().norm.weight)


def is_output(name: str) -> bool:
    """True for the matrices whose products are added to the residual stream."""
    return any(part in name for part in ("o_proj", "out_proj", "down_proj"))


@torch.no_grad()
def mtp_rows(mtp: torch.nn.Module, ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and rows of transformers' layer for tokens `ids [T]` with the rows of the tokens before them."""
    positions = torch.arange(len(ids))[None]
    found = mtp.forward_layer(0, rows[None], positions, None, input_ids=ids[None])
    return mtp._project_to_logits(found)[0], found[0]


@torch.no_grad()
def mtp_logits(mtp: torch.nn.Module, inputs: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits for inputs `[T, hidden]` in place of tokens, at `positions [3, T]` of time, height and width. The mask
    is that of text."""
    inputs, text = inputs[None], torch.arange(len(inputs))[None]
    angles = mtp.rotary_emb(inputs, position_ids=positions[:, None])
    masks = mtp.create_masks_for_mtp_layer(0, inputs, None, text)
    found = mtp.layers[0](inputs, rows[None], position_embeddings=angles, position_ids=text, cache=None, **masks)
    return mtp._project_to_logits(found)[0]


def given_for(head: ModelRunner, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The given rows of tokens `ids [T]`, with the target's rows of the tokens before them."""
    model = head.model
    return torch.cat([rows, model.embeddings(ids)], 1) if model.sees_inputs else rows


EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
    "vocab_size": 99,
    "draft_vocab_size": 40,
    "target_hidden_size": 32,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def save_eagle3(folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Saves an EAGLE-3 drafter with random weights for a tiny model of two layers. Returns its tensors."""
    config = EAGLE | fields
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocab, drafts = config["vocab_size"], config["draft_vocab_size"] or config["vocab_size"]
    generator = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5).bfloat16().float()

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.3 * torch.randn(size, generator=generator)).bfloat16().float()

    state = {
        "fc.weight": matrix(hidden, 3 * config["target_hidden_size"]),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
        "midlayer.self_attn.q_proj.weight": matrix(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * dim),
        "midlayer.post_attention_layernorm.weight": norm(hidden),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(drafts, hidden),
        "embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
    }
    if drafts < vocab:
        ids = torch.randperm(vocab, generator=generator)[:drafts].sort().values
        state["d2t"] = ids - torch.arange(drafts)
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    if config.get("norm_before_fc"):
        state["input_norm.weight"] = norm(3 * config["target_hidden_size"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return state


def runners(path: Path, spec_config: Any, backend: str = "native") -> tuple[ModelRunner, Any]:
    """Returns the runners of a model and of its draft head."""
    options = {"dtype": "float32", "progress": False, "num_threads": 1, "kv_cache_bytes": "4MiB"}
    engine = open_model(LoadOptions(path, spec_config=spec_config, backend=backend, **options)).engine
    return engine.model, engine.drafter.source.model


def run(runner: ModelRunner, ids: torch.Tensor, given: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a text, with given rows or without. Returns the logits and the kept rows of all tokens."""
    cache = CacheManager(runner.kv_spec, 1 << 20)
    sequence = Sequence(ids.tolist(), strategy=None, stopping=None, max_length=80)
    sequence.wanted_from = 0
    assert cache.admit(sequence, len(ids))
    spans = [Span(sequence, 0, len(ids))]
    cache.plan(spans)
    widths = {"kept_width": runner.kept_width, "given_width": 0 if given is None else given.shape[1]}
    batch: ForwardBatch = BatchBuilder(**widths).build(spans, cache.kv)
    if given is not None:
        batch.given.rows.copy_(given)
    return runner.forward(batch), batch.kept
