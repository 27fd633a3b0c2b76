"""GGUF files for the fuzz tests: small ones of every architecture, and mutations that damage them."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import gguf

from tests.checkpoints.gguf.bytes_of_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    entry,
    name_of,
    taken_apart,
    tensor,
    text,
    whole,
)
from tests.checkpoints.gguf.dense import dense_files
from tests.checkpoints.gguf.encoders import test_encoders
from tests.checkpoints.gguf.encoders.encoder_files import add_vocabulary, charsmap, write_encoder
from tests.checkpoints.gguf.encoders.test_encoder_vocabularies import unigram, word_pieces
from tests.checkpoints.gguf.files import write_gguf
from tests.checkpoints.gguf.gemma4.gemma4_files import write_gemma4
from tests.checkpoints.gguf.hybrids import hybrid_files
from tests.checkpoints.gguf.older import older_files
from tests.fuzz import mutate
from tests.fuzz.checkpoints import Files, Special
from tests.fuzz.mutate import Mutation
from tests.llm.models.families.gemma4_variants import EXPERTS, KEYS, LARGE
from tests.llm.models.rotations import longrope
from tests.llm.models.variants import save_tiny

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
HEALTHY = [
    # (model_type, types of matrices, tensors in a shard, config fields)
    ("llama", "F32", 0, {"tie_word_embeddings": True}),
    ("llama", lambda name: "Q6_K" if "v_proj" in name else "Q4_K", 0, WIDE),
    ("mistral", "Q4_0", 12, {"sliding_window": 7}),
    ("qwen2", "Q8_0", 0, {"intermediate_size": 64}),
    ("qwen3", "F16", 12, {}),
    ("qwen3", lambda name: "F16" if "o_proj" in name else "Q1_0" if "_proj" in name else "Q2_0", 0, WIDE),
    ("qwen2", lambda name: "TQ1_0" if "gate" in name else "TQ2_0", 0, WIDE),
    (
        "phi3",
        "Q5_1",
        0,
        {
            "intermediate_size": 64,
            "rope_parameters": {"rope_theta": 1e4, **longrope(4)},
            "original_max_position_embeddings": 50,
        },
    ),
    ("gemma2", "F16", 0, {"query_pre_attn_scalar": 12}),
    ("gemma3_text", "Q8_0", 0, {"query_pre_attn_scalar": 12}),
    ("gemma4_text", "F16", 0, {}),
    ("gemma4_text", "F32", 0, LARGE | KEYS | EXPERTS),
    ("olmo3", "F32", 12, {"num_hidden_layers": 2}),
    ("granite", "Q8_0", 0, {}),
    ("cohere", "F16", 0, {"use_qk_norm": True}),
    ("minicpm", "Q8_0", 0, {}),
    ("gpt2", "F16", 0, {}),
    ("gpt_neox", "Q8_0", 12, {}),
    ("stablelm", "F32", 0, {"qk_layernorm": True}),
    ("chatglm", "Q8_0", 0, {}),
    ("mixtral", "Q8_0", 12, {"intermediate_size": 64}),
    ("qwen2_moe", "F16", 0, {}),
    ("qwen3_moe", "Q8_0", 0, {"moe_intermediate_size": 32}),
    ("olmoe", "F16", 0, {}),
    ("granitemoeshared", "Q8_0", 12, {"intermediate_size": 64, "shared_intermediate_size": 64}),
    ("gpt_oss", "Q8_0", 0, {"num_hidden_layers": 2, "intermediate_size": 64}),
    ("hunyuan_v1_moe", "F16", 0, {}),
    ("ernie4_5_moe", "F32", 0, {}),
    ("glm4_moe", "F16", 12, {}),
    ("deepseek_v2", "F16", 0, {}),
    ("deepseek_v3", "F16", 12, {}),
    ("glm4_moe_lite", "F16", 0, {"num_hidden_layers": 2}),
    ("minicpm3", "F16", 0, {}),
    ("apertus", "F16", 0, {}),
    ("bloom", "F32", 0, {}),
    ("falcon", "F16", 0, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("mpt", "F16", 0, {}),
    ("lfm2_moe", "F16", 0, {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    ("qwen3_5_text", "F16", 0, {}),
    ("granitemoehybrid", "F16", 0, {}),
    ("nemotron_h", "F16", 0, {"layers_block_type": ["linear_attention", "moe", "full_attention"]}),
    ("llama", lambda name: "IQ3_S" if "v_proj" in name else "IQ1_M" if "q_proj" in name else "IQ2_XS", 0, WIDE),
    ("qwen2", lambda name: "IQ3_XXS" if "down" in name else "IQ1_S" if "o_proj" in name else "IQ2_XXS", 12, WIDE),
    ("ministral3", "F16", 0, {}),
    ("granite_swa", "F16", 0, {"num_hidden_layers": 2}),
    ("qwen3", "NVFP4", 0, WIDE),
    ("dbrx", "F16", 0, {}),
    ("mistral4", "F16", 12, {}),
]
ENCODERS = [
    # (name in transformers, its class, types of matrices, config fields)
    ("Bert", "Model", "Q8_0", {"num_hidden_layers": 1}),
    ("XLMRoberta", "ForSequenceClassification", "F16", {"num_hidden_layers": 1, "num_labels": 1}),
    ("DistilBert", "Model", "F32", {"num_hidden_layers": 1}),
    ("NomicBert", "Model", "Q5_1", {"num_hidden_layers": 1}),
    ("ModernBert", "ForSequenceClassification", "F32", {"num_hidden_layers": 2, "num_labels": 1}),
    ("JinaEmbeddingsV3", "Model", "F16", {"num_hidden_layers": 1}),
    ("Gemma3Text", "Model", "Q8_0", {"num_hidden_layers": 2}),
]
DENSE = ("ministral3", "granite_swa")
"""The families with a writer of their own, `write_dense`."""


def healthy_checkpoints(folder: Path, part: slice = slice(None)) -> dict[str, Files]:
    """`"gguf/architecture and number"` -> files, or a part of them. Half of them have a byte-level vocabulary, half a
    sentencepiece one."""
    checkpoints = {}
    for number, (model_type, types, tensors_a_shard, fields) in list(enumerate(HEALTHY))[part]:
        name = f"gguf-{model_type}-{number}"
        save_tiny(
            folder / "gguf" / name / "hub",
            model_type,
            {"num_key_value_heads": 4, "head_dim": None, **fields} if types == "Q4_0" else fields,
        )
        target = folder / "gguf" / name / "file"
        target.mkdir()
        hub, path, add = (
            folder / "gguf" / name / "hub",
            target / "model.gguf",
            (_add_byte_level, _add_pieces)[number % 2],
        )
        if model_type in hybrid_files.ARCHITECTURES:
            hybrid_files.write_hybrid(hub, path, types, add=add)
        elif model_type in DENSE:
            dense_files.write_dense(hub, path, types, add=add)
        elif model_type == "gemma4_text":
            write_gemma4(hub, path, types, add=add)
        elif model_type in older_files.ARCHITECTURES:
            older_files.write_older(hub, path, types, add=add)
        else:
            write_gguf(hub, path, types if callable(types) else _where_it_fits(types), add, tensors_a_shard)
        checkpoints[name] = {path.name: path.read_bytes() for path in target.iterdir()}
    for number, (family, kind, types, fields) in list(enumerate(ENCODERS))[part]:
        hub, path = folder / "gguf" / family, folder / "gguf" / f"{family}.gguf"
        test_encoders.saved(hub, family, kind, **fields)
        vocabulary = unigram(charsmap({"e": "h"})) if number % 2 else word_pieces(True)
        with_dense = 2 if family == "Gemma3Text" else 0
        write_encoder(hub, path, types, lambda writer: add_vocabulary(writer, vocabulary), dense=with_dense)
        checkpoints[f"gguf-encoder-{family}"] = {path.name: path.read_bytes()}
    return checkpoints


def _where_it_fits(kind: str):
    """Uses `kind` only for rows of whole blocks: some rows of attention's output and of the MLP are not."""
    others = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
    return lambda name: kind if kind.startswith("F") or name.split(".")[-2] not in others else "F16"


