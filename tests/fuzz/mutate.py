"""Mutations with which a fuzz case damages a checkpoint.

A mutation is a function `(rng, files) -> description` that changes the dictionary of files in place; the same seed
gives the same case.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import torch

from tests.fuzz.checkpoints import WEIGHTS, Files, Special, dump, load_state
from tests.fuzz.hostile_pickles import hostile_pickle

Mutation = Callable[[random.Random, Files], str]


# ------------------------------------------------------------------------------------------------------- choosing what
# to hit


def pick_file(rng: random.Random, files: Files, *endings: str) -> str:
    names = sorted(name for name, content in files.items() if name.endswith(endings) and isinstance(content, bytes))
    return rng.choice(names)


def pick_json(rng: random.Random, files: Files) -> str:
    """Picks a JSON file; the config and the index more often than the others."""
    names = [name for name in files if name.endswith(".json")]
    weight = {"tokenizer.json": 1, "tokenizer_config.json": 1, "generation_config.json": 2}
    return rng.choices(names, [weight.get(name, 5) for name in names])[0]


def json_paths(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside a JSON value, except itself."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in children for found in [(*path, key), *json_paths(child, (*path, key))]]


ABSURD = [
    None, True, False, 0, 1, 2, -1, 3, 7, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**64, 10**12, 10**30, -(10**12), 0.0,
    0.5, -0.5, 1e-300,
    1e300, "", "x", "../../etc/passwd", "/dev/zero", "\0", "é" * 500, [], {}, [[]], [1] * 2000, [None], {"a": {"b": 1}},
    [[[[1]]]], "float64", "none", "relu6", "12", ["LlamaForCausalLM"], "LlamaForCausalLM", {"rope_type": "yarn"},
     {"type": "su"},
]  # fmt: skip


def replace_at(value: object, path: tuple, change: Callable[[dict | list, object], None]) -> None:
    for key in path[:-1]:
        value = value[key]
    change(value, path[-1])


# -------------------------------------------------------------------------------------------------------------
# mutations


def truncate(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    length = rng.choice([0, 1, 7, 8, rng.randrange(len(files[name])), len(files[name]) - 1])
    files[name] = files[name][:length]
    return f"{name} cut to {length} bytes"


def append_bytes(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    files[name] += rng.randbytes(rng.choice([1, 8, 1000]))
    return f"{name} with bytes appended"


def flip_bits(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    data = bytearray(files[name])
    # Mostly near the start, where the headers are, or the end, where a zip archive keeps its directory.
    where = rng.choice([256, 4096, len(data)])
    count = rng.choice([1, 1, 2, 8])
    for _ in range(count):
        position = rng.randrange(min(where, len(data)))
        data[-1 - position if rng.random() < 0.3 else position] ^= 1 << rng.randrange(8)
    files[name] = bytes(data)
    return f"{name} with {count} bits flipped in {where} bytes"


def flip_header_bits(rng: random.Random, files: Files) -> str:
    """Flips bits in the part that describes the tensors."""
    name = pick_file(rng, files, *WEIGHTS, ".index.json")
    data = bytearray(files[name])
    end = len(data)
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(data[:8], "little")
    elif name.endswith(".bin"):
        end = data.find(b"PK\x07\x08") if data.startswith(b"PK") else 3000
    position = rng.randrange(max(1, min(end, len(data))))
    data[position] ^= 1 << rng.randrange(8)
    files[name] = bytes(data)
    return f"{name} with a bit flipped at {position} of its header"


def splice(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    data = bytearray(files[name])
    start, length = rng.randrange(len(data)), rng.choice([1, 2, 8, 100])
    new = rng.choice([b"", rng.randbytes(length), b"\0" * length, b"[" * 100_000, bytes(data[:length])])
    data[start : start + length] = new
    files[name] = bytes(data)
    return f"{name} with {length} bytes at {start} replaced by {len(new)}"


def remove_file(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    del files[name]
    return f"without {name}"


def replace_file(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    choices = [
        Special("directory"), Special("fifo"), Special("link", "/dev/zero"), Special("link", "/proc/self/mem"),
        Special("link", "nowhere"), Special("link", name),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"<!DOCTYPE html><html><body>503</body></html>", b"[" * 200_000, b"[]", b"null", b"{}", b'{"a": ' * 5000,
        b"1" * 10_000, b'{"a": NaN}', b'{"vocab_size": 1e999}', b"\xff\xfe\x00", rng.randbytes(1000),
        files[rng.choice(sorted(files))],
    ]  # fmt: skip
    files[name] = rng.choice(choices)
    shown = files[name] if isinstance(files[name], Special) else files[name][:20]
    return f"{name} replaced by {shown!r}"


def edit_json(rng: random.Random, files: Files) -> str:
    """Sets, removes, renames or duplicates values at random paths of a JSON file."""
    name = pick_json(rng, files)
    value = json.loads(files[name])
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        path = rng.choice(json_paths(value) or [()])
        if not path:
            break
        action = rng.choice(["set", "set", "set", "remove", "rename"])
        new = rng.choice(ABSURD)
        if action == "set":
            replace_at(value, path, lambda parent, key, new=new: parent.__setitem__(key, new))
        elif action == "remove" or not isinstance(path[-1], str):
            replace_at(value, path, lambda parent, key: parent.pop(key))
        else:
            replace_at(value, path, lambda parent, key: parent.__setitem__(key + "_", parent.pop(key)))
        done.append(f"{action} {path} {str(new)[:40]!r}")
    files[name] = json.dumps(value).encode()
    return f"{name}: {'; '.join(done)}"


def edit_config(rng: random.Random, files: Files) -> str:
    """Sets a size or another field of config.json to an absurd value, or adds a field that pace must not ignore."""
    config = json.loads(files["config.json"])
    extra = [
        "quantization_config", "rope_scaling", "head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok",
        "norm_topk_prob", "scoring_func", "topk_method", "n_group", "moe_layer_freq", "kv_lora_rank", "layer_types",
        "auto_map",
    ]  # fmt: skip
    field, value = rng.choice(sorted(config) + extra), rng.choice(ABSURD)
    config[field] = value
    files["config.json"] = json.dumps(config).encode()
    return f"config.json: {field} = {str(value)[:40]!r}"


def edit_header(rng: random.Random, files: Files) -> str:
    """Changes the JSON header of a safetensors file, which stays well-formed JSON of the announced length."""
    candidates = [name for name in files if name.endswith(".safetensors")]
    if not candidates:
        return edit_state(rng, files)
    name = rng.choice(candidates)
    data = files[name]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = [key for key in header if key != "__metadata__"]
    a, b = rng.sample(tensors, 2)
    what = rng.choice(
        ["dtype", "shape", "offsets", "swap", "rename", "absurd", "duplicate", "length", "overlap", "pad"]
    )
    if what == "dtype":
        header[a]["dtype"] = rng.choice(["F64", "F16", "I8", "F8_E4M3", "F4", "BOOL", "X", None, 3])
    elif what == "shape":
        header[a]["shape"] = rng.choice(
            [[], [0], header[a]["shape"][::-1], [2**40, 2**40], [-1, -4], [2**63], "x", [1.0]]
        )
    elif what == "offsets":
        begin, end = header[a]["data_offsets"]
        header[a]["data_offsets"] = rng.choice(
            [[end, begin], [begin + 1, end + 1], [0, 2**62], [-4, end], [begin], [begin, end, 0], None]
        )
    elif what == "swap":
        header[a], header[b] = header[b], header[a]
    elif what == "rename":
        header[a + rng.choice(["x", ".weight", "\0"])] = header.pop(a)
    elif what == "absurd":
        header[a][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(ABSURD)
    elif what == "overlap":
        header[a]["data_offsets"] = header[b]["data_offsets"]
    text = json.dumps(header)
    if what == "duplicate":
        text = text[:-1] + f", {json.dumps(a)}: {json.dumps(header[b])}}}"
    if what == "pad":  # harmless, but makes the data unaligned
        text += " " * rng.choice([1, 2, 3])
    size = rng.choice([0, 2**63, 2**40, len(text) + 1, 10**8]) if what == "length" else len(text)
    files[name] = size.to_bytes(8, "little") + text.encode() + data[8 + length :]
    return f"{name}: header {what} of {a}"


def edit_index(rng: random.Random, files: Files) -> str:
    indexes = [name for name in files if name.endswith(".index.json")]
    if not indexes:
        return edit_config(rng, files)
    index = json.loads(files[indexes[0]])
    weight_map = index["weight_map"]
    name, shard = rng.choice(sorted(weight_map.items()))
    other = next(value for value in weight_map.values() if value != shard)
    outside = [
        "../" + shard, "/dev/zero", "/etc/passwd", "", ".", "..", "config.json", "missing.safetensors", "a/b",
        "x" * 5000, "\0", None, 3, [shard],
    ]  # fmt: skip
    what = rng.choice(["outside", "outside", "wrong shard", "drop", "extra", "all", "weight_map"])
    if what == "outside":
        weight_map[name] = rng.choice(outside)
    elif what == "wrong shard":
        weight_map[name] = other
    elif what == "drop":
        del weight_map[name]
    elif what == "extra":
        weight_map[name + "x"] = shard
    elif what == "all":
        index["weight_map"] = dict.fromkeys(weight_map, rng.choice(outside))
    else:
        index["weight_map"] = rng.choice(ABSURD)
    files[indexes[0]] = json.dumps(index).encode()
    return f"{indexes[0]}: {what} at {name}"


def swap_files(rng: random.Random, files: Files) -> str:
    """Swaps two files: shards, or a shard and another file."""
    a, b = rng.sample(sorted(files), 2)
    shards = sorted(name for name in files if "-of-" in name)
    if shards and rng.random() < 0.7:
        a, b = shards[0], shards[1]
    if rng.random() < 0.5:
        files[a], files[b] = files[b], files[a]
        return f"{a} and {b} swapped"
    files[a] = files[b]
    return f"{a} overwritten by {b}"


def edit_state(rng: random.Random, files: Files) -> str:
    """Saves the weights again with one tensor missing, added, or with another shape, dtype or kind."""
    name = pick_file(rng, files, *WEIGHTS)
    kind, state = load_state(name, files[name])
    key = rng.choice(sorted(name for name in state if state[name].ndim))
    tensor = state[key]
    floats = tensor.float()  # quantised tensors have integer or narrow float types
    values = {
        "shape": lambda: tensor.reshape(-1)[:-1].clone(), "flat": lambda: tensor.reshape(-1),
        "transposed": lambda: tensor.transpose(0, -1).contiguous(), "extra dimension": lambda: tensor[None],
        "float16": lambda: tensor.half(), "bfloat16": lambda: tensor.bfloat16(), "float64": lambda: tensor.double(),
        "int8": lambda: tensor.to(torch.int8), "bool": lambda: floats > 0,
        "float8": lambda: tensor.to(torch.float8_e4m3fn), "nan": lambda: torch.full_like(floats, torch.nan),
        "infinite": lambda: torch.full_like(floats, torch.inf), "huge": lambda: torch.full_like(floats, 1e30),
        "empty": lambda: tensor[:0],
    }  # fmt: skip
    if kind != "safetensors":
        values |= {
            "not contiguous": lambda: tensor.transpose(0, -1).contiguous().transpose(0, -1),
            "expanded": lambda: torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape),
            "expanded to 2**40": lambda: torch.zeros(1).expand(2**20, 2**20),
            "sparse": lambda: tensor.to_sparse(),
            "meta": lambda: tensor.to("meta"),
            "parameter": lambda: torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
            "list": lambda: [1.0, 2.0],
            "dictionary": lambda: {"weight": tensor},
            "string": lambda: "x",
            "complex": lambda: tensor.to(torch.complex64),
            "quantised": lambda: torch.quantize_per_tensor(floats.float(), 0.1, 0, torch.qint8),
        }
    what = rng.choice([*values, "missing", "added", "renamed"])
    if what == "missing":
        del state[key]
    elif what == "added":
        state[rng.choice(["x", "lm_head.weight", "model.layers.7.mlp.up_proj.weight", ""])] = torch.zeros(3)
    elif what == "renamed":
        state[key + "x"] = state.pop(key)
    else:
        state[key] = values[what]()
    files[name] = dump(kind, state)
    return f"{name}: {key} is {what}"


def edit_quantization(rng: random.Random, files: Files) -> str:
    """Changes the config or tensors of a quantised checkpoint: another method, size or value."""
    config = json.loads(files["config.json"])
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return edit_config(rng, files)
    if rng.random() < 0.4:
        path = rng.choice(json_paths(quantization))
        new = rng.choice([
            *ABSURD, 2, 3, 4, 8, 16, 32, 64, 24, -1, "gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8",
            "mxfp4", "gemv", "gptq_v2", [32, 32], [1, 1],
        ])  # fmt: skip
        replace_at(quantization, path, lambda parent, key: parent.__setitem__(key, new))
        files["config.json"] = json.dumps(config).encode()
        return f"quantization_config {path} = {str(new)[:40]!r}"
    name = pick_file(rng, files, *WEIGHTS)
    kind, state = load_state(name, files[name])
    names = sorted(key for key in state if "proj" in key or "quant" in key)
    if not names:
        return edit_state(rng, files)
    key = rng.choice(names)
    tensor = state[key].clone()
    new_shapes = [
        lambda t: t[:-1],
        lambda t: t[..., :-1],
        lambda t: t.t() if t.ndim == 2 else t[None],
        lambda t: t.flatten(),
        lambda t: t[:0],
        lambda t: torch.cat([t, t]),
    ]
    if tensor.ndim == 0:
        new_shapes = [lambda t: t[None], lambda t: t.expand(3).clone()]
    values = [0, 1, -1, 2, 127, -128, 2**31 - 1, -(2**31), 1e30, -1e30, 1e-40, torch.nan, torch.inf]
    what = rng.choice(["shape", "value", "value", "all", "bytes", "missing", "duplicate", "type"])
    if what == "shape":
        tensor = rng.choice(new_shapes)(tensor).contiguous()
    elif what in ("value", "all"):
        value = rng.choice(values)
        if not tensor.is_floating_point():
            limits = torch.iinfo(tensor.dtype)
            value = rng.choice([limits.min, limits.max, 0, 1, 2, 3])
        (tensor.view(-1)[:1] if what == "value" else tensor).copy_(torch.tensor(value))
    elif what == "bytes":
        octets = tensor.flatten().view(torch.uint8)
        octets.copy_(torch.tensor([rng.randrange(256) for _ in range(len(octets))], dtype=torch.uint8))
    elif what == "type":
        tensor = tensor.to(rng.choice([
            torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn,
            torch.bool,
        ]))  # fmt: skip
    if what == "missing":
        del state[key]
    else:
        state[key + "x" if what == "duplicate" else key] = tensor
    files[name] = dump(kind, state)
    return f"{name}: {key}: {what}"


MUTATIONS: list[tuple[Mutation, int]] = [
    (truncate, 4), (append_bytes, 1), (flip_bits, 5), (flip_header_bits, 8), (splice, 4), (remove_file, 2),
     (replace_file, 5),
    (edit_json, 6), (edit_config, 8), (edit_header, 8), (edit_index, 5), (swap_files, 2), (edit_state, 8),
     (hostile_pickle, 3),
    (edit_quantization, 20),
]  # fmt: skip
"""Mutations and their weights in the draw."""


def make_case(seed: int, checkpoints: dict[str, Files]) -> tuple[Files, str]:
    """The files of case `seed`, and a description of the mutation."""
    rng = random.Random(seed)
    base = sorted(checkpoints)[seed % len(checkpoints)]
    files = dict(checkpoints[base])
    mutations = MUTATIONS
    if base.startswith("gguf"):
        from tests.fuzz.gguf_cases import MUTATIONS as mutations
    mutation = rng.choices([m for m, _ in mutations], [weight for _, weight in mutations])[0]
    return files, f"{base}: {mutation.__name__}: {mutation(rng, files)}"
