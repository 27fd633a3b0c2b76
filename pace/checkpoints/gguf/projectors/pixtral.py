"""The tower of Pixtral and Mistral 3. Mistral 3 joins neighbouring rows before it projects them."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.projector import BLOCKS, Projector, Tower, TowerFile, Whole

BREAK = "v.token_embd.img_break"
"""A row of the text's embedding."""
NAMES = TensorNames(
    {
        "v.patch_embd": "vision_tower.patch_conv",
        "v.pre_ln": "vision_tower.ln_pre",
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    "vision_tower.transformer.layers",
    {
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    BLOCKS,
)
PERMUTED = (".attn_q.weight", ".attn_k.weight")
LLAVA, MISTRAL3 = (Whole(name, f"{name.title()}ForConditionalGeneration") for name in ("llava", "mistral3"))


def pixtral(file: TowerFile) -> Tower:
    side, patch = file.integer("image_size"), file.integer("patch_size")
    merges, merge = file.has("mm.patch_merger.weight"), file.keys.integer("spatial_merge_size", 1)
    vision = {
        "model_type": "pixtral",
        **file.transformer(),
        "image_size": side,
        "hidden_act": file.activation("gelu"),
    }
    config: Fields = {
        **(MISTRAL3 if merges else LLAVA).fields,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": file.has("mm.1.bias"),
        "image_token_index": file.placeholder("[IMG]"),
    }
    config |= {"spatial_merge_size": merge} if merges else {"vision_feature_select_strategy": "full"}
    settings = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": side},
        "patch_size": {"height": patch, "width": patch},
        **file.normalisation(),
    }
    heads = vision["num_attention_heads"]
    tensors = {
        name: tensor._replace(heads=heads) if tensor.sources[0].endswith(PERMUTED) else tensor
        for name, tensor in file.tensors(NAMES).items()
    }
    # The text part of Mistral Small 3.1 is a Llama in older files.
    text = {"model_type": "mistral"} if file.config["model_type"] == "llama" else {}
    return Tower(config, settings, tensors, text=text, unused=(BREAK,))


PIXTRAL = Projector("pixtral", dict.fromkeys(("llama", "mistral3"), LLAVA), pixtral)
"""A file of Mistral 3 has the tensors of its patch merger."""