LETTERS = [chr(97 + index) for index in range(26)]


def _add_byte_level(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["<unk>", "</s>", *LETTERS, "he", "hel"])
    writer.add_token_types([3, 3] + [1] * 28)
    writer.add_token_merges(["h e", "he l"])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")


def _add_pieces(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "</s>", "▁", *LETTERS, "he", "▁hel"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3] + [1] * (len(tokens) - 2))
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


# -------------------------------------------------------------------------------------------------------------
# mutations


def flip_header(rng: random.Random, files: Files) -> str:
    """Flips a few bits before the data."""
    name = mutate.pick_file(rng, files, ".gguf")
    data = bytearray(files[name])
    count = rng.choice([1, 1, 2, 8])
    for _ in range(count):
        data[rng.randrange(len(data) - len(taken_apart(files[name]).data))] ^= 1 << rng.randrange(8)
    files[name] = bytes(data)
    return f"{name} with {count} bits of its header flipped"


HUGE = [0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]


def random_value(rng: random.Random) -> tuple[int, bytes]:
    """Any value and its type."""
    array = struct.pack("<IQ", U32, 3) + struct.pack("<III", 1, 2, 3)
    choices = [
        (U32, struct.pack("<I", rng.choice([0, 1, 2, 3, 7, 64, 2**31, 2**32 - 1]))),
        (I32, struct.pack("<i", -1)),
        (U64, struct.pack("<Q", rng.choice(HUGE))),
        (F32, struct.pack("<f", rng.choice([0.0, -1.0, 0.5, 1e30, math.nan, math.inf]))),
        (F64, struct.pack("<d", rng.choice([0.0, 1e300, math.nan]))),
        (BOOL, bytes([rng.choice([0, 1, 2])])),
        (STRING, text(rng.choice(["", "x", "llama", "gpt2", "yarn", "longrope", "é" * 500, "{{ 1 / 0 }}"]))),
        (ARRAY, array),
        (ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("a")),
        (ARRAY, struct.pack("<IQ", rng.choice([STRING, U8, F64]), 0)),
        (ARRAY, struct.pack("<IQ", rng.choice([STRING, U8, F64, ARRAY, 99]), rng.choice(HUGE))),
        (rng.choice([13, 2**31]), bytes(8)),
    ]
    return rng.choice(choices)


