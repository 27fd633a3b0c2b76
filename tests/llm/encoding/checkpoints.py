"""Tiny random checkpoints with tokenizers and sentence-transformers' files, for tests of vectors and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

END = "<|endoftext|>"
QWEN = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def byte_level(ends: bool = False) -> Tokenizer:
    """A tokenizer of bytes, and of the words yes and no. With `ends`, a text ends with END."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ye", "yes", "no", END, "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if ends:
        end = (END, vocabulary[END])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[end]
        )
    return tokenizer


def word_pieces() -> Tokenizer:
    """A tokenizer of letters, with the special tokens of BERT."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {token: index for index, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def save_causal(folder: Path, kind: str = "Qwen3ForCausalLM", ends: bool = False, **fields: Any) -> Any:
    """Saves a causal model, or a classifier made of one, with a tokenizer. Returns transformers' model in float32."""
    names = ["input_ids", "attention_mask"]
    return _save(folder, kind, byte_level(ends), QWEN | fields, names, eos_token=END, pad_token=END)


def save_bert(folder: Path, kind: str = "BertModel", **fields: Any) -> Any:
    """Saves a BERT with a tokenizer. Returns transformers' model in float32."""
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return _save(folder, kind, word_pieces(), BERT | fields, inputs, **names)


def _save(
    folder: Path, kind: str, tokenizer: Tokenizer, fields: dict[str, Any], inputs: list[str], **names: str
) -> Any:
    import transformers

    torch.manual_seed(0)
    size = tokenizer.get_vocab_size()
    pad = tokenizer.token_to_id(names["pad_token"])
    made = getattr(transformers, kind)
    config = made.config_class(vocab_size=size, pad_token_id=pad, **fields, attn_implementation="eager")
    model = made(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.5 if "embed" in name else 0.2)
            if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    model.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fields["max_position_embeddings"],
        model_input_names=inputs,
        **names,
    )
    wrapped.save_pretrained(folder)
    return model


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(folder: Path, *modules: tuple[str, dict[str, Any] | None]) -> None:
    """Writes modules.json: the Transformer, then (type, config) of each module; None for one without a folder."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if config is not None:
            write_json(folder / path / "config.json", config)
    write_json(folder / "modules.json", listed)


def write_dense(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the weights of a Dense."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
