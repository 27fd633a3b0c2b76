"""Shapes of embedding models as checkpoints with random weights and as GGUF files, and the operations of a text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.comparison.checkpoint import random_tensor
from benchmarks.comparison.convert import NO_VOCAB, convert
from pace.bench import shapes
from pace.llm.models.encoders.encoder_list import find_encoder, read_encoder_config
from pace.llm.models.model_list import read_config
from pace.ops import reference

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The first ids of every vocabulary. The token of any other id i is the word "ti"."""
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
LONGEST = 512
MIXED = (8, LONGEST)
"""Lengths of texts in a mixture: the logarithm is uniform."""


class Shape(NamedTuple):
    """A model that is published, or a small one for tests."""

    config: dict[str, Any]
    pooling: str
    """Name in sentence-transformers."""
    num_tokens: int
    """Tokens of a run: a few seconds on two cores."""


# fmt: off
_BERT = dict(architectures=["BertModel"], model_type="bert", vocab_size=30522, max_position_embeddings=LONGEST,
             type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12, pad_token_id=0)
SHAPES: dict[str, Shape] = {
    "all-minilm-l6-v2": Shape(_BERT | dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6,
                                           num_attention_heads=12), "mean", 16384),
    "bge-base": Shape(_BERT | dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                   num_attention_heads=12), "cls", 4096),
    "qwen3-embedding-0.6b": Shape(shapes.SHAPES["qwen3-0.6b"] | dict(vocab_size=151669, max_position_embeddings=32768),
                                  "lasttoken", 2048),
    "tiny": Shape(_BERT | dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                               num_attention_heads=2), "mean", 2048),
    "tiny-qwen3": Shape(shapes.SHAPES["qwen3-0.6b"] | dict(vocab_size=512, hidden_size=64, intermediate_size=128,
                                                           num_hidden_layers=2, num_attention_heads=2,
                                                           num_key_value_heads=1, head_dim=64), "lasttoken", 2048),
}
# fmt: on


def is_causal(config: dict[str, Any]) -> bool:
    return find_encoder(config) is None


def flops(config: dict[str, Any], length: int) -> int:
    """Operations of one text of `length` tokens; a multiply-add is two. Products of layers and attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, causal = config.get("head_dim", hidden // heads), is_causal(config)
    kv_heads = config.get("num_key_value_heads", heads)
    weights = hidden * head_dim * 2 * (heads + kv_heads) + (3 if causal else 2) * hidden * config["intermediate_size"]
    pairs = length * (length + 1) // 2 if causal else length**2
    return config["num_hidden_layers"] * (2 * length * weights + 4 * heads * head_dim * pairs)


def lengths_of(kind: str, num_tokens: int) -> list[int]:
    """The lengths of texts that have about `num_tokens` tokens together. `kind`: "mixed", or the length of all."""
    if kind != "mixed":
        return [int(kind)] * max(1, num_tokens // int(kind))
    first, last = MIXED
    quantiles = lambda count: [round(first * (last / first) ** ((i + 0.5) / count)) for i in range(count)]
    count = max(4, num_tokens * 100 // sum(quantiles(100)))
    lengths = quantiles(count)
    random.Random(0).shuffle(lengths)
    return lengths


def random_texts(vocab_size: int, lengths: list[int], seed: int) -> list[list[int]]:
    """Ids of words: other ones for each seed, so that no cache of prefixes helps."""
    generator = random.Random(seed)
    return [[generator.randrange(len(SPECIAL), vocab_size) for _ in range(length)] for length in lengths]


def ensure_checkpoint(name: str, folder: Path) -> Path:
    """Returns the directory of a shape's checkpoint below `folder`, and writes it the first time. The random weights
    are the same each time, and exact in bf16."""
    target = folder / name / "checkpoint"
    if not target.exists():
        partial = target.with_name("checkpoint.partial")
        partial.mkdir(parents=True, exist_ok=True)
        _write(SHAPES[name], partial)
        partial.rename(target)
    return target


def _write(shape: Shape, folder: Path) -> None:
    config = shape.config | {"torch_dtype": "bfloat16"}
    model_class, parsed = read_config(config) if is_causal(config) else read_encoder_config(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name.removeprefix("bert."): _random(name, target.shape, generator)
        for name, [target, *_] in model_class(parsed, torch.float32, reference).targets().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_tokenizer(config["vocab_size"], not is_causal(config), folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
    )
    for path, _ in modules[1:]:
        (folder / path).mkdir()
    modes = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    fields = {f"pooling_mode_{mode}": kind == shape.pooling for kind, mode in modes.items()}
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config["hidden_size"], **fields})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False})


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return random_tensor("bias" if name.endswith(".bias") else name.lower(), shape, generator)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def _write_tokenizer(vocab_size: int, has_special: bool, folder: Path) -> None:
    """Writes a tokenizer of words. With `has_special`, a text begins with [CLS] and ends with [SEP], as for BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), vocab_size))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    if has_special:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    inputs = ["input_ids", "attention_mask"]
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONGEST, "model_input_names": inputs}
    _write_json(folder / "tokenizer_config.json", fields | names)


def ensure_gguf(checkpoint: Path, source: Path, kind: str) -> Path:
    """Returns the GGUF file of a checkpoint with weights of a kind that llama.cpp's converter knows: f32, f16, bf16,
    q8_0. Writes it the first time. `source`: llama.cpp's. Raises subprocess.CalledProcessError."""
    target = checkpoint.parent / f"{kind}.gguf"
    if not target.exists():
        causal = is_causal(json.loads((checkpoint / "config.json").read_text()))
        convert(source, checkpoint, target, kind, *([NO_VOCAB] if causal else []))
    return target
