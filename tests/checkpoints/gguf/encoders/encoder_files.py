"""GGUF files of encoders, as llama.cpp's converter writes them, with their vocabularies."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import PoolingType, TokenType
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints.gguf.files import add_stored, finish, tensor_names

ARCHITECTURES = {
    "bert": "bert", "roberta": "bert", "xlm-roberta": "bert", "distilbert": "bert", "nomic_bert": "nomic-bert",
    "modernbert": "modern-bert", "jina_embeddings_v3": "jina-bert-v3", "gemma3_text": "gemma-embedding",
    "eurobert": "eurobert",
}  # fmt: skip
"""GGUF's architecture names by model_type."""
PREFIXES = ("bert.", "distilbert.", "roberta.", "model.")
DROPPED = ("pooler.dense", "cls.predictions", "lm_head", "vocab_", "embeddings.position_ids")
DECODERS = ("gemma3_text", "eurobert")
"""Families with the layers of a language model."""
POOLINGS = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}

Add = Callable[[gguf.GGUFWriter], object]


def nothing(writer: gguf.GGUFWriter) -> None:
    """Adds nothing to a file."""


def write_encoder(
    folder: Path,
    path: Path,
    types: str = "F32",
    add: Add = nothing,
    keeps: tuple[str, ...] = (),
    dense: int = 0,
    as_floats: bool = False,
) -> None:
    """Writes the encoder in `folder` (config.json, one model.safetensors, perhaps 1_Pooling) to `path`. `types` is
    ggml's name of the matrices' type. `add` may change the keys, `keeps` names tensors that the converter drops. With
    `dense`, EmbeddingGemma's `dense` random matrices. With `as_floats`, the file holds their values in float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    add_keys(writer, config)
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.exists():
        writer.add_pooling_type(POOLINGS[json.loads(pooling.read_text())["pooling_mode"]])
    add(writer)
    for name, tensor in arranged(load_file(folder / "model.safetensors"), config, keeps):
        is_table = name in ("position_embd.weight", "token_types.weight")
        fits = tensor.ndim > 1 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[Kind[types]][0] == 0
        add_stored(writer, name, tensor, types if fits and not is_table else "F32", as_floats)
    for name, matrix in dense_matrices(config["hidden_size"], dense) if dense else ():
        writer.add_tensor(name, matrix)
        writer.add_dense_features_dims(name.removesuffix(".weight"), *matrix.shape[::-1])
    finish(writer)


def dense_matrices(hidden: int, count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Matrices of 2_Dense and 3_Dense, `[4 H, H]` and `[H, 4 H]`."""
    random = np.random.default_rng(0)
    for index in range(count):
        shape = (4 * hidden, hidden) if index == 0 else (hidden, 4 * hidden)
        yield f"dense_{index + 2}.weight", random.standard_normal(shape, np.float32) / 8


def arranged(state: dict[str, Tensor], config: dict[str, Any], keeps: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file: without poolers, position tables without the rows of padding, norms of Gemma with
    1 added."""
    family = config["model_type"]
    layers = config.get("num_hidden_layers") or config["n_layers"]
    names = tensor_names(ARCHITECTURES[family], layers)
    for name, tensor in state.items():
        name = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
        if name.startswith(DROPPED) and not name.startswith(keeps or ("-",)):
            continue
        if name == "embeddings.position_embeddings.weight" and family in ("roberta", "xlm-roberta"):
            tensor = tensor[config["pad_token_id"] + 1 :]
        if family in DECODERS:
            name = f"model.{name}"
        if family == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor + 1
        for end in ("weight", "bias"):
            if name == f"classifier.{end}":
                name = f"classifier.out_proj.{end}"
            if name == f"pooler.dense.{end}":
                name = f"classifier.dense.{end}"
        yield names(name), tensor


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Adds the keys of a config.json."""
    family = config["model_type"]
    offset = config["pad_token_id"] + 1 if family in ("roberta", "xlm-roberta", "jina_embeddings_v3") else 0
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layers"])
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config.get("hidden_size") or config["dim"])
    writer.add_feed_forward_length(config.get("hidden_dim") or config["intermediate_size"])
    writer.add_head_count(config.get("num_attention_heads") or config["n_heads"])
    if family in DECODERS:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    else:
        writer.add_causal_attention(False)
    if family in DECODERS or family == "modernbert":  # whose config has no layer_norm_eps
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-12))
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if theta := rope.get("full_attention", rope).get("rope_theta"):
        writer.add_rope_freq_base(theta)
    if family == "modernbert":
        writer.add_sliding_window(config["local_attention"])
        if "full_attention" in config["layer_types"][1:3]:  # three is the default
            writer.add_sliding_window_pattern(config["layer_types"].index("full_attention", 1))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
        writer.add_uint32("modern-bert.classifier.pooling_type", POOLINGS[config["classifier_pooling"]])
    is_classifier = config["architectures"][0].endswith("ForSequenceClassification")
    if is_classifier and (labels := config.get("id2label")):
        writer.add_classifier_output_labels([labels[key] for key in sorted(labels, key=int)])


# -- vocabularies ------------------------------------------------------------------------------------------------------


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    """Adds the vocabulary of one of transformers' tokenizers: of WordPiece, or unigram pieces."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    names = [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer))]
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    types = [TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(len(names))]
    is_unigram = state["model"]["type"] == "Unigram"
    writer.add_tokenizer_model("t5" if is_unigram else "bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(1 if is_unigram else 2)
    if is_unigram:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
        writer.add_token_scores([score for _, score in state["model"]["vocab"]])
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_bos_token_id(tokenizer.cls_token_id)
        writer.add_eos_token_id(tokenizer.sep_token_id)
        for name in ("bos", "eos", "sep"):
            getattr(writer, f"add_add_{name}_token")(True)
    else:
        names = [without_marks(name, index in special) for index, name in enumerate(names)]
        writer.add_bos_token_id(tokenizer.cls_token_id)
        writer.add_eos_token_id(tokenizer.sep_token_id)
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", state["normalizer"]["lowercase"])
    writer.add_token_list(names)
    writer.add_token_types(types)
    for name in ("sep", "unk", "pad", "mask"):
        getattr(writer, f"add_{name}_token_id")(getattr(tokenizer, f"{name}_token_id"))


def without_marks(name: str, is_special: bool) -> str:
    """A WordPiece token as the converter writes it."""
    if is_special:
        return name
    return name[2:] if name.startswith("##") else f"▁{name}"


def charsmap(changes: dict[str, str]) -> bytes:
    """A table of sentencepiece that replaces characters by others. It is a double array, in which the bytes of a
    character are XORed to the offset of a node, and the replacements."""
    tree: dict = {}
    texts, starts = b"", {}
    for source, target in changes.items():
        starts[source] = len(texts)
        texts += target.encode() + b"\0"
        node = tree
        for byte in source.encode():
            node = node.setdefault(byte, {})
        node[None] = starts[source]
    units: dict[int, int] = {}
    nodes = 0

    def place(node: dict, at: int, label: int) -> None:
        """Puts the children of the node at `at` into their own block of 256 units."""
        nonlocal nodes
        nodes += 1
        base = 256 * nodes
        units[at] = label | (at ^ base) << 10 | (None in node) << 8
        if None in node:
            units[base] = 1 << 31 | node[None]
        for byte, child in node.items():
            if byte is not None:
                place(child, base ^ byte, byte)

    place(tree, 0, 0)
    array = struct.pack(f"<{256 * (nodes + 1)}I", *(units.get(index, 0) for index in range(256 * (nodes + 1))))
    return struct.pack("<I", len(array)) + array + texts
