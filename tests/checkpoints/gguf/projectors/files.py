"""mmproj files of tiny checkpoints, like those of llama.cpp's converter. Keys, names and changes of values are those of
its conversion/ folder, and names of tensors come from the gguf package. LLaVA's files are like those of its first
converter, tools/mtmd/legacy-models/convert_image_encoder_to_gguf.py.

For a checkpoint of each family, the converters of llama-cpp-python 0.3.36 wrote the same tensors and keys. This was
checked by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.comparison.gguf_families import permute
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.gguf.file import GgufFile
from tests.checkpoints.gguf.dense.dense_files import write_dense
from tests.checkpoints.gguf.files import add_stored, finish, write_gguf
from tests.checkpoints.gguf.gemma4.gemma4_files import write_gemma4
from tests.checkpoints.gguf.hybrids.hybrid_files import write_hybrid
from tests.checkpoints.gguf.projectors.checkpoints import IMAGE, SOUND, save_text, save_whole
from tests.editing import edit_tensors

Fields = dict[str, Any]
Change = Callable[[gguf.GGUFWriter], object]
STATISTICS = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
WRITERS = {
    "ministral3": write_dense,
    "lfm2": write_hybrid,
    "gemma4_text": write_gemma4,
    "gemma4_unified_text": write_gemma4,
}
"""Writers of text parts, by model_type."""
ENDS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


class Family(NamedTuple):
    """How the converter treats a family."""

    projector: str
    token: str
    """The placeholder."""
    prefixes: dict[str, str]
    """Pattern of the beginning of a name -> what the gguf package knows."""
    keys: Callable[[Fields], Fields]
    """Further keys of a config.json, without "clip."."""
    change: Callable[[str, Tensor, Fields], tuple[str, Tensor]] = lambda name, tensor, vision: (name, tensor)
    halves: str = "-"
    """Pattern of names in the file that are F16 in a file of F32."""
    known: dict[str, str] = {}
    """Names that the gguf package lacks."""


# -- families ----------------------------------------------------------------------------------------------------------


def of_gemma3(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    return name.replace("_weight", ".weight"), tensor + 1 if "soft_emb_norm" in name else tensor


def gemma3_keys(config: Fields) -> Fields:
    patches = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
    pooled = patches // int(config["mm_tokens_per_image"] ** 0.5)
    return {"use_gelu": True, **({"vision.projector.scale_factor": pooled} if pooled != 4 else {})}


def of_pixtral(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    is_rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
    return name, permute(tensor, vision["num_attention_heads"]) if is_rotated else tensor


def pixtral_keys(config: Fields) -> Fields:
    merge = {"vision.spatial_merge_size": config["spatial_merge_size"]} if "spatial_merge_size" in config else {}
    activation = {f"use_{config['vision_config']['hidden_act']}": True}
    return {**activation, **merge, "vision.attention.layer_norm_epsilon": 1e-5}


def of_internvl(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    for part, number in {"layer_norm": 0, "linear_1": 1, "linear_2": 3}.items():
        name = name.replace(f"model.multi_modal_projector.{part}", f"mlp1.{number}")
    return name + ".weight" if re.search(r"\.lambda_|position_embedding", name) else name, tensor


def of_lfm2(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    side = vision["patch_size"]
    is_patch = "patch_embedding.weight" in name
    return name, tensor.view(-1, side, side, 3).permute(0, 3, 1, 2) if is_patch else tensor


def of_gemma4(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    tensor = tensor if tensor.ndim else tensor[None]
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("input_proj.weight"):
        side = vision["patch_size"]
        tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2)
    return name, tensor


def of_unified(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    side = vision["patch_size"] * vision["pooling_kernel_size"]
    name = re.sub(r"^model\.embed_vision\.(patch_|pos_)", r"model.vision_embedder.\1", name)
    name = name.replace("multimodal_embedder.", "")
    if name.endswith("pos_embedding"):
        return f"{name}.weight", tensor.transpose(0, 1)
    if "patch_dense.weight" in name or "patch_ln1" in name:
        tensor = tensor.unflatten(-1, (side, side, 3)).movedim(-1, -3).flatten(-3)
    return name.replace(".pos_norm.", ".patch_ln3."), tensor


def of_llava(name: str, tensor: Tensor, vision: Fields) -> tuple[str, Tensor]:
    """Names of the first converter, which exchanged the matrices of MLPs."""
    names = {
        "vision_tower.vision_model": "v", "multi_modal_projector": "mm", "linear_1": "0", "linear_2": "2",
        "encoder.layers": "blk", "embeddings.": "", "_proj": "", "self_attn.": "attn_", "layer_norm": "ln",
        "layernorm": "ln", "mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up", "embedding": "embd", "layrnorm": "ln",
    }  # fmt: skip
    for old, new in names.items():
        name = name.replace(old, new)
    return name, tensor


SIGLIP = {r"(model\.)?vision_tower\.(vision_model\.)?": "vision_tower.vision_model."}
PROJECTOR = {r"(model\.)?multi_modal_projector\.": "multi_modal_projector."}
GELU = {"use_gelu": True}
FAMILIES = {
    "gemma3": Family(
        "gemma3", "<image_soft_token>", SIGLIP | PROJECTOR, gemma3_keys, of_gemma3, halves=r"mm\.input_projection",
    ),
    "gemma4": Family(
        "gemma4v", "<|image|>", {r"model\.(vision_tower|embed_vision)\.": r"model.\1."}, lambda config: {}, of_gemma4,
    ),
    "gemma4_unified": Family(
        "gemma4uv", "<|image|>", {r"model\.(vision_embedder|embed_vision)\.": r"model.\1."}, lambda config: {},
        of_unified,
        known={
            **{f"model.vision_embedder.patch_ln{number}": f"v.patch_norm.{number}" for number in (1, 2, 3)},
            "model.vision_embedder.patch_dense": "v.patch_embd",
            "model.vision_embedder.pos_embedding": "v.position_embd",
        },
    ),
    "idefics3": Family(
        "idefics3", "<image>", {r"model\.(vision_model|connector)\.": r"model.\1."},
        lambda config: GELU | {"vision.projector.scale_factor": config["scale_factor"],
                               "vision.preproc_image_size": 96},
    ),
    "internvl": Family(
        "internvl", "<IMG_CONTEXT>", {r"(model\.)?(vision_tower|multi_modal_projector)\.": r"model.\2."},
        lambda config: GELU | {"vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
                               "vision.preproc_min_tiles": 1, "vision.preproc_max_tiles": 6},
        of_internvl,
    ),
    "lfm2_vl": Family(
        "lfm2", "<image>", SIGLIP | PROJECTOR,
        lambda config: GELU | {"vision.projector.scale_factor": config["downsample_factor"], "vision.image_size": 256},
        of_lfm2,
    ),
    "llava": Family(
        "mlp", "<image>", SIGLIP | PROJECTOR, lambda config: {"use_gelu": False, "has_llava_projector": True}, of_llava,
        halves=r"v\.patch_embd|mm\..*weight",
    ),
    "mistral3": Family(
        "pixtral", "[IMG]", {r"(model\.)?vision_tower\.": "vision_tower."} | PROJECTOR, pixtral_keys, of_pixtral,
    ),
    "paddleocr_vl": Family(
        "paddleocr", "<|IMAGE_PLACEHOLDER|>",
        {r"(model\.)?visual\.": "model.", r"(model\.projector|mlp_AR)\.": "mlp_AR."},
        lambda config: GELU | {"vision.image_min_pixels": 64, "vision.image_max_pixels": 4096, "vision.image_size": 64},
    ),
}  # fmt: skip
FAMILIES |= dict.fromkeys(("ministral3", "pixtral"), FAMILIES["mistral3"])
FLOATS = r"patch_embd|a\.conv1d|a\.input_projection|conv_dw"
"""Pattern of matrices that are F32 in files of any type."""
SKIPPED = r"\.head\.|packing_position|position_ids"
"""Pattern of tensors that no file has."""


# -- files -------------------------------------------------------------------------------------------------------------


def save_pair(
    folder: Path,
    family: str,
    types: str = "F32",
    add: Change = lambda writer: None,
    placeholder: str | None = None,
    **fields: Any,
) -> tuple[Path, Path, Path]:
    """Saves a tiny checkpoint. Returns it, its GGUF file in float32, and its mmproj file with matrices of `types`.
    `add` may change the mmproj file, and `fields` are merged into those of config.json. `placeholder`: the text of the
    token that is the family's."""
    hub, text, model, mmproj = (folder / name for name in ("hub", "text", "model.gguf", "mmproj-model.gguf"))
    save_whole(hub, family, **fields)
    round_halves(hub, family)
    config = save_text(hub, text)
    write = WRITERS.get(config["model_type"], write_gguf)
    marks = {IMAGE: placeholder or FAMILIES[family].token, SOUND: "<|audio|>"}
    write(text, model, add=lambda writer: add_vocabulary(writer, marks))
    write_mmproj(hub, mmproj, family, types, add)
    return hub, model, mmproj


