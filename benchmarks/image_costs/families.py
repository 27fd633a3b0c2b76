"""What checkpoints of each family have in addition to the config of a shape of `pace bench`."""

from __future__ import annotations

from typing import Any, ClassVar

Fields = dict[str, Any]
Size = tuple[int, int]
"""Width and height in pixels."""

TINY_TEXT: Fields = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
TINY_TOWER: Fields = {"hidden_size": 128, "intermediate_size": 256}
TINY_SIGLIP: Fields = {**TINY_TOWER, "num_hidden_layers": 2, "num_attention_heads": 2}


class Family:
    """Fields that a shape lacks, names of tensors, special tokens, and the settings of images."""

    text: ClassVar[Fields] = {}
    """Fields of `text_config`."""
    vision: ClassVar[Fields] = {}
    """Fields of `vision_config`."""
    tiny_text: ClassVar[Fields] = TINY_TEXT
    """Fields of a tiny shape, which replace those of the shape."""
    tiny_vision: ClassVar[Fields] = TINY_SIGLIP
    names: ClassVar[dict[str, str]]
    """Beginning of a tensor's name in pace -> in the checkpoint."""
    tokens: ClassVar[tuple[str, ...]]
    """Special tokens. The first stands for a row of an image."""
    ids: ClassVar[dict[str, str]]
    """Field of config.json -> the special token whose id it has."""
    text_options: ClassVar[tuple[str, ...]] = ()
    """Options of llama.cpp's converter for the text model."""
    around: ClassVar[str] = ""
    """Text that pace puts before and after an image, and llama.cpp does not."""

    @classmethod
    def whole(cls, vision: Fields) -> Fields:
        """Further fields of config.json."""
        return {}

    @classmethod
    def processor(cls, vision: Fields) -> Fields:
        """The preprocessor_config.json for a `vision_config`."""
        raise NotImplementedError

    @classmethod
    def sizes(cls, vision: Fields) -> tuple[Size, ...]:
        """Sizes that need no resizing, from few to many tokens."""
        raise NotImplementedError


class Qwen3VL(Family):
    """300, 1,024 and 1,280 tokens. The last is the most that `pace serve` allows by default."""

    text = {
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    }
    vision = {"model_type": "qwen3_vl"}
    tiny_vision = {
        **TINY_TOWER, "depth": 6, "num_heads": 2, "out_hidden_size": 256, "deepstack_visual_indexes": [1, 2, 3],
    }  # fmt: skip
    names = {"visual.": "model.visual.", "model.": "model.language_model."}
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>")
    ids = {
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    }  # fmt: skip

    @classmethod
    def processor(cls, vision: Fields) -> Fields:
        sides = {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
        areas = {"shortest_edge": 65536, "longest_edge": 16777216}
        return {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, "size": areas, **sides}

    @classmethod
    def sizes(cls, vision: Fields) -> tuple[Size, ...]:
        return (640, 480), (1024, 1024), (1280, 1024)


class Qwen35(Qwen3VL):
    text = {"model_type": "qwen3_5_text"}
    vision = {"model_type": "qwen3_5"}
    tokens = (*Qwen3VL.tokens, "<|endoftext|>")
    text_options = ("--no-mtp",)
    tiny_text = TINY_TEXT | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    tiny_vision = {**TINY_TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 256}


class Gemma3(Family):
    """An image is a square of one size, of 256 tokens for the published tower."""

    text = {"model_type": "gemma3_text"}
    vision = {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
    tiny_text = TINY_TEXT | {"num_hidden_layers": 6}
    tiny_vision = TINY_SIGLIP | {"image_size": 224}
    names = {
        "vision_tower.projector.": "multi_modal_projector.", "vision_tower.": "vision_tower.vision_model.",
        "model.": "language_model.model.",
    }  # fmt: skip
    tokens = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    ids = {
        "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    }  # fmt: skip
    around = "\n\n"
    pool = 4
    """Side of the square of patches that becomes one token."""

    @classmethod
    def whole(cls, vision: Fields) -> Fields:
        return {"mm_tokens_per_image": (vision["image_size"] // vision["patch_size"] // cls.pool) ** 2}

    @classmethod
    def processor(cls, vision: Fields) -> Fields:
        side, num_tokens = vision["image_size"], cls.whole(vision)["mm_tokens_per_image"]
        size = {"height": side, "width": side}
        return {"image_processor_type": "Gemma3ImageProcessor", "size": size, "image_seq_length": num_tokens}

    @classmethod
    def sizes(cls, vision: Fields) -> tuple[Size, ...]:
        return ((vision["image_size"], vision["image_size"]),)


class SmolVLM(Family):
    """An image is 4 tiles wide, and has 1, 3 or 4 rows of them: 320, 832 and 1,088 tokens for the published tower."""

    text = {"model_type": "llama", "architectures": ["VLlama3ForCausalLM"]}
    vision = {
        "model_type": "smolvlm_vision", "intermediate_size": 3072, "num_hidden_layers": 12, "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    tiny_vision = TINY_SIGLIP | {"image_size": 128}
    names = {
        "vision_tower.connector.": "model.connector.", "vision_tower.": "model.vision_model.",
        "model.": "model.text_model.",
    }  # fmt: skip
    tokens = (
        *("<image>", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )
    ids = {"image_token_id": "<image>"}

    @classmethod
    def processor(cls, vision: Fields) -> Fields:
        tile = {"longest_edge": vision["image_size"]}
        return {
            "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, "do_pad": True, "resample": 1,
            "size": {"longest_edge": 4 * vision["image_size"]}, "max_image_size": tile,
        }  # fmt: skip

    @classmethod
    def sizes(cls, vision: Fields) -> tuple[Size, ...]:
        tile = vision["image_size"]
        return (4 * tile, tile), (4 * tile, 3 * tile), (4 * tile, 4 * tile)


FAMILIES: dict[str, type[Family]] = {
    "gemma3": Gemma3, "qwen3_5": Qwen35, "qwen3_vl": Qwen3VL, "smolvlm": SmolVLM,
}  # fmt: skip
"""Families by the model_type of a shape."""