ADDED_KEYS = [
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "attention.key_length", "expert_count",
    "expert_used_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale", "expert_group_count",
    "leading_dense_block_count", "attention.kv_lora_rank", "attention.sliding_window", "attention.causal", "something",
    "ssm.inner_size", "ssm.group_count", "full_attention_interval", "attention.recurrent_layers", "pooling_type",
    "classifier.output_labels", "classifier.pooling_type", "hidden_activation", "dense_2_feat_in",
]  # fmt: skip


def edit_metadata(rng: random.Random, files: Files) -> str:
    """Changes types and sizes of values, or removes, renames, adds or duplicates keys."""
    name = mutate.pick_file(rng, files, ".gguf")
    parts = taken_apart(files[name])
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        index = rng.randrange(len(parts.entries))
        key, rest = name_of(parts.entries[index])
        action = rng.choice(["set", "set", "set", "remove", "rename", "twice", "add"])
        if action == "set":
            parts.entries[index] = entry(key, *random_value(rng))
        elif action == "remove" and len(parts.entries) > 1:
            del parts.entries[index]
        elif action == "twice":
            parts.entries.append(parts.entries[index])
        elif action == "add":
            own = [found for part in parts.entries if (found := name_of(part)[0]).endswith(".block_count")]
            key = f"{own[0].removesuffix('.block_count') if own else 'llama'}.{rng.choice(ADDED_KEYS)}"
            parts.entries.append(entry(key, *random_value(rng)))
        else:
            parts.entries[index] = text(key + "_") + rest
        done.append(f"{action} {key}")
    files[name] = whole(*parts)
    return f"{name}: {'; '.join(done)}"