def round_halves(hub: Path, family: str) -> None:
    """Rounds the tensors of a checkpoint to float16 that mmproj files of every type have in it."""
    config = json.loads((hub / "config.json").read_text())
    with edit_tensors(hub) as state:
        for name, source, _ in tower_tensors(state, FAMILIES[family], config):
            if re.match(FAMILIES[family].halves, name):
                state[source] = state[source].half().float()


def add_vocabulary(writer: gguf.GGUFWriter, marks: dict[int, str]) -> None:
    """Adds a vocabulary of letters and signs, and of special tokens. `marks`: names of some of these, by id."""
    tokens = [marks.get(index, chr(33 + index) if index < 90 else f"<|{index}|>") for index in range(98)] + ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([control if index >= 90 and token != "ab" else normal for index, token in enumerate(tokens)])
    writer.add_token_merges(["a b"])


def write_mmproj(hub: Path, path: Path, family: str, types: str = "F32", add: Change = lambda writer: None) -> None:
    """Writes the tower of a checkpoint. `add` may change the file."""
    config = json.loads((hub / "config.json").read_text())
    made, vision = FAMILIES[family], config["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    is_mixed = made.projector.startswith("gemma4")
    writer.add_string(f"clip.{'vision.' if is_mixed else ''}projector_type", made.projector)
    side = vision.get("image_size", 224)
    depth = depth_of(config, made)
    keys = {
        "has_vision_encoder": True,
        "vision.projection_dim": 768 if made.projector == "mlp" else config["text_config"]["hidden_size"],
        "vision.image_size": side[0] if isinstance(side, list) else side,
        "vision.patch_size": vision["patch_size"][0]
        if isinstance(vision["patch_size"], list)
        else vision["patch_size"],
        "vision.embedding_length": vision.get("hidden_size", vision.get("mm_embed_dim")),
        "vision.feed_forward_length": vision.get("intermediate_size", 0),
        "vision.block_count": depth,
        "vision.attention.head_count": vision.get("num_attention_heads", 0),
        "vision.image_mean": STATISTICS[0],
        "vision.image_std": STATISTICS[1],
        "vision.attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-6)),
        **made.keys(config),
    }
    add_value = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in keys.items():
        add_value[type(value)](f"clip.{key}", value)
    state = load_file(hub / "model.safetensors")
    tensors = [(name, tensor) for name, _, tensor in tower_tensors(state, made, config)]
    if config.get("audio_config"):
        writer.add_bool("clip.has_audio_encoder", True)
        writer.add_string("clip.audio.projector_type", made.projector.replace("v", "a"))
        for key, value in sound_keys(config).items():
            add_value[type(value)](f"clip.audio.{key}", value)
        tensors += sound_tensors(state)
    for name, tensor in tensors:
        is_matrix = tensor.ndim >= 2 and not re.search("position_embd|patch_norm|class_embd", name)
        forced = "F16" if re.match(made.halves, name) else "F32" if re.search(FLOATS, name) else types
        add_fitting(writer, name, tensor, forced if is_matrix else "F32")
    add(writer)
    finish(writer)


def add_fitting(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """Adds a tensor in a type of ggml; as F16 if its rows are not whole blocks of Q8_0."""
    add_stored(writer, name, tensor, "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind)


def check_damaged_bytes(path: Path, mmproj: Path) -> None:
    """Random changes to the header of an mmproj file give one clear error, or towers whose tensors can be read."""
    content, damaged = mmproj.read_bytes(), mmproj.with_name("damaged.gguf")
    end = min(tensor.begin for tensor in GgufFile(mmproj).tensors.values())
    chance, failed = np.random.default_rng(0), 0
    for _ in range(60):
        data = bytearray(content)
        for at in chance.integers(4, end, 3):
            data[at] = chance.integers(256)
        damaged.write_bytes(data)
        try:
            with GgufCheckpoint(path) as reader:
                reader.add_towers(damaged)
                for name in reader.towers.tensors:
                    reader.read(name)
        except (ValueError, NotImplementedError) as error:
            assert "damaged.gguf" in str(error), error
            failed += 1
    assert failed > 20


def depth_of(config: Fields, made: Family) -> int:
    depth = config["vision_config"].get("num_hidden_layers", 0)
    return depth + 1 + config["vision_feature_layer"] if made.projector == "mlp" else depth


def tower_tensors(state: dict[str, Tensor], made: Family, config: Fields) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the name in the file, the name in the checkpoint, and the tensor."""
    depth = depth_of(config, made)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(4, depth))
    for source, tensor in state.items():
        prefix = next((prefix for prefix in made.prefixes if re.match(prefix, source)), None)
        if prefix is None or re.search(SKIPPED, source):
            continue
        name, tensor = made.change(re.sub(f"^{prefix}", made.prefixes[prefix], source), tensor, config["vision_config"])
        if made.projector == "mlp":
            layer = re.match(r"v\.blk\.(\d+)\.", name)
            if not name.startswith("v.post_ln") and not (layer and int(layer[1]) >= depth):
                yield name, source, tensor
            continue
        stem, end = next(((name.removesuffix(end), end) for end in ENDS if name.endswith(end)), (name, ""))
        found = made.known.get(stem) or known.get_name(stem)
        assert found is not None, name
        yield found + end, source, tensor


def sound_keys(config: Fields) -> Fields:
    """Keys of a tower of Gemma 4 for sound, without "clip.audio."."""
    audio = config["audio_config"]
    hidden = audio.get("audio_embed_dim", audio.get("hidden_size"))
    return {
        "projection_dim": config["text_config"]["hidden_size"],
        "embedding_length": hidden,
        "feed_forward_length": 0 if "audio_embed_dim" in audio else 4 * hidden,
        "block_count": audio.get("num_hidden_layers", 0),
        "attention.head_count": audio.get("num_attention_heads", 0),
        "num_mel_bins": audio.get("subsampling_conv_channels", [128])[0],  # both are 128 in published checkpoints
        "attention.layer_norm_epsilon": 1e-6,
    }


def sound_tensors(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and the tensors of a file."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)
    for name, tensor in state.items():
        name = name.replace("embed_audio.multimodal_embedder.", "embed_audio.")
        if not name.startswith(("model.audio_tower.", "model.embed_audio.")):
            continue
        name, tensor = name.replace("model.audio_tower.", "conformer."), tensor if tensor.ndim else tensor[None]
        name = name.replace(".linear.", ".")
        if name.endswith("per_dim_scale"):
            name, tensor = f"{name}.weight", softplus(tensor)
        if "depthwise_conv1d" in name:
            tensor = tensor[:, 0]
        stem, end = next((name.removesuffix(end), end) for end in ENDS if name.endswith(end))
        found = known.get_name(stem)
        assert found is not None, name
        yield found + end, tensor
