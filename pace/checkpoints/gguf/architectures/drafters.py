"""The architecture of GGUF files of EAGLE-3 drafters, which draft for the model of another file."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.forms import DIFFERENCES
from pace.checkpoints.gguf.architectures.names import LLAMA, TensorNames

EAGLE3_NAMES = TensorNames(
    {
        "token_embd": "embed_tokens",
        "enc.output_norm": "input_norm",
        "output_norm": "norm",
        "output": "lm_head",
    },
    "layers",
    {**LLAMA.inner, "attn_norm_2": "hidden_norm"},
)


def eagle3(fields: Fields, keys: Keys) -> Fields:
    """Adds the class, the layers whose inputs are read, and the number of tokens of its own head."""
    layers = keys.required(name := "target_layers", keys.numbers(name))
    head = keys.shapes.get("lm_head.weight")
    return fields | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": layers.tolist(),
        "draft_vocab_size": None if head is None else head[0],
    }


DRAFTERS = (
    Architecture(
        "eagle3", "llama", names=EAGLE3_NAMES, permuted=True, forms={"d2t": DIFFERENCES}, embeds=False, convert=eagle3,
        keys={
            "target_hidden_size": Key("target_hidden_size"),
            "norm_before_residual": Key("norm_before_residual", False),
            "norm_before_fc": Key("norm_before_fc", False),
        },
    ),
)  # fmt: skip