def edit_tokens(rng: random.Random, files: Files) -> str:
    """Makes a vocabulary's tokens, types, scores or merges inconsistent."""
    name = sorted(files)[0]
    parts = taken_apart(files[name])
    where = {
        key: index for index, part in enumerate(parts.entries) if (key := name_of(part)[0]).startswith("tokenizer.")
    }
    key = rng.choice(sorted(where))
    part = parts.entries[where[key]]
    other = parts.entries[where[rng.choice(sorted(where))]]
    parts.entries[where[key]] = text(key) + rng.choice(
        [
            name_of(other)[1],
            name_of(part)[1].replace(b"h", b"j"),
            struct.pack("<I", ARRAY) + struct.pack("<IQ", STRING, 1) + text("x"),
        ]
    )
    files[name] = whole(*parts)
    return f"{name}: {key} is something else"


def edit_tensors(rng: random.Random, files: Files) -> str:
    """Changes a tensor's name, shape, type or offset, removes or duplicates a tensor, or randomises its data."""
    name = mutate.pick_file(rng, files, ".gguf")
    parts = taken_apart(files[name])
    index = rng.randrange(len(parts.tensors))
    source, rest = name_of(parts.tensors[index])
    num_dimensions = struct.unpack_from("<I", rest)[0]
    *sizes, number, offset = struct.unpack_from(f"<{num_dimensions}QIQ", rest, 4)
    shape = tuple(sizes[::-1])
    what = rng.choice(["name", "shape", "type", "offset", "missing", "twice", "data", "data"])
    if what == "name":
        source = rng.choice([
            source + "x", "rope_freqs.weight", "rope_factors_long.weight", "output.weight", "blk.9.attn_q.weight",
            "blk.99999999999999999999.ffn_up.weight", "",
        ])  # fmt: skip
    elif what == "shape":
        shape = rng.choice([
            (), (0,), shape[::-1], shape[:-1], (*shape, 1), (2**40, 2**40), (2**63, 2), (1,) * 5,
            (shape[0] * 2, *shape[1:]),
        ])  # fmt: skip
    elif what == "type":
        number = rng.choice([0, 1, 2, 3, 8, 12, 14, 16, 28, 30, 39, 99, 2**31])
    elif what == "offset":
        offset = rng.choice([0, 1, offset + 32, 2**62, 2**64 - 32])
    elif what == "data":
        data = bytearray(parts.data)
        begin = rng.randrange(len(data))
        data[begin : begin + 1000] = rng.choice([rng.randbytes(1000), b"\xff" * 1000, b"\0" * 1000, b"\0\x7c" * 500])[
            : len(data) - begin
        ]
        parts = parts._replace(data=bytes(data))
    parts.tensors[index] = tensor(source, shape, number, offset)
    if what == "missing":
        del parts.tensors[index]
    elif what == "twice":
        parts.tensors.append(parts.tensors[index])
    files[name] = whole(*parts)
    return f"{name}: {what} of tensor {source}"


def swap_shards(rng: random.Random, files: Files) -> str:
    if len(files) < 2:
        return edit_metadata(rng, files)
    return mutate.swap_files(rng, files)


def another_file(rng: random.Random, files: Files) -> str:
    """Adds a second file next to the first, a model or something else."""
    name = rng.choice([
        "other.gguf", "model-00001-of-00002.gguf", "model-00003-of-00003.gguf", "config.json", "tokenizer.json",
        "model.safetensors",
    ])  # fmt: skip
    files[name] = rng.choice(
        [b"", b"GGUF", b"{}", files[sorted(files)[0]], Special("fifo"), Special("link", "/dev/zero")]
    )
    return f"{name} beside it"


MUTATIONS: list[tuple[Mutation, int]] = [
    (mutate.truncate, 3), (mutate.append_bytes, 1), (mutate.flip_bits, 3), (flip_header, 6), (mutate.splice, 3),
     (mutate.remove_file, 1),
    (mutate.replace_file, 2), (edit_metadata, 10), (edit_tokens, 5), (edit_tensors, 10), (swap_shards, 2),
     (another_file, 2),
]  # fmt: skip
"""Mutations and their weights in the draw."""
