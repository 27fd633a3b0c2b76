"""Healthy checkpoints as dictionaries of files, of every architecture and in every storage format.

A checkpoint in memory is `{file name: bytes}`; a value may also be one of the `Special` files.
"""

from __future__ import annotations

import collections
import io
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save

from tests.checkpoints.quantized.models import KINDS as QUANTISED_KINDS
from tests.checkpoints.quantized.models import OF_TOKENS, tensors_of
from tests.llm.models.encoders.variants import VARIANTS as ENCODER_VARIANTS
from tests.llm.models.encoders.variants import save_encoder
from tests.llm.models.variants import save_tiny

ARCHITECTURES = [
    ("llama", {"tie_word_embeddings": True}), ("mistral", {"sliding_window": 7}), ("qwen2", {}), ("qwen3", {}),
    ("bitnet", {}),
    ("phi3", {}), ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}), ("gptj", {}), ("phi", {}),
    ("gemma2", {"num_hidden_layers": 2}), ("gemma3", {}), ("gemma3_text", {"num_hidden_layers": 2}),
    ("gemma4_text", {}), ("gemma4_unified_text", {}),
    ("smollm3", {"num_hidden_layers": 2, "no_rope_layer_interval": 2}), ("granite", {}), ("olmo2", {}),
    ("olmo3", {"num_hidden_layers": 2}), ("glm", {}), ("glm4", {}), ("ernie4_5", {"use_bias": True}),
    ("hunyuan_v1_dense", {}), ("cohere", {"use_qk_norm": True}), ("cohere2", {"num_hidden_layers": 2}), ("minicpm", {}),
    ("starcoder2", {"sliding_window": 7}), ("stablelm", {"use_parallel_residual": True}), ("gpt_neox", {}),
    ("gpt2", {}), ("chatglm", {}), ("exaone", {}), ("exaone4", {"num_hidden_layers": 2}), ("gemma", {}),
    ("granite_swa", {"num_hidden_layers": 2, "layer_rope_theta": [0, 1e4]}), ("hyperclovax", {}), ("ministral3", {}),
    ("mistral3", {}), ("nanochat", {}), ("nemotron", {}), ("youtu", {}), ("apertus", {}), ("bloom", {}),
    ("falcon", {"new_decoder_architecture": True}), ("gpt_bigcode", {}), ("mpt", {}), ("olmo", {"clip_qkv": 0.5}),
    ("qwen2_vl", {}), ("qwen2_5_vl", {}), ("qwen3_vl", {}),
]  # fmt: skip
ROUTED = [
    ("mixtral", {"sliding_window": 7}), ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0]}), ("olmoe", {}), ("gpt_oss", {"num_hidden_layers": 2}), ("granitemoe", {}),
    ("granitemoeshared", {}), ("glm4_moe", {"n_group": 4, "topk_group": 2}), ("ernie4_5_moe", {}),
    ("gemma4", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}),
    ("hunyuan_v1_moe", {}), ("phimoe", {}), ("llama4", {}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}), ("deepseek_v3", {}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}), ("minicpm3", {}),
    ("granitemoehybrid", {}), ("nemotron_h", {"moe_latent_size": 24}), ("bamba", {}), ("falcon_h1", {}), ("mamba2", {}),
]  # fmt: skip
"""Mixtures of experts, latent attention, and layers with a state."""
ENCODERS = ("bert-classifier", "roberta", "distilbert", "electra")
KINDS = ("safetensors", "safetensors-sharded", "bin", "bin-sharded", "bin-legacy")
SHARDED = ("safetensors-sharded", "bin-sharded")
WEIGHTS = (".safetensors", ".bin")
QUANTISED: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
    },
}
"""model_type -> config fields with which every module has whole groups."""


@dataclass(frozen=True)
class Special:
    """Something other than a regular file at a file's path."""

    kind: str
    target: str = ""

    def create(self, path: Path) -> None:
        if self.kind == "directory":
            path.mkdir()
        elif self.kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(self.target)


