"""GGUF files as a checkpoint: the config.json that their metadata stand for, and their tensors under the names of the
Hub.

    blk.3.attn_q.weight, Q4_K      ->  model.layers.3.self_attn.q_proj.weight, rows of codes and scales (`QuantizedRows`)

What llama.cpp's converter changes is undone: it permutes the rows of Llama's queries and keys, so that the pairs that
are rotated together lie side by side, and turns scalings of the rotary embedding into a factor for each pair. Names and
keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and src/llama-arch.cpp and convert_hf_to_gguf.py of
llama.cpp.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.checkpoints.gguf.blocks import BlockType
from pace.checkpoints.gguf.file import GgufFile, GgufTensor, Metadata
from pace.checkpoints.reader import row_ranges
from pace.checkpoints.safetensors_file import TensorInfo, copy_in_own_pages
from pace.ops.weight_layout import QuantizedRows, WeightLayout

SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SHARDS = 1000

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
PERMUTED = ("llama",)
"""Architectures whose queries and keys have their rows permuted."""

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PHI3_NAMES = {"ffn_up": "mlp.gate_up_proj"}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that the config takes up."""

CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
PER_LAYER_KEYS = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""One number, or one for each layer."""
REFUSED_KEYS = {
    "expert_count": "num_experts",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attention.causal": "is_causal",
    "attention.max_alibi_bias": "alibi",
}
"""Keys that would change the mathematics, and the field of config.json that is refused, or harmless, for the same
value."""
READ_KEYS = {
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
}
READ_KEYS |= {
    "rope.freq_base",
    "rope.scale_linear",
    *(f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
}
READ_KEYS |= {
    *(f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "ext_factor", "attn_factor", "log_multiplier"))
}
HARMLESS_KEYS = {"vocab_size", "expert_used_count", "tensor_data_layout", "leading_dense_block_count"}

END_TOKENS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
}
"""Control tokens that end a text whatever the keys say, since these name one and models have several; so does
llama.cpp."""
CONTROL = 3
"""Of tokenizer.ggml.token_type."""

PIECE_ELEMENTS = 1 << 20
"""Weights are read, packed and released in pieces of so many: of those in blocks, a code is a byte, and scales and
minima are up to half a byte each."""


class GgufCheckpoint:
    """The tensors and the config of a GGUF file, or of one split into shards, of which any may be given. Has the
    interface of `CheckpointReader`; a tensor in blocks is one whose dtype is a `WeightLayout`, and `read` returns its rows
    as `QuantizedRows`."""

    def __init__(self, path: str | Path):
        """Raises FileNotFoundError (a shard is missing), PermissionError, ValueError (damaged or contradictory),
        NotImplementedError (an architecture, a type of tensors); the message names the file."""
        self.path = Path(path)
        self._files: dict[str, GgufFile] = {}
        """By the name of a tensor here."""
        self._sources: dict[str, str] = {}
        """Name here -> name in the file."""
        files = [GgufFile(shard) for shard in shard_paths(self.path)]
        self.metadata = files[0].metadata
        check_shards(files)
        architecture = self.metadata.required("general.architecture", self.metadata.text("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise NotImplementedError(
                f"{self.path} is of the architecture {architecture[:80]!r}, which is not implemented; implemented: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = architecture
        for file in files:
            for source in file.tensors:
                name = hub_name(source, architecture)
                if name in self._files:
                    raise ValueError(
                        f"tensor {source[:200]!r} is in both {self._files[name].path} and {file.path}; it may be in one file only"
                    )
                self._files[name], self._sources[name] = file, source
        self.config = read_config(self.metadata, architecture, self._shapes(), self._factors())
        self._heads = (
            {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
            if architecture in PERMUTED
            else {}
        )
        self.tensors = {name: self._info(name) for name in self._sources if self._sources[name] not in ROPE_FACTORS}

    def _tensor(self, name: str) -> GgufTensor:
        return self._files[name].tensors[self._sources[name]]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._tensor(name).shape for name in self._sources}

    def _factors(self) -> dict[str, list[float]]:
        """The factors of the rotary embedding, by the tensor's name."""
        found = {}
        for name in self._sources.keys() & set(ROPE_FACTORS):
            if len(self._tensor(name).shape) != 1:
                raise ValueError(
                    f"tensor {name!r} in {self._files[name].path} must be a vector; its shape is {list(self._tensor(name).shape)}"
                )
            found[name] = self._floats(name).tolist()
        return found

    def _info(self, name: str) -> TensorInfo:
        tensor = self._tensor(name)
        if isinstance(tensor.kind, BlockType):
            return TensorInfo(tensor.kind.layout if len(tensor.shape) == 2 else torch.float32, tensor.shape)
        return TensorInfo(tensor.kind, tensor.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | QuantizedRows:
        """Rows [start, stop) of a tensor along its first dimension (all of them by default), in its stored dtype or as
        `QuantizedRows`.

        A view of the file where possible: not to be written to. Raises KeyError for a name not in `tensors`, ValueError
        for scales that are not finite."""
        tensor = self._tensor(name)
        if len(tensor.shape) != 2:
            whole = self._floats(name)
            if heads := self._permuted_heads(name):
                whole = whole[hub_order(range(whole.shape[0]), whole.shape[0] // heads)]
            return whole[start:stop] if tensor.shape else whole
        raw = self._raw(name, range(tensor.num_rows)[start:stop])
        if isinstance(tensor.kind, BlockType):
            rows = tensor.kind.decode(raw)
            for values in (rows.scales, rows.mins):
                if values is not None and not values.isfinite().all():
                    raise ValueError(
                        f"tensor {self._sources[name]!r} in {self._files[name].path} has scales that are NaN or infinite: the file is damaged"
                    )
            return rows
        return _as_floats(raw, tensor.kind)

    def _raw(self, name: str, rows: range) -> Tensor:
        """Rows of a matrix as they are stored, in the Hub's order."""
        file, source = self._files[name], self._sources[name]
        if not (heads := self._permuted_heads(name)):
            return file.rows(source, rows.start, rows.stop)
        head_dim = file.tensors[source].num_rows // heads
        first = rows.start // head_dim * head_dim
        return file.rows(source, first, -(-rows.stop // head_dim) * head_dim)[hub_order(rows, head_dim) - first]

    def _floats(self, name: str) -> Tensor:
        """All of a tensor, in floats."""
        file, source = self._files[name], self._sources[name]
        kind, shape = file.tensors[source].kind, file.tensors[source].shape
        rows = file.rows(source)
        return (kind.decode(rows).dequantize() if isinstance(kind, BlockType) else _as_floats(rows, kind)).reshape(
            shape
        )

    def _permuted_heads(self, name: str) -> int | None:
        """Heads of a tensor whose rows are permuted; ValueError where its rows are no whole heads."""
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        if heads and (rows := self._tensor(name).shape[:1]) and rows[0] % (2 * heads):
            raise ValueError(
                f"tensor {self._sources[name]!r} in {self._files[name].path} has {rows[0]} rows, which {heads} heads with an even number of elements cannot have"
            )
        return heads

    def column_order(self, name: str) -> None:
        """No type orders its columns."""

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Gives the memory of rows [start, stop) back. Mapped file pages count as this process's memory until then."""
        self._files[name].release(self._sources[name], start, stop)

    def row_ranges(self, name: str, piece_elements: int = PIECE_ELEMENTS) -> list[tuple[int, int]]:
        """Ranges [start, stop) of rows that cover a tensor, each of about `piece_elements`; one range for a vector."""
        shape = self.tensors[name].shape
        if len(shape) < 2 or shape[0] == 0:
            return [(0, shape[0] if shape else 1)]
        return row_ranges(shape[0], prod(shape[1:]), piece_elements)

    @property
    def total_bytes(self) -> int:
        """Of all that `read` returns: of a matrix in blocks, a byte for each code."""
        return sum(_read_bytes(*info) for info in self.tensors.values())

    def close(self) -> None:
        """Ends reading. Tensors that were read stay valid."""
        for file in set(self._files.values()):
            file.close()

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def _read_bytes(dtype: torch.dtype | WeightLayout, shape: tuple[int, ...]) -> int:
    if isinstance(dtype, WeightLayout):
        return shape[0] * (shape[1] + 4 * dtype.num_groups(shape[1]) * (1 + dtype.has_mins))
    return prod(shape) * dtype.itemsize


def _as_floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of rows as numbers."""
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else copy_in_own_pages(raw)).view(dtype)


def hub_order(rows: range, head_dim: int) -> Tensor:
    """int64: where rows of a query's or key's matrix of the Hub stand in llama.cpp's: element j of half h of a head is
    its element 2 j + h."""
    index = torch.arange(rows.start, rows.stop)
    head, element = index // head_dim * head_dim, index % head_dim
    return head + 2 * (element % (head_dim // 2)) + element // (head_dim // 2)


def hub_name(source: str, architecture: str) -> str:
    """The Hub's name of a tensor; those that have none keep theirs."""
    part, _, end = source.rpartition(".")
    if part in OUTER_NAMES:
        return f"{OUTER_NAMES[part]}.{end}"
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", part):
        names = LAYER_NAMES | PHI3_NAMES if architecture == "phi3" else LAYER_NAMES
        if found[2] in names:
            return f"model.layers.{found[1]}.{names[found[2]]}.{end}"
    return source


# -----------------------------------------------------------------------------------------------------------------
# shards


def shard_paths(path: Path) -> list[Path]:
    """All files of which `path` is one, the first first; FileNotFoundError where one of them is missing."""
    found = SHARD_NAME.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= MAX_SHARDS:
        raise ValueError(
            f"{path} is named as shard {int(found['number'])} of {count}; shards are numbered from 1 to at most {MAX_SHARDS}"
        )
    paths = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [shard.name for shard in paths if not shard.exists()]:
        raise FileNotFoundError(
            f"{path} is one of {count} shards; missing in {path.parent}: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        )
    return paths


def check_shards(files: list[GgufFile]) -> None:
    """ValueError unless each file says of itself what its name says, and all tensors are there."""
    total = 0
    for number, file in enumerate(files):
        count, own = file.metadata.integer("split.count", 0) or 1, file.metadata.integer("split.no", 0)
        if count != len(files) or own != number:
            what = f"is shard {own + 1} of {count} by its metadata (split.no, split.count)"
            advice = "give it the name that it was made with, FILE-00001-of-00002.gguf and so on, beside the others"
            raise ValueError(f"{file.path} {what}, and shard {number + 1} of {len(files)} by its name; {advice}")
        total += len(file.tensors)
    announced = files[0].metadata.integer("split.tensors.count", total)
    if announced != total:
        raise ValueError(
            f"{files[0].path} announces {announced} tensors in {len(files)} shards (split.tensors.count), which hold {total}; download or copy them again"
        )


# -----------------------------------------------------------------------------------------------------------------
# config


def read_config(
    metadata: Metadata, architecture: str, shapes: dict[str, tuple[int, ...]], factors: dict[str, list[float]]
) -> dict[str, Any]:
    """What stands in config.json; `shapes` by the Hub's names, `factors` of the rotary embedding by GGUF's. Raises
    ValueError for what is missing or of the wrong type, NotImplementedError for layers that differ from each other."""

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    fields: dict[str, Any] = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    for name, field in CONFIG_KEYS.items():
        fields[field] = metadata.required(key(name), metadata.integer(key(name)))
    for name, field in PER_LAYER_KEYS.items():
        fields[field] = _same_for_all(metadata, key(name))
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for field in ("intermediate_size", "num_attention_heads"):
        metadata.required(key(next(name for name, other in PER_LAYER_KEYS.items() if other == field)), fields[field])
    for name, field in REFUSED_KEYS.items():
        value = metadata.get(key(name))
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if value is False or value:  # 0 means that there is no such thing
            fields[field] = value
    fields["rms_norm_eps"] = _shortest(
        metadata.required(
            key("attention.layer_norm_rms_epsilon"), metadata.number(key("attention.layer_norm_rms_epsilon"))
        )
    )
    fields["head_dim"] = _head_dim(metadata, key, fields)
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None or len(embedding) != 2:
        raise ValueError(
            f"{metadata.path} has no matrix token_embd.weight; its tensors are damaged or not a language model's"
        )
    fields["vocab_size"] = embedding[0]
    fields["tie_word_embeddings"] = "lm_head.weight" not in shapes
    if architecture in ("llama", "qwen3"):  # the others have biases always, or never
        fields["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
    if architecture == "llama":
        fields["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    fields |= _window(metadata, key, architecture, fields)
    fields |= _rope(metadata, key, fields, factors)
    fields |= special_tokens(metadata)
    unknown = {name.removeprefix(key("")) for name in metadata if name.startswith(key(""))}
    unknown -= CONFIG_KEYS.keys() | PER_LAYER_KEYS.keys() | REFUSED_KEYS.keys() | READ_KEYS | HARMLESS_KEYS
    # The reader of config.json says that it ignores fields that it does not know.
    return fields | {key(name): True for name in unknown}


def _same_for_all(metadata: Metadata, key: str) -> int | None:
    """An integer that is given once, or the same for each layer."""
    if not isinstance(metadata.get(key), np.ndarray):
        return metadata.integer(key)
    values = metadata[key].tolist()
    if len(set(values)) != 1 or type(values[0]) is not int:
        raise NotImplementedError(
            f"{metadata.path}: {key} differs between the layers ({values[:8]}...), which is not implemented"
        )
    return values[0]


def _head_dim(metadata: Metadata, key, fields: dict[str, Any]) -> int:
    heads = fields["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"{metadata.path}: {key('attention.head_count')} must be positive; got {heads}")
    head_dim = metadata.integer(key("attention.key_length"), fields["hidden_size"] // heads)
    if metadata.integer(key("attention.value_length"), head_dim) != head_dim:
        raise NotImplementedError(
            f"{metadata.path}: attention.key_length and attention.value_length differ, which is not implemented"
        )
    return head_dim


def _window(metadata: Metadata, key, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The sliding window. A Llama that has one is a Mistral; llama.cpp gives Qwen none."""
    name = key("attention.sliding_window")
    window = metadata.integer(name, 0)
    if architecture == "phi3":
        return {"sliding_window": window or None}
    if window == 0 or window >= fields["max_position_embeddings"]:
        return {}
    if architecture != "llama":
        raise NotImplementedError(f"{metadata.path}: {name} = {window} is not implemented for {architecture}")
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _rope(metadata: Metadata, key, fields: dict[str, Any], factors: dict[str, list[float]]) -> dict[str, Any]:
    """The rotary embedding, in the spelling of transformers 4."""
    head_dim, positions = fields["head_dim"], fields["max_position_embeddings"]
    dim = metadata.integer(key("rope.dimension_count"), head_dim)
    found: dict[str, Any] = {"rope_theta": metadata.number(key("rope.freq_base"), 10000.0)}
    if dim != head_dim:
        found["partial_rotary_factor"] = dim / max(1, head_dim)
    kind = metadata.text(
        key("rope.scaling.type"), "linear" if metadata.number(key("rope.scale_linear"), 1.0) != 1.0 else "none"
    )
    factor = metadata.number(key("rope.scaling.factor"), metadata.number(key("rope.scale_linear")))
    original = metadata.integer(key("rope.scaling.original_context_length"))
    if factors:
        # llama.cpp divides the angle of each pair by a factor, one set of them up to the original length and one
        # beyond: what longrope does. Those of Llama 3's scaling come as rope_freqs, for any length.
        same = factors.get("rope_freqs.weight")
        short, long = (factors.get(f"rope_factors_{which}.weight", same) for which in ("short", "long"))
        if short is None or long is None or not len(short) == len(long) == -(-dim // 2):
            raise ValueError(
                f"{metadata.path}: {', '.join(sorted(factors))} must have a factor for each of {-(-dim // 2)} pairs; got {[len(values) for values in factors.values()]}"
            )
        found["original_max_position_embeddings"] = original or positions
        # Without attn_factor llama.cpp scales nothing.
        attention = metadata.number(key("rope.scaling.attn_factor"), 1.0)
        return found | {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "attention_factor": attention,
            }
        }
    if kind == "linear" and factor not in (None, 0.0, 1.0):
        return found | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": metadata.required(key("rope.scaling.factor"), factor)}
        scaling["original_max_position_embeddings"] = original or positions
        for name in ("beta_fast", "beta_slow"):
            if (value := metadata.number(key(f"rope.scaling.yarn_{name}"))) is not None:
                scaling[name] = value
        for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
            if (value := metadata.number(key(f"rope.scaling.{name}"))) not in (None, 1.0):
                raise NotImplementedError(
                    f"{metadata.path}: {key(f'rope.scaling.{name}')} = {value} is not implemented"
                )
        return found | {"rope_scaling": scaling}
    if kind not in ("none", "linear"):
        raise NotImplementedError(
            f"{metadata.path}: {key('rope.scaling.type')} = {kind[:80]!r} without tensors of factors is not implemented; implemented: none, linear, yarn"
        )
    return found


def _shortest(value: float) -> float:
    """The decimal number that was meant by an fp32 one: 1e-05 where the file has 9.99999974737875e-06."""
    return float(str(np.float32(value))) if np.isfinite(value) else value


def special_tokens(metadata: Metadata) -> dict[str, Any]:
    """The ids that begin and end texts and pad them, as in config.json; None where there is none."""

    def token(name: str) -> int | None:
        return metadata.integer(f"tokenizer.ggml.{name}_token_id")

    ends = [token(name) for name in ("eos", "eot", "eom")]
    tokens, types = metadata.texts("tokenizer.ggml.tokens") or [], metadata.numbers("tokenizer.ggml.token_type")
    if types is not None and len(types) == len(tokens):
        ends += [int(index) for index in np.flatnonzero(types == CONTROL) if tokens[index] in END_TOKENS]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    return {"bos_token_id": token("bos"), "eos_token_id": ends or None, "pad_token_id": token("padding")}
