"""Writes a known shape as a checkpoint with random weights: `config.json`, `model.safetensors` in bf16 and a
tokenizer."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from pace.bench import shapes
from pace.bench.shapes import SHAPES
from pace.checkpoints.safetensors_file import TensorInfo
from pace.checkpoints.safetensors_writer import SafetensorsWriter
from pace.llm.models.model_list import read_config
from pace.ops import reference

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NUM_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts")
"""Names of the config fields in different families."""
STD = 0.02
QUERY_KEY_STD = 0.04
"""Gives scores a standard deviation of about one, so that a wrong rotation or order of heads changes the logits of the
whole model."""
SCALES = {"gemma4_text": {"router.proj.weight": 50.0, "q_norm.weight": 0.25, "k_norm.weight": 0.25}}
"""model_type -> factors of tensors, by the ends of their names. Gemma 4 divides the router's input by the root of its
width, and does not divide scores of attention. With these factors, scores have a standard deviation of about one, as in
other families. Without them, rounding would choose other experts and other positions."""
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
CONVOLUTION_STD = 0.5
"""Keeps the scale of a channel over its few taps."""
PUBLISHED = {"lfm2": {"model.norm.": "model.embedding_norm."}, "lfm2_moe": {"model.norm.": "model.embedding_norm."}}
"""model_type -> the starts of pace's names that published checkpoints spell otherwise."""
STACKED = ("gemma4_text",)
"""model_types whose published checkpoints, and converters, have one tensor for all experts of a layer."""


def ensure_checkpoint(shape: str, folder: Path) -> Path:
    """Returns the directory of `shape`'s checkpoint below `folder`, and writes it the first time."""
    config = shape_config(shape)
    target = folder / "checkpoint"
    if not target.exists():
        partial = folder / "checkpoint.partial"
        partial.mkdir(parents=True, exist_ok=True)
        write_checkpoint(config, partial)
        partial.rename(target)
    return target


def shape_config(shape: str) -> dict[str, Any]:
    """Returns the config of a shape of `pace bench --list`. The name `SHAPE-4-layers` keeps only its first 4 layers,
    `SHAPE-8-experts` the first 8 experts of each layer; layers come first in a name with both. Raises ValueError for
    another name, and for fewer experts than a token chooses."""
    name, layers, experts = re.fullmatch(r"(.+?)(?:-(\d+)-layers?)?(?:-(\d+)-experts)?", shape).groups()
    if name not in SHAPES:
        raise ValueError(f"no shape is called {name!r}; there are {', '.join(SHAPES)} (pace bench --list)")
    config = shapes.shape_config(name, layers and int(layers))
    if experts is None:
        return config
    field, chosen = (
        next((field for field in fields if field in config), None) for fields in (NUM_EXPERTS, NUM_CHOSEN_EXPERTS)
    )
    if field is None or not config[chosen] <= int(experts) <= config[field]:
        has = f"{config[chosen]} to {config[field]}" if field else "no"
        raise ValueError(f"{name} has {has} experts; got {experts}")
    return config | {field: int(experts)}


def write_checkpoint(config: dict, folder: Path) -> None:
    """Writes `config` with random weights to `folder`, the same ones each time. Memory holds one tensor at a time.

    No token ends a text (`eos_token_id` is null), so that every runtime generates exactly the requested number of
    tokens."""
    config = config | {"bos_token_id": 0, "eos_token_id": None, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    model_class, parsed = read_config(config)
    generator = torch.Generator().manual_seed(0)
    targets = model_class(parsed, torch.float32, reference).targets()
    sizes = {name: tuple(target.shape) for name, [target, *_] in targets.items()}
    sizes = {_published(name, config["model_type"]): shape for name, shape in sizes.items()}
    if config["model_type"] in STACKED:
        sizes = _stacked(sizes)
    scales = SCALES.get(config["model_type"], {})
    infos = {name: TensorInfo(torch.bfloat16, shape) for name, shape in sizes.items()}
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)  # of an attempt that was interrupted
    with SafetensorsWriter(path, infos) as writer:
        for name, shape in sizes.items():
            factors = [factor for end, factor in scales.items() if name.endswith(end)]
            writer.write(name, random_tensor(name, shape, generator).mul_(math.prod(factors)))
    _write_tokenizer(config["vocab_size"], folder)


def _published(name: str, model_type: str) -> str:
    for ours, theirs in PUBLISHED.get(model_type, {}).items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _stacked(sizes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the same tensors with the experts of a layer stacked: `gate_up_proj`, of `[experts, 2 * intermediate,
    hidden]`, and `down_proj`, of `[experts, hidden, intermediate]`."""
    stacked: dict[str, tuple[int, ...]] = {}
    for name, (rows, *columns) in sizes.items():
        if expert := re.fullmatch(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name):
            prefix, number, kind = expert[1], int(expert[2]), expert[3]
            if kind == "down":
                stacked[f"{prefix}down_proj"] = (number + 1, rows, *columns)
            else:
                stacked[f"{prefix}gate_up_proj"] = (number + 1, 2 * rows, *columns)
        else:
            stacked[name] = (rows, *columns)
    return stacked


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A bf16 tensor of a checkpoint, with values of a trained scale."""
    numbers = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
    if "norm" in name or name.endswith(("scalar", "scale")):
        return numbers.mul_(0.1).add_(1.0)
    if len(shape) == 1:
        return numbers.mul_(0.1)
    if name.endswith(CONVOLUTIONS):
        return numbers.mul_(CONVOLUTION_STD)
    return numbers.mul_(QUERY_KEY_STD if "q_proj" in name or "k_proj" in name else STD)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Writes a tokenizer in which token i is the word "ti". Converters need one, measurements do not."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "bos_token": "t0",
        "eos_token": "t1",
        "pad_token": "t0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