Files = dict[str, bytes | Special]


def write(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, Special):
            content.create(folder / name)
        else:
            (folder / name).write_bytes(content)


def healthy_checkpoints(folder: Path, part: slice = slice(None)) -> dict[str, Files]:
    """`"architecture/kind"` -> files, for every architecture and layout kind; ROUTED and ENCODERS only in shards. Llama
    and mixtures are also quantised in every way. `part` selects some of these. transformers writes to `folder`."""
    checkpoints = {}
    for model_type, fields in (ARCHITECTURES + ROUTED)[part]:
        save_tiny(folder / model_type, model_type, fields)
        state = load_file(folder / model_type / "model.safetensors")
        config = json.loads((folder / model_type / "config.json").read_text())
        config |= {"bos_token_id": None, "eos_token_id": None}
        common: Files = {
            "config.json": json.dumps(config, indent=1).encode(),
            "generation_config.json": b'{"do_sample": false, "eos_token_id": 5, "temperature": 0.7}',
            **tokenizer_files(),
        }
        for kind in KINDS if (model_type, fields) in ARCHITECTURES else SHARDED:
            checkpoints[f"{model_type}/{kind}"] = common | weight_files(kind, state)
    for name in ENCODERS[part]:
        save_encoder(folder / name, ENCODER_VARIANTS[name])
        state = load_file(folder / name / "model.safetensors")
        common = {"config.json": (folder / name / "config.json").read_bytes(), **tokenizer_files()}
        for kind in SHARDED:
            checkpoints[f"{name}/{kind}"] = common | weight_files(kind, state)
    kinds = QUANTISED_KINDS | OF_TOKENS
    for kind, model_type in list(itertools.product(kinds, QUANTISED))[part]:
        config, state, _ = tensors_of(kind, model_type, tuple(QUANTISED[model_type].items()))
        quantization = {"quantization_config": kinds[kind][0]}
        config |= {"bos_token_id": None, "eos_token_id": None, **quantization}
        layout = "safetensors-sharded" if "bnb" in kind else "bin" if kind == "awq" else "safetensors"
        checkpoints[f"quantised-{model_type}/{kind}"] = {
            "config.json": json.dumps(config, indent=1).encode(),
            **tokenizer_files(),
            **weight_files(layout, state),
        }
    return checkpoints


def tokenizer_files() -> dict[str, bytes]:
    vocab = {"<unk>": 0, "</s>": 1, **{chr(97 + i): 2 + i for i in range(26)}, "he": 28, "hel": 29}
    merges = [["h", "e"], ["he", "l"]]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate(("<unk>", "</s>"))
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": merges},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def weight_files(kind: str, state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    if "sharded" not in kind:
        name = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
        return {name: dump(kind, state)}
    stem, suffix = ("model", "safetensors") if kind.startswith("safetensors") else ("pytorch_model", "bin")
    shards: dict[str, dict[str, torch.Tensor]] = collections.defaultdict(dict)
    for i, (name, tensor) in enumerate(state.items()):
        shards[f"{stem}-{i % 2 + 1:05}-of-00002.{suffix}"][name] = tensor
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
    return {
        f"{stem}.{suffix}.index.json": json.dumps(index).encode(),
        **{shard: dump(kind.removesuffix("-sharded"), part) for shard, part in shards.items()},
    }


def dump(kind: str, state: dict[str, object]) -> bytes:
    if kind == "safetensors":
        return save(state, metadata={"format": "pt"})
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=kind != "bin-legacy")
    return file.getvalue()


def load_state(name: str, data: bytes) -> tuple[str, dict[str, torch.Tensor]]:
    """Reads the output of `dump` back: its `kind` and its state."""
    if name.endswith(".safetensors"):
        return "safetensors", load(data)
    return "bin" if data.startswith(b"PK") else "bin-legacy", torch.load(io.BytesIO(data), weights_only=True)
