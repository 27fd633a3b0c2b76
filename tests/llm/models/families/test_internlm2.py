"""InternLM 2 has the bits of the same weights as Llama, and a tokenizer without the code in its checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from pace.llm import LLMModel
from pace.tokenizer.loading import load_tokenizer
from tests.checkpoints.vocabularies.test_vocabularies import HERE, golden, tokenizer_of
from tests.llm.models.towers.seeing import results
from tests.llm.models.variants import SIZES, randomise, save_pretrained
from tests.support import backends

HEADS, KV_HEADS, DIM = 4, 2, 8
FIELDS = {**SIZES, "num_key_value_heads": KV_HEADS, "eos_token_id": None, "pad_token_id": 0}
NAMES = {
    "lm_head.": "output.", "model.embed_tokens.": "model.tok_embeddings.", ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.", ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.", ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.", ".self_attn.wqkv.": ".attention.wqkv.",
}  # fmt: skip


def published_names(state: dict[str, Tensor], dim: int = DIM, kv_heads: int = KV_HEADS) -> dict[str, Tensor]:
    """The tensors of Llama, without a prefix, as InternLM 2 has them."""
    state = dict(state)
    for name in [name for name in state if ".self_attn.q_proj." in name]:
        parts = [state.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        by_head = [part.unflatten(0, (kv_heads, -1, dim)) for part in parts]
        state[name.replace(".q_proj.", ".wqkv.")] = torch.cat(by_head, 1).flatten(0, 2).contiguous()
    pattern = re.compile("|".join(map(re.escape, NAMES)))
    return {pattern.sub(lambda found: NAMES[found[0]], name): tensor for name, tensor in state.items()}


def publish(folder: Path, converted: Path, **fields: Any) -> Path:
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = json.loads((converted / "config.json").read_text())
    own = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": config.pop("attention_bias")}
    (folder / "config.json").write_text(json.dumps(config | own | fields))
    state = published_names(load_file(converted / "model.safetensors"))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_texts_are_those_of_llama(bias, tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    oracle = LlamaForCausalLM(LlamaConfig(**FIELDS, attention_bias=bias, rope_parameters=rope)).eval()
    randomise(oracle, "llama")
    save_pretrained(oracle, tmp_path / "llama")
    published = publish(tmp_path / "internlm2", tmp_path / "llama")
    ids, options = torch.arange(2, 40)[None], {"max_new_tokens": 20, "logprobs": 0}
    backend = "native" if "native" in backends() else "torch"
    found = []
    for folder in (tmp_path / "llama", published):
        with LLMModel(folder, dtype="float32", progress=False, backend=backend) as model:
            found.append(results(model.generate({"input_ids": ids}, **options)))
    assert found[0] == found[1]
    with torch.no_grad():
        assert found[0][0][0] == oracle.generate(ids, max_new_tokens=20, do_sample=False)[0, 38:].tolist()


# -- the tokenizer

SETTINGS = {
    "added_tokens_decoder": {"479": {"content": "<|im_end|>"}, "480": {"content": "<|im_start|>"}}, "bos_token": "<s>",
    "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}, "eos_token": "</s>",
    "chat_template": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    "pad_token": "</s>", "tokenizer_class": "InternLM2Tokenizer", "unk_token": "<unk>",
}  # fmt: skip


def save_tokenizer(folder: Path, kind: str = "plain", **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / f"{kind}.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


@pytest.mark.parametrize("kind", ["plain", "normalised"])
def test_texts_have_the_tokens_of_the_vocabulary(kind, tmp_path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, kind))
    plain = tokenizer_of(golden(kind).parts())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2, 481)
    for text in ("hello there", "a sophisticated fox", " two\n\nspaces, 你好"):
        ids = plain.encode(text).ids
        assert tokenizer(text)["input_ids"] == [1, *ids] and tokenizer.decode(ids) == plain.decode(ids)
    assert tokenizer("hello<|im_end|>")["input_ids"] == [1, *plain.encode("hello").ids, 479]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<s><|im_start|>hello<|im_end|>"
    assert tokenizer(chat, add_special_tokens=False)["input_ids"] == [1, 480, *plain.encode("hello").ids, 479]


def test_settings_of_the_tokenizer_that_are_refused(tmp_path) -> None:
    assert load_tokenizer(save_tokenizer(tmp_path, add_bos_token=False))("hello")["input_ids"][0] != 1
    with pytest.raises(ValueError, match="bos_token must be one of its special tokens; got 'x'"):
        load_tokenizer(save_tokenizer(tmp_path, bos_token="x"))
    with pytest.raises(ValueError, match="added_tokens_decoder must have ids from 480 on without a gap"):
        load_tokenizer(save_tokenizer(tmp_path, added_tokens_decoder={"481": {"content": "x"}}))
    with pytest.raises(ValueError, match="added_tokens_decoder must map ids to tokens with a content; got 'a'"):
        load_tokenizer(save_tokenizer(tmp_path, added_tokens_decoder={"a": {"content": "x"}}))
